"""Whether training comes out the same on any mesh: `python -m benchmarks.mesh_equality`.

Trains a small model in every scheme x optimizer on one process and on several meshes, with the same twelve
micro-batches a step, and compares losses, gradient norms, weights, low-bit codes and optimizer states: bit for bit with
--deterministic, losses within a relative 1e-3 without (1e-5 with --dtype fp32 and nothing quantized). The vocabulary is
odd, and quantization blocks cross the shards' borders.

With --tp N, whose ranks add products of their own, the first mesh is compared with one process as without
--deterministic, and the other meshes with that one.

    python -m benchmarks.mesh_equality                                      on the CPU, the whole matrix
    python -m benchmarks.mesh_equality --full_shard                         layers gathered when they run
    python -m benchmarks.mesh_equality --cp 2                               two ranks share every sequence
    python -m benchmarks.mesh_equality --tp 2 --ep 2 --meshes 1x2 2x1 1x4   experts over four ranks
    python -m benchmarks.mesh_equality --device cuda --meshes 1x1 1x4 4x1 2x2
    python -m benchmarks.mesh_equality --device cuda --share_gpu            all processes on one GPU
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtrain.comm.launch import run_processes
from qtrain.comm.ranks import all_gather, join_world, leave_world, local_rank, rank
from qtrain.comm.wire import sent
from qtrain.data.batch import Batch
from qtrain.models import ModelSource
from qtrain.parallel.layers.context_in_order import context_of
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import Mesh, make_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.shards import Sharded
from qtrain.parallel.sharding.weights import GatheredMaster, gather_weights
from qtrain.tensors.lazy import plain_tensors
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import Prepared, prepare
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.run import Run
from qtrain.train.step.forward import language_forward
from qtrain.train.step.in_backward import OptimizerInBackward
from qtrain.train.step.step import apply_gradients, compute_gradients

CONFIG = {
    "model_type": "llama",
    "vocab_size": 263,
    "hidden_size": 192,
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
UNTIED = {**CONFIG, "tie_word_embeddings": False}  # for --full_shard, which shards such embeddings and heads too
EXPERTS = 4
MIXTURE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "hidden_size": 128,
    "head_dim": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
"""For --ep: a dense layer, and one of experts."""
TWO_HEADS = {"num_key_value_heads": 2}
"""For --tp 2."""
MICRO_BATCHES, SEQUENCES, TOKENS = 12, 2, 24  # in a step, in a micro-batch, in a sequence
CLOSE, CLOSE_FP32 = {"losses": 1e-3, "norms": 1e-2}, {"losses": 1e-5, "norms": 1e-4}
"""Relative differences without --deterministic. One process adds twelve gradients in bf16; each of several processes
adds fewer, and their sums are added in fp32. In fp32 the order of additions is a difference of 1e-7, which training
without quantization keeps (2e-7 after 20 steps); quantization, of optimizer states too, turns it into other codes
wherever a value crosses the border between two (1e-5 to 1e-3 after 20 steps)."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCHEMES_COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "fp8_tensorwise": ("fp8_tensorwise", {}),
    "int8 tensorwise": ("int8", {"granularity": "tensorwise"}),
    "fp8_tensorwise delayed": ("fp8_tensorwise", {"scaling": "delayed"}),
    "fp8_rowwise": ("fp8_rowwise", {}),
    "fp8_blockwise": ("fp8_blockwise", {}),
    "int8_blockwise": ("int8_blockwise", {}),
    "by name": ("fp8_tensorwise", {"scaling": "delayed"}),
    "bitnet": ("bitnet", {}),
    "bitnet int8 backward": ("bitnet", {"backward": "int8"}),
    "binary": ("binary", {}),
    "int8_weight": ("int8_weight", {}),
    "int4_weight": ("int4_weight", {}),
    "qat": ("qat", {"activations": "int8"}),
}
OVERRIDES = {"by name": {"layers.0.mlp.*": "bf16", "*.o_proj": "int8_weight", "layers.1.attn.qkv": "int8"}}
"""--quantize_overrides."""
OPTIMIZERS_COMPARED = ("adamw", "adamw_8bit", "adamw_4bit", "muon", "q_galore_adamw")
MESHES = ("1x1", "1x2", "2x1", "1x3", "1x4", "2x2")


