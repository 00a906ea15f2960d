"""Linears that move to other schemes while their weights are sharded, or gathered when they run: training goes on as on
one process, bit for bit."""

import functools
from typing import Any

import pytest

from benchmarks.mesh_equality import UNTIED, assembled, differences, random_micro_batch, state_digests
from qtrain.parallel.mesh import make_mesh
from qtrain.quant.scheme_map import Spec, scheme_of
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.worlds import run_ranks

QKV, DOWN, HEAD = "layers.0.attn.qkv", "layers.1.mlp.down_proj", "lm_head"
DELAYED: Spec = {"scheme": "fp8_tensorwise", "scaling": "delayed"}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Spec]]]] = {
    "codes of rows and columns": ({"quantize": "int8"}, [{QKV: "fp8_tensorwise", DOWN: "bf16"}, {DOWN: "int8"}]),
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
    common = {"seq_len": 24, "batch_size": 8, "micro_batch_size": 2, "deterministic": True, "device": "cpu", "seed": 1}
    run = assembled(LanguageSettings(**{"optim": "adamw_8bit", **common, **chosen}), UNTIED, mesh)
    forward, found = language_forward(run.model, None), []
    for step in range(3):
        if step:
            schemes = {name: scheme_of(spec, "--quantize_overrides") for name, spec in moves[step - 1].items()}
            run.parallel.reassign(run.model, schemes)
        batches = [random_micro_batch(step, number) for number in range(mesh.dp_rank, 4, mesh.dp_size)]
        gradients = compute_gradients(run.model, forward, run.quantized, batches, step, parallel=run.parallel)
        apply_gradients(run.optimizer, run.quantized, gradients, lr=1e-3, clip_grad_norm=0.5, parallel=run.parallel)
        found.append((gradients.loss, gradients.norm_value))
    return {"steps": found, "digests": state_digests(run.parallel, run.quantized, run.optimizer)}


@functools.cache
def _one(case: str) -> dict[str, Any]:
    return run_ranks(1, _train, case, "1x1", "never")[0]


@pytest.mark.sweep
@pytest.mark.parametrize(("shape", "reshard"), [("1x2", "never"), ("1x2", "always"), ("2x2", "always")])
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_on_one_process(case, shape, reshard):
    for of_rank in run_ranks(4 if shape == "2x2" else 2, _train, case, shape, reshard):
        assert differences(_one(case), of_rank) == ""
