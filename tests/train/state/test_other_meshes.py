"""A checkpoint saved on one mesh and resumed on another is the same state, bit for bit; so is what that one saves."""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.mesh_equality import CONFIG, SCHEMES_COMPARED, random_micro_batch, state_digests
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.restore import restore
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import RunFolder
from qtrain.train.state.state_dict import TrainState
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled
from tests.system import contents
from tests.worlds import run_ranks

HOPS = ("1x4", "1x1", "1x2", "1x3", "2x2", "1x4")
"""replicate x shard: saved at 4 and resumed at 1, 2, 3 and 2x2, and back."""


def _hop(scheme: str, optimizer_name: str, mesh_shape: str, source: Path | None, folder: Path) -> dict[str, Any]:
    """On a mesh: train two steps, or resume from `source`; then save to `folder`, in the background on odd meshes.
    Returns digests of the weights, codes and optimizer states."""
    mesh = make_mesh(*map(int, mesh_shape.split("x")), "cpu")
    name, options = SCHEMES_COMPARED[scheme]
    seed = 1 if source is None else 2
    model = build_model(ModelSource("small", CONFIG, "--model"), dtype=torch.bfloat16, seed=seed)
    quantized = quantize_linears(model, SCHEMES.make(name, options, "--quantize"), seed=0, head=model.lm_head)
    spec = OPTIMIZERS.make(optimizer_name, {}, "--optim")
    groups = parameter_groups(model, 0.1)
    hidden = {id(p) for group in groups if group["hidden"] for p in group["params"]}
    parallel = DataParallel(model, quantized, mesh, lambda p: spec.needs_whole(id(p) in hidden), deterministic=True)
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    optimizer = spec.build(groups, 1e-3, seed=3)
    optimizer.place(parallel.placements)
    quantized.track_versions(optimizer)
    settings = LanguageSettings(n_steps=10, device="cpu")
    run = Run(
        settings, "script", RunFolder(folder, source), torch.device("cpu"), model, quantized, optimizer, TrainState()
    )
    run.parallel = parallel
    if source is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            restore(run)
        run.state.run_id = "same"
    else:
        forward = language_forward(model, None)
        for step in range(2):
            batches = [random_micro_batch(step, mesh.rank)]
            gradients = compute_gradients(model, forward, quantized, batches, step, parallel=parallel)
            apply_gradients(optimizer, quantized, gradients, lr=1e-3, clip_grad_norm=0.5, parallel=parallel)
            run.state.step += 1
    if mesh.shard % 2:
        run.begin_save()
        run.background.finish()
    else:
        run.save()
    return state_digests(parallel, quantized, optimizer)


@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    sampled(
        [
            ("int8", "adamw_8bit"),
            ("int8_weight", "muon"),
            ("fp8_tensorwise delayed", "adamw_4bit"),
            ("bitnet", "adamw_schedule_free"),
            ("bf16", "q_galore_adamw"),
            ("int4_weight", "adamw"),
            ("fp8_blockwise", "adamw_8bit"),
        ],
        lambda scheme, optimizer: scheme != "int8",
    ),
)
def test_saved_at_4_and_resumed_at_1_2_3_and_2x2_and_back(scheme, optimizer, tmp_path):
    source, digests, tensors = None, {}, {}
    for number, mesh in enumerate(HOPS):
        folder = tmp_path / f"{number} {mesh}"
        found = run_ranks(math.prod(map(int, mesh.split("x"))), _hop, scheme, optimizer, mesh, source, folder)
        source = folder / "checkpoints/00000002"
        saved = {name: t for name, t in contents(source).items() if not name.startswith("rng.")}
        digests, tensors = digests or found[0], tensors or saved
        assert all(of_rank == digests for of_rank in found), mesh
        assert saved.keys() == tensors.keys() and len(saved) > 20
        assert not [name for name in saved if not torch.equal(saved[name], tensors[name])], mesh