def assembled(settings: LanguageSettings, config: Mapping[str, Any], mesh: Mesh) -> Run:
    """The run that llm_pretrain.py makes of these settings, on `mesh`, for a model with this config."""
    prepared = prepared_on(settings, config, mesh)
    return assemble(prepared, *build_quantized(prepared))


def prepared_on(settings: LanguageSettings, config: Mapping[str, Any], mesh: Mesh) -> Prepared:
    """What `assembled` builds."""
    checked = check_settings(settings, "mesh_equality")
    # A GPU's datasheet plans the run: the peaks of a CPU would be measured on every rank.
    checked = replace(checked, mesh=mesh, settings=replace(checked.settings, gpu="h200"))
    source = ModelSource("small", dict(config), "--model")
    model_config = source.model_config()
    parts = ModelParallel.on(model_config, mesh)
    context = context_of(mesh, deterministic=settings.deterministic)
    architecture = LanguageArchitecture(source, "native", settings.seq_len, model_config, parts, context)
    return prepare(checked, architecture, data=())


def train(
    scheme: str,
    optimizer_name: str,
    mesh: Mesh,
    device: torch.device,
    steps: int,
    deterministic: bool,
    micro_batches: int = MICRO_BATCHES,
    full_shard: bool = False,
    config: Mapping[str, Any] = CONFIG,
    dtype: torch.dtype = torch.bfloat16,
    clip_grad_norm: float = 0.5,
    optimizer_in_backward: bool = False,
) -> dict[str, Any]:
    """Losses and norms of the steps, bytes that this rank sent in them, and digests of all that training has changed.
    micro_batches: of all ranks, in a step."""
    name, options = SCHEMES_COMPARED[scheme]
    if name == "bitnet" and "num_experts" in config:
        options = {**options, "sub_norm": False}  # no mixture has those norms
    settings = LanguageSettings(
        quantize=name,
        quantize_kwargs=options,
        quantize_overrides=OVERRIDES.get(scheme),
        optim=optimizer_name,
        lr=1e-3,
        weight_decay=0.1,
        clip_grad_norm=clip_grad_norm,
        optimizer_in_backward=optimizer_in_backward,
        batch_size=SEQUENCES * micro_batches,
        micro_batch_size=SEQUENCES,
        seq_len=TOKENS,
        dp_replicate=mesh.replicate,
        dp_shard=mesh.shard,
        tp=mesh.tp,
        ep=mesh.ep,
        cp=mesh.cp,
        reshard_after_forward="always" if full_shard and mesh.shard > 1 else "never",
        deterministic=deterministic,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="fp32" if dtype == torch.float32 else "bf16",
        seed=1,
    )
    run = assembled(settings, config, mesh)
    model, quantized, parallel = run.model, run.quantized, run.parallel
    in_backward = OptimizerInBackward(run.optimizer, parallel) if optimizer_in_backward else None
    forward, found = language_forward(model, None), []
    sent.clear()
    for step in range(steps):
        numbers = range(mesh.reader, micro_batches, mesh.readers)
        batches = [random_micro_batch(step, number) for number in numbers]
        gradients = compute_gradients(
            model, forward, quantized, batches, step, in_backward=in_backward, parallel=parallel
        )
        apply_gradients(
            run.optimizer,
            quantized,
            gradients,
            lr=settings.lr,
            clip_grad_norm=clip_grad_norm,
            in_backward=in_backward,
            parallel=parallel,
        )
        found.append((gradients.loss, gradients.norm))
    return {"steps": found, "sent": dict(sent), "digests": state_digests(parallel, quantized, run.optimizer)}


