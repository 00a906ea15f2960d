"""Linears that move to other schemes while their weights are sharded, or gathered when they run: training goes on as on
one process, bit for bit."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.mesh_equality import UNTIED, assembled, differences, random_micro_batch, state_digests
from qtrain.parallel.mesh import make_mesh
from qtrain.quant import LowBitLinear
from qtrain.quant.scheme_map import Spec, scheme_of
from qtrain.quant.swap import swap
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.run import Run
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.worlds import run_ranks

QKV, OUT, DOWN, HEAD = "layers.0.attn.qkv", "layers.0.attn.o_proj", "layers.1.mlp.down_proj", "lm_head"
SIZE = {"seq_len": 24, "batch_size": 8, "micro_batch_size": 2, "device": "cpu", "seed": 1}
DELAYED: Spec = {"scheme": "fp8_tensorwise", "scaling": "delayed"}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Spec]]]] = {
    "codes of rows and columns": (
        {"quantize": "int8"},
        [{QKV: "fp8_tensorwise", DOWN: "bf16", OUT: {"scheme": "int8", "grad_input": "bf16"}}, {DOWN: "int8"}],
    ),
    "codes on the wire": (
        {"quantize": "fp8_tensorwise", "quantize_lm_head": True},
        [{QKV: "fp8_rowwise", HEAD: "bf16"}, {QKV: "fp8_tensorwise", HEAD: "int8", DOWN: "switchback"}],
    ),
    "delayed scales, whole matrices": (
        {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "optim": "muon"},
        [{QKV: "int8"}, {QKV: DELAYED, DOWN: "bf16"}],
    ),
    "rounded stochastically": ({"quantize": "nvfp4"}, [{QKV: "int8"}, {QKV: "bf16", DOWN: "fp8_rowwise"}]),
}


def _train(case: str, shape: str, reshard: str) -> dict[str, Any]:
    """On every rank: three steps, with moves before the second and the third."""
    mesh, (more, moves) = make_mesh(*map(int, shape.split("x")), "cpu"), CASES[case]
    chosen = {"dp_replicate": mesh.replicate, "dp_shard": mesh.shard, "reshard_after_forward": reshard, **more}
    run = assembled(LanguageSettings(**{"optim": "adamw_8bit", "deterministic": True, **SIZE, **chosen}), UNTIED, mesh)
    numbers = range(mesh.dp_rank, 4, mesh.dp_size)
    return {"steps": _steps(run, moves, numbers), "digests": state_digests(run.parallel, run.quantized, run.optimizer)}


def _steps(run: Run, moves: Sequence[dict[str, Spec]], numbers: Sequence[int]) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps on micro-batches of these numbers; moves: before each but the first."""
    forward, found = language_forward(run.model, None), []
    for step in range(1 + len(moves)):
        if step:
            schemes = {name: scheme_of(spec, "--quantize_overrides") for name, spec in moves[step - 1].items()}
            run.parallel.reassign(run.model, schemes)
        batches = [random_micro_batch(step, number) for number in numbers]
        gradients = compute_gradients(run.model, forward, run.quantized, batches, step, parallel=run.parallel)
        apply_gradients(run.optimizer, run.quantized, gradients, lr=1e-3, clip_grad_norm=0.5, parallel=run.parallel)
        found.append((gradients.loss, gradients.norm))
    return found


@functools.cache
def _one(case: str) -> dict[str, Any]:
    return run_ranks(1, _train, case, "1x1", "never")[0]


@pytest.mark.sweep
@pytest.mark.parametrize(("shape", "reshard"), [("1x2", "never"), ("1x2", "always"), ("2x2", "always")])
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_on_one_process(case, shape, reshard):
    for of_rank in run_ranks(4 if shape == "2x2" else 2, _train, case, shape, reshard):
        assert differences(_one(case), of_rank) == ""


@pytest.mark.sweep
def test_weights_in_host_memory_move_too(monkeypatch):
    monkeypatch.setattr(Options, "offload_on", lambda self, device: self.offload)  # as on a GPU
    found = []
    for offload in ([], ["weights", "gradients"]):
        settings = LanguageSettings(quantize="fp8_tensorwise", dtype="fp32", offload=offload, **SIZE)
        run = assembled(settings, UNTIED, make_mesh(1, 1, "cpu"))
        assert run.parallel.reshards == bool(offload)
        names = [choice.name for choice in run.quantized.choices if choice.scheme]
        # One micro-batch: sums of several are of another order in host memory.
        found.append(_steps(run, [dict.fromkeys(names, spec) for spec in ("int8", "bf16", "nvfp4")], [0]))
    assert found[0] == found[1]


def _share_in_memory(reshard: str) -> float:
    """On every rank: the bytes of weights and codes that are in memory at most while all linears move, of those of the
    weights in full."""
    settings = LanguageSettings(quantize="int8", dp_shard=2, reshard_after_forward=reshard, **SIZE)
    run, found = assembled(settings, UNTIED, make_mesh(1, 2, "cpu")), []
    weights = [p for p in run.model.parameters() if p.ndim > 1]

    def measured(*arguments: Any) -> LowBitLinear:
        linears = [module for module in run.model.modules() if isinstance(module, LowBitLinear)]
        tensors = [*weights, *(buffer for linear in linears for buffer in linear.weight_codes.buffers())]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        found.append(sum(storage.nbytes() for storage in storages.values()))
        return swap(*arguments)

    everywhere = {choice.name: scheme_of("fp8_rowwise", "-") for choice in run.quantized.choices if choice.scheme}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["qtrain.quant.reassign"], "swap", measured)
        run.parallel.reassign(run.model, everywhere)
    return max(found) / sum(p.numel() * p.element_size() for p in weights)


@pytest.mark.parametrize(("reshard", "share"), [("always", 0.01), pytest.param("never", 0.6, marks=pytest.mark.sweep)])
def test_weights_stay_out_of_memory_while_all_linears_move(reshard, share):
    """never: embedding and head are in full, and codes of the layers."""
    assert max(run_ranks(2, _share_in_memory, reshard)) < share
