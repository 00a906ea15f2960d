"""Processes that divide the experts of a mixture train as one does, bit for bit with --deterministic."""

import functools
import math
from typing import Any

import pytest
import torch

from qtrain.bench.mesh_equality import MIXTURE, SCHEMES_COMPARED, differences, train
from qtrain.distributed.mesh import expert_mesh_shape, make_mesh
from qtrain.errors import UserError
from tests.cases import sampled
from tests.worlds import run_ranks

STEPS, MICRO_BATCHES = 2, 8
CASES = [
    ("bf16", "adamw", "1x2", 2),
    ("int8", "adamw_4bit", "2x2", 2),
    ("fp8_tensorwise", "muon", "1x4", 2),
    ("fp8_tensorwise delayed", "adamw_8bit", "2x2", 4),
    ("int8 tensorwise", "adamw_8bit", "4x1", 2),
    ("fp8_rowwise", "muon", "2x2", 2),
    ("fp8_blockwise", "adamw_8bit", "1x2", 2),
    ("int8_blockwise", "adamw", "1x4", 4),
]


def _of_rank(scheme: str, optimizer: str, mesh: str, ep: int, deterministic: bool) -> dict[str, Any]:
    made = make_mesh(*map(int, mesh.split("x")), "cpu", ep=ep)
    device = torch.device("cpu")
    return train(scheme, optimizer, made, device, STEPS, deterministic, MICRO_BATCHES, config=MIXTURE)


def _results(scheme: str, optimizer: str, mesh: str, ep: int, deterministic: bool) -> list[dict[str, Any]]:
    world = math.prod(map(int, mesh.split("x")))
    return run_ranks(world, _of_rank, scheme, optimizer, mesh, ep, deterministic)


@functools.cache
def _of_one(scheme: str, optimizer: str, deterministic: bool) -> dict[str, Any]:
    return _results(scheme, optimizer, "1x1", 1, deterministic)[0]


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh", "ep"),
    sampled(CASES, lambda scheme, *_: scheme not in ("int8", "fp8_tensorwise")),
)
def test_in_order_groups_of_processes_train_as_one(scheme, optimizer, mesh, ep):
    """Losses, gradient norms, weights, codes and states, of each expert."""
    one = _of_one(scheme, optimizer, True)
    for of_rank in _results(scheme, optimizer, mesh, ep, True):
        assert differences(one, of_rank, deterministic=True) == ""


@pytest.mark.parametrize("scheme", sampled(list(SCHEMES_COMPARED)[:-4], lambda scheme: scheme != "fp8_rowwise"))
def test_otherwise_losses_are_close(scheme):
    one = _of_one(scheme, "adamw_8bit", False)
    first, *others = _results(scheme, "adamw_8bit", "2x2", 2, False)
    assert differences(one, first, deterministic=False) == ""
    assert all(differences(first, other, deterministic=True) == "" for other in others)


@pytest.mark.parametrize(
    ("mesh", "ep", "found"),
    [((1, 8), 2, (1, 4)), ((2, 4), 2, (2, 2)), ((2, 4), 8, (1, 1)), ((8, 1), 2, (4, 1)), ((4, 2), 4, (2, 1))],
)
def test_the_mesh_of_the_ranks_that_hold_the_same_experts(mesh, ep, found):
    assert expert_mesh_shape(*mesh, ep) == found


@pytest.mark.parametrize(
    ("mesh", "ep", "words"),
    [
        ((1, 4), 3, "--ep: 3 does not divide the 4 processes of the run; allowed: 1, 2, 4."),
        ((1, 1), 2, "--ep: 2 does not divide the 1 process of the run; allowed: 1."),
        ((2, 6), 4, "--ep: 4 neither divides the 6 processes of --dp_shard nor is a multiple of them"),
    ],
)
def test_groups_that_do_not_fit_are_refused(mesh, ep, words):
    with pytest.raises(UserError) as refused:
        expert_mesh_shape(*mesh, ep)
    assert words in str(refused.value)