def random_micro_batch(step: int, number: int) -> Batch:
    """2 x 24 random tokens, of which a third is not trained on."""
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + number)
    tokens = torch.randint(CONFIG["vocab_size"], (SEQUENCES, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 1 / 3] = -100
    return Batch(tokens[:, :-1].contiguous(), labels)


def state_digests(parallel: DataParallel, quantized, optimizer) -> dict[str, str]:
    """A digest of each weight, of the codes of each linear and of each optimizer state, of full shape; of experts one
    for each expert, of other tensors one for each rank of --tp."""
    found: dict[str, str] = {}
    part = f" of tensor rank {parallel.mesh.tp_rank}" * (parallel.mesh.tp > 1)
    group = parallel.mesh.model_group
    first, count = (0, EXPERTS) if group is None else (group.rank * EXPERTS // group.ranks, EXPERTS // group.ranks)

    def add(name: str, tensor: Tensor, *, is_expert: bool, dim: int = 0) -> None:
        if not is_expert or tensor.numel() == 1:
            found[name + part] = _digest(tensor)
        else:
            found.update({f"{name} {first + i}": _digest(t) for i, t in enumerate(tensor.chunk(count, dim))})

    def add_weight(sharded: Sharded, tensors: list[Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            add(f"weight {sharded.name} {i}", tensor, is_expert=".experts." in sharded.name)

    gather_weights([GatheredMaster(s, add_weight) for s in parallel.parameters if s.mesh.shard > 1])
    for sharded in parallel.parameters:
        if sharded.mesh.shard == 1:
            add_weight(sharded, plain_tensors(sharded.parameter))
    if parallel.full_shard is not None:
        parallel.full_shard.gather()
    for index, linear in enumerate(quantized.linears):
        for name, tensor in linear.weight_codes.named_buffers(remove_duplicate=False):
            along_columns = name.startswith("grad_input") and tensor.ndim == 2
            add(f"codes {index} {name}", tensor, is_expert=linear.groups is not None, dim=int(along_columns))
    names = {id(sharded.master): sharded.name for sharded in parallel.parameters}
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if p.numel() and isinstance(whole, Tensor):  # not the placeholder of another rank's
                    name, is_expert = names[id(p)], ".experts." in names[id(p)]
                    state, _, number = key.rpartition("_")
                    if is_expert and number.isdigit():  # of one projection
                        key = f"{state}_{int(number) + first * len(group['parts']) // EXPERTS}"
                        is_expert = False
                    add(f"state {name} {key}", whole, is_expert=is_expert)
    return {name: digest for own in all_gather(found) for name, digest in own.items()}


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:16]


def promised(scheme: str, optimizer: str, dtype: str) -> Mapping[str, float]:
    """Relative differences that are allowed without --deterministic."""
    quantizes = scheme != "bf16" or optimizer not in ("adamw", "muon")
    return CLOSE if quantizes or dtype == "bf16" else CLOSE_FP32


def differences(one: Mapping[str, Any], other: Mapping[str, Any], close: Mapping[str, float] | None = None) -> str:
    """How a result differs from that of one process; '' if it does not. close: what may differ; None: nothing."""
    if close is not None:
        for index, (kind, limit) in enumerate(close.items()):
            pairs = [(a[index], b[index]) for a, b in zip(one["steps"], other["steps"], strict=True)]
            worst = max(abs(a - b) / abs(a) for a, b in pairs)
            if worst > limit:
                return f"{kind} differ by {worst:.1e}"
        return ""
    for step, (a, b) in enumerate(zip(one["steps"], other["steps"], strict=True), start=1):
        if list(a) != list(b):
            return f"step {step}: loss, norm {a} and {b}"
    a, b = one["digests"], other["digests"]
    odd = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return f"{len(odd)} of {len(a)} tensors, first {odd[0]}" if odd else ""


def share_gpu() -> None:
    """Have this process use the first GPU, as all others of the machine do: each is a machine of its own to NCCL, which
    else refuses a GPU that another process has, and its messages take the loopback interface."""
    os.environ.update(
        NCCL_HOSTID=f"rank{local_rank()}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_MNNVL_ENABLE="0",
        NCCL_NVLS_ENABLE="0",
        LOCAL_RANK="0",
    )


def work(arguments: argparse.Namespace) -> None:
    """One process of a mesh: train every case; rank 0 writes the results."""
    torch.set_num_threads(1)
    if arguments.share_gpu:
        share_gpu()
    device = torch.device("cuda", local_rank()) if arguments.device == "cuda" else torch.device("cpu")
    join_world(device)
    replicate, shard = map(int, arguments.work.split("x"))
    tp, ep, cp = (arguments.tp, arguments.ep, arguments.cp) if replicate * shard > 1 else (1, 1, 1)
    mesh, results = make_mesh(replicate, shard, device.type, tp, ep, cp), {}
    config = MIXTURE if arguments.ep > 1 else UNTIED if arguments.full_shard else CONFIG
    for scheme in arguments.schemes:
        for optimizer in arguments.optimizers:
            results[f"{scheme} | {optimizer}"] = train(
                scheme,
                optimizer,
                mesh,
                device,
                arguments.steps,
                not arguments.not_deterministic,
                full_shard=arguments.full_shard,
                config=config | TWO_HEADS if arguments.tp > 1 else config,
                dtype=DTYPES[arguments.dtype],
            )
            if rank() == 0:
                Path(arguments.out).write_text(json.dumps(results))
    leave_world()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="replicate x shard, such as 2x2")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES_COMPARED), choices=list(SCHEMES_COMPARED))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS_COMPARED))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of weights and gradients")
    parser.add_argument("--not_deterministic", action="store_true", help="as runs are without --deterministic")
    parser.add_argument("--full_shard", action="store_true", help="ZeRO-3 on meshes that shard, instead of ZeRO-2")
    parser.add_argument("--share_gpu", action="store_true", help="all processes on one GPU, with --device cuda")
    parser.add_argument("--tp", type=int, default=1, help="TP degree, 1 or 2: each rank of a mesh is as many processes")
    parser.add_argument("--ep", type=int, default=1, help="EP degree, of a small MoE")
    parser.add_argument("--cp", type=int, default=1, help="CP degree; meshes that it does not divide are left out")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share_gpu and arguments.device != "cuda":
        parser.error("--share_gpu: give it with --device cuda")
    if arguments.work:
        work(arguments)
        return 0
    return compare(arguments)


