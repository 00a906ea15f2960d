"""Full sharding of a model with adapters: frozen weights are divided too, and all comes out as on one process."""

import math
from typing import Any

import pytest
import torch

from benchmarks.mesh_equality import MIXTURE, UNTIED, differences, random_micro_batch, state_digests
from qtrain.comm.ranks import rank
from qtrain.models import Lora, ModelSource, add_lora, build_model, merge_lora
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding import weights
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.parallel.sharding.shards import local_tensors
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.tensors.lazy import plain_tensors
from qtrain.train.state.fingerprints import fingerprint
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled
from tests.worlds import run_ranks

EXPERTS = ("o_proj", "experts.gate_up_proj", "experts.down_proj")
CASES: dict[str, tuple[Lora, str, dict[str, Any]]] = {
    "bf16": (Lora(r=4), "bf16", {}),
    "a scale for all rows": (Lora(r=4), "fp8_tensorwise", {}),
    "scales of rows and columns": (Lora(r=4), "int8", {}),
    "rounded stochastically": (Lora(r=4), "int8", {"stochastic_rounding": True}),
    "nf4, DoRA": (Lora(r=4, base="nf4", dora=True), "bf16", {}),
    "int8": (Lora(r=4, base="int8"), "bf16", {}),
    "fp8": (Lora(r=4, base="fp8"), "bf16", {}),
    "experts on nf4": (Lora(r=4, base="nf4", targets=EXPERTS), "bf16", {}),
}


def _train(case: str, mesh_shape: str, full_shard: bool, micro_batches: int) -> dict[str, Any]:
    """Losses, digests of what trains, fingerprints of what does not, the merged weights, and bytes of frozen ones."""
    weights.ALONE_BYTES = 1 << 14
    mesh, (lora, quantize, options) = make_mesh(*map(int, mesh_shape.split("x")), "cpu"), CASES[case]
    scheme = SCHEMES.make(quantize, options, "--quantize") if lora.base == "none" else base_scheme(lora.base, quantize)
    config = {**(MIXTURE if "experts" in case else UNTIED), "tie_word_embeddings": False}
    source = ModelSource("small", config, "--model")
    model = build_model(source, dtype=torch.bfloat16, seed=1, lazy=full_shard)
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, realize=not full_shard)
    add_lora(model, lora, 5)
    units = decoder_units(model) if full_shard else ()
    parallel = DataParallel(model, quantized, mesh, deterministic=True, units=units)
    groups = parameter_groups(model, 0.1)
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    optimizer = OPTIMIZERS.make("adamw_8bit", {}, "--optim").build(groups, 1e-2, seed=3)
    optimizer.place(parallel.placements)
    quantized.track_versions(optimizer)
    forward, found = language_forward(model, None), []
    for step in range(3):
        batches = [
            random_micro_batch(step, i * mesh.dp_size + mesh.dp_rank) for i in range(micro_batches // mesh.dp_size)
        ]
        gradients = compute_gradients(model, forward, quantized, batches, step, parallel=parallel)
        apply_gradients(optimizer, quantized, gradients, lr=1e-2, clip_grad_norm=0.5, parallel=parallel)
        assert gradients.on_device.norm.item() == gradients.norm
        assert gradients.on_device.loss.item() == pytest.approx(gradients.loss, rel=1e-6)
        found.append((gradients.loss, gradients.norm))
    frozen = [p for p in model.parameters() if p.ndim > 1 and not p.requires_grad]
    held = sum(t.untyped_storage().nbytes() for p in frozen for t in plain_tensors(p))
    held += sum(t.nbytes for p in frozen for t in local_tensors(parallel.master(p)) if full_shard)
    result = {"steps": found, "digests": state_digests(parallel, quantized, optimizer), "frozen": held}
    result["prints"] = fingerprint(model, parallel.master)
    parallel.restore_full_weights()
    if rank() == 0:
        merge_lora(model)
        named = model.named_parameters()
        result["merged"] = {name: p.detach().sum(dtype=torch.float64).item() for name, p in named}
    return result


@pytest.mark.parametrize(
    ("case", "mesh"),
    sampled(
        [(case, "1x2") for case in CASES] + [("nf4, DoRA", "1x3"), ("scales of rows and columns", "2x2")],
        lambda case, mesh: mesh != "1x2" or case in ("bf16", "fp8", "rounded stochastically", "experts on nf4"),
    ),
)
def test_it_trains_as_one_process(case, mesh):
    world = math.prod(map(int, mesh.split("x")))
    (one,) = run_ranks(1, _train, case, "1x1", False, 2 * world)
    many = run_ranks(world, _train, case, mesh, True, 2 * world)
    for of_rank in many:
        assert differences(one, of_rank) == ""
        assert of_rank["prints"] == one["prints"] and len(one["prints"]) > 10
    assert many[0]["merged"] == one["merged"]
    shard = int(mesh[-1])
    assert max(of_rank["frozen"] for of_rank in many) < one["frozen"] * (1 / shard + 0.05)


@pytest.mark.parametrize(
    "case",
    sampled([*CASES], lambda case: case not in ("bf16", "scales of rows and columns", "nf4, DoRA", "experts on nf4")),
)
def test_one_process_may_have_frozen_weights_in_host_memory(case):
    """Which come when their layers run, and go. `frozen` counts what is left on the device, here also the host's."""
    plain, moved = (_train(case, "1x1", full_shard, 2) for full_shard in (False, True))
    assert differences(plain, moved) == ""
    assert moved["prints"] == plain["prints"] and moved["merged"] == plain["merged"]
    assert moved["frozen"] == plain["frozen"], "of all of it once, which the host has"
