"""Meshes from flags and the world: what is derived, and what is refused with which words."""

import pytest

from qtrain.distributed.mesh import Mesh, make_mesh, mesh_shape
from qtrain.errors import UserError
from tests.worlds import run_ranks


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "shape"),
    [(0, 0, 1, (1, 1)), (0, 0, 8, (1, 8)), (8, 0, 8, (8, 1)), (2, 0, 8, (2, 4)), (0, 2, 8, (4, 2)), (1, 3, 3, (1, 3))],
)
def test_what_is_0_is_what_the_world_leaves(replicate, shard, world, shape):
    assert mesh_shape(replicate, shard, world) == shape


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "words"),
    [
        (3, 0, 8, "--dp_replicate: 3 does not divide the 8 processes"),
        (0, 5, 8, "--dp_shard: 5 does not divide"),
        (2, 2, 8, "2 x 2 is not the 8 processes"),
        (0, 2, 1, "--dp_shard: 2 does not divide the 1 process "),
        (16, 0, 8, "allowed: 1, 2, 4, 8, or 0 for automatic"),
    ],
)
def test_meshes_that_are_not_the_world_are_refused(replicate, shard, world, words):
    with pytest.raises(UserError) as refused:
        mesh_shape(replicate, shard, world)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "tp", "shape"), [(0, 0, 8, 2, (1, 4)), (2, 0, 8, 2, (2, 2)), (0, 0, 4, 4, (1, 1))]
)
def test_tensor_ranks_come_first(replicate, shard, world, tp, shape):
    assert mesh_shape(replicate, shard, world, tp) == shape


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "tp", "words"),
    [
        (0, 0, 8, 3, "--tp: 3 does not divide the 8 processes of the run; allowed: 1, 2, 4, 8."),
        (0, 0, 1, 2, "--tp: 2 does not divide the 1 process of the run"),
        (0, 4, 8, 4, "--dp_shard, --tp: 4 x 4 is not the 8 processes of the run; leave --dp_replicate or --dp_shard 0"),
        (2, 4, 8, 2, "--dp_replicate, --dp_shard, --tp: 2 x 4 x 2 is not the 8 processes"),
    ],
)
def test_a_tensor_dimension_that_does_not_fit_is_refused(replicate, shard, world, tp, words):
    with pytest.raises(UserError) as refused:
        mesh_shape(replicate, shard, world, tp)
    assert words in str(refused.value)


def _place(replicate: int, shard: int) -> tuple:
    import torch.distributed as dist

    mesh = make_mesh(replicate, shard, "cpu")
    groups = (mesh.shard_group, mesh.replicate_group)
    return (mesh.rank, mesh.replicate_rank, mesh.shard_rank, *(dist.get_process_group_ranks(g) for g in groups))


def test_ranks_of_a_mesh_of_2_by_2():
    assert run_ranks(4, _place, 2, 0) == [
        (0, 0, 0, [0, 1], [0, 2]),
        (1, 0, 1, [0, 1], [1, 3]),
        (2, 1, 0, [2, 3], [0, 2]),
        (3, 1, 1, [2, 3], [1, 3]),
    ]


def _tensor_place() -> tuple:
    import torch.distributed as dist

    mesh = make_mesh(0, 0, "cpu", 2)
    group = dist.get_process_group_ranks(mesh.data_group)
    return mesh.rank, mesh.data_rank, mesh.tensor_rank, mesh.shard_rank, group, mesh.tensor_group.ranks


def test_ranks_of_a_tensor_group_are_neighbors_and_read_the_same_micro_batches():
    assert run_ranks(4, _tensor_place) == [
        (0, 0, 0, 0, [0, 2], 2),
        (1, 0, 1, 0, [1, 3], 2),
        (2, 1, 0, 1, [0, 2], 2),
        (3, 1, 1, 1, [1, 3], 2),
    ]


def test_one_process_is_a_mesh_of_one_without_a_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert make_mesh(0, 0, "cpu") == Mesh() and Mesh().world == 1 and Mesh().rank == 0