def compare(arguments: argparse.Namespace) -> int:
    """Run the meshes one after the other and print the table. Returns 1 if any result differs."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mesh in dict.fromkeys(("1x1", *arguments.meshes)):
            replicate, shard = map(int, mesh.split("x"))
            if mesh != "1x1" and replicate * shard % arguments.cp:
                continue
            out, started = Path(folder) / f"{mesh}.json", time.monotonic()
            command = [sys.executable, "-m", "benchmarks.mesh_equality", *sys.argv[1:], "--work", mesh, "--out", out]
            code = run_processes(replicate * shard * (arguments.tp if mesh != "1x1" else 1), list(map(str, command)))
            if not out.exists():
                print(f"{mesh}: the processes ended with code {code} and no result", file=sys.stderr)
                return 1
            results[mesh] = json.loads(out.read_text())
            print(f"{mesh}: {len(results[mesh])} cases in {time.monotonic() - started:.0f} s", flush=True)
    return print_table(results, arguments)


def print_table(results: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace) -> int:
    one, failures = results["1x1"], 0
    # With --tp the reference of all other meshes.
    first = next((mesh for mesh in results if mesh != "1x1"), "") if arguments.tp > 1 else ""
    print(f"{'scheme | optimizer':44}" + "".join(f"{mesh:>8}" for mesh in results if mesh != "1x1"))
    notes = []
    for case in one:
        scheme, optimizer = case.split(" | ")
        line = f"{case:44}"
        for mesh, found in results.items():
            if mesh != "1x1":
                in_order = not arguments.not_deterministic and mesh != first
                close = None if in_order else promised(scheme, optimizer, arguments.dtype)
                reference = one if mesh == first or not first else results[first]
                odd = differences(reference[case], found[case], close) if case in found else "not run"
                line += f"{'DIFFERS' if odd else 'equal' if in_order else 'close':>8}"
                notes += [f"{case} on {mesh}: {odd}"] if odd else []
                failures += bool(odd)
        print(line)
    print("\n".join(notes))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
