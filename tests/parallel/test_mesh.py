"""Meshes from flags and the world: what is derived, and what is refused with which words."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from qtrain.comm import ranks
from qtrain.comm.ranks import _meet
from qtrain.core.errors import UserError
from qtrain.parallel import mesh as meshes
from qtrain.parallel.mesh import Mesh, make_mesh, mesh_shape
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
    mesh = make_mesh(replicate, shard, "cpu")
    groups = (mesh.shard_group, mesh.replicate_group)
    return (mesh.rank, mesh.shard_rank, *(dist.get_process_group_ranks(g) for g in groups))


def _machines(tp: int, ep: int) -> list:
    mesh = make_mesh(0, 0, "cpu", tp, ep)
    found = [mesh.machines, mesh.expert_mesh and mesh.expert_mesh.machines]
    return [m and [*map(dist.get_process_group_ranks, (m.intra_node_group, m.inter_node_group))] for m in found]


@pytest.mark.parametrize(
    ("on_machine", "tp", "ep", "of_rank_5", "of_experts"),
    [
        (2, 1, 1, [[4, 5], [1, 3, 5]], None),
        (None, 1, 1, None, None),  # a launcher that does not say
        (3, 1, 3, [[3, 4, 5], [2, 5]], None),  # each machine has all experts
        (2, 2, 1, None, None),  # a data rank is a machine
    ],
)
def test_ranks_by_machine(on_machine, tp, ep, of_rank_5, of_experts):
    found = run_ranks(6, _machines, tp, ep, on_machine=on_machine)
    assert found[5] == [of_rank_5, of_experts]


def test_ranks_of_a_mesh_of_2_by_2():
    assert run_ranks(4, _place, 2, 0) == [
        (0, 0, [0, 1], [0, 2]),
        (1, 1, [0, 1], [1, 3]),
        (2, 0, [2, 3], [0, 2]),
        (3, 1, [2, 3], [1, 3]),
    ]


def _times() -> tuple[float, float]:
    """When this rank had its groups, of which those of rank 1 take half a second longer, and when its mesh."""
    create, made = meshes.init_device_mesh, []

    def slow(*args, **kwargs):
        groups = create(*args, **kwargs)
        time.sleep(0.5 * ranks.rank())
        made.append(time.monotonic())
        return groups

    meshes.init_device_mesh = slow
    make_mesh(0, 0, "cpu")
    return made[-1], time.monotonic()


def test_no_rank_has_its_mesh_before_all_have_their_groups():
    """Else one that ends at once, as after a dry run, ends the others."""
    (_, first), (groups, _) = run_ranks(2, _times)
    assert first > groups


def _tensor_place() -> tuple:
    import torch.distributed as dist

    mesh = make_mesh(0, 0, "cpu", 2)
    group = dist.get_process_group_ranks(mesh.dp_group)
    return mesh.rank, mesh.dp_rank, mesh.tp_rank, mesh.shard_rank, group, mesh.tp_group.ranks


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


def test_ranks_meet_though_the_store_knows_those_of_an_attempt_before():
    """torchrun's store outlives the processes that it starts again."""
    store = dist.HashStore()
    for own in range(3):
        store.set(f"rank {own}", f"gone {own}")
        store.set(f"meeting of gone {own}", "gone 0")
    store.set("gone 0/complete", "")
    with ThreadPoolExecutor(3) as threads:
        met = [meeting.result() for meeting in [threads.submit(_meet, store, own, 3) for own in (2, 0, 1)]]
    met[0].set("key", "new")
    assert met[1].get("key") == met[2].get("key") == b"new" and not store.check(["gone 0/key"])


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(ranks, "MEETING_TIMEOUT", timedelta(seconds=0.3))
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(_meet, store, own, 3) for own in (0, 1))
        with pytest.raises(RuntimeError, match="rank 2 is missing"):
            first.result()
        with pytest.raises(dist.DistStoreError):
            second.result()


def _machines_told_to_some() -> bool:
    if ranks.rank() == 3:
        os.environ.pop("LOCAL_WORLD_SIZE")
    return make_mesh(1, 4, "cpu").machines is None


def test_a_size_of_machines_that_only_some_ranks_have_is_not_used():
    """Nor waited for: each rank decides with all the others."""
    assert run_ranks(4, _machines_told_to_some, on_machine=2) == [True] * 4
