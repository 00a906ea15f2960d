"""Gradients of all ranks add up to those of one: in which order, in which dtype, and at how many bytes."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from qtrain.comm.peer_memory import PeerExchange
from qtrain.comm.wire import sent
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding import gradient_buckets, gradients
from qtrain.parallel.sharding.gradient_wire import GRADIENT_WIRES
from qtrain.parallel.sharding.gradients import GradientReduction
from qtrain.parallel.sharding.shards import local_tensors, shard_parameters
from tests.parallel.sharding.mapped_files import MappedFiles
from tests.system import PYTHON_FIRST, ROOT
from tests.worlds import run_ranks

SHAPES = {"a": (7, 5), "bias": (3,), "scalar": (), "b": (16, 130), "owned": (9, 4), "even": (8, 64)}


def _gradient(name: str, rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * micro_batch + len(name))
    return (torch.randn(SHAPES[name], generator=generator) * 10 ** (rank - 1)).bfloat16()


def _reduce(
    replicate: int,
    shard: int,
    micro_batches: int,
    every: bool,
    wire: str,
    by_machine: bool = True,
    on_host: bool = False,
    recorded: bool = False,
    copies: Path | None = None,
) -> dict:
    """copies: a folder for what ranks copy to each other; None: they send it."""
    mesh = make_mesh(replicate, shard, "cpu")
    if copies:
        # In pieces, of which some ranks receive fewer than others.
        memory = MappedFiles(copies, PeerExchange.size(320, mesh.dp_size))
        gradients.peer_exchange = lambda *_: PeerExchange(memory, 320, mesh.dp_rank, mesh.dp_size)
    parameters = {name: nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in SHAPES.items()}
    owned = id(parameters["owned"])
    sharded = shard_parameters(parameters.items(), mesh, lambda p: id(p) == owned)
    gradients.PIECE_BYTES = 1000  # of a process of its own
    reduction = GradientReduction(
        [sharded],
        every_micro_batch=every,
        by_machine=by_machine,
        wire=GRADIENT_WIRES[wire],
        on_host=torch.device("cpu") if on_host else None,
    )
    assert reduction.copies_all == (copies is not None)
    for step in range(2):  # the first one's sums are not the second one's
        sent.clear()
        for micro_batch in range(micro_batches):
            for name, p in parameters.items():
                p.grad = _gradient(name, mesh.rank, micro_batch) * (2 - step)
            memory = {name: p.grad for name, p in parameters.items()}
            reduction.add_group(0, micro_batch, first=micro_batch == 0, recorded=recorded)
            assert all(p.grad is None for p in parameters.values() if mesh.shard > 1)
        reduction.finish()
    found, in_place = {}, {}
    for s in sharded:
        grad = s.master.grad
        if grad is not None:
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            assert [local.shape] == [t.shape for t in local_tensors(s.master)]
            in_place[s.name] = local.data_ptr() == memory[s.name].data_ptr()
            found[s.name] = (s.bounds[mesh.shard_rank], local.float().flatten().tolist())
    sizes = {"sent": sent["gradients"], "of machines": sent["gradients of machines"]}
    return {"grads": found, "in place": in_place, **sizes}


def _whole(results: list[dict], name: str, replicas: list[list[int]]) -> torch.Tensor:
    """The gradient from its shards; replicas must agree."""
    wholes = []
    for ranks in replicas:
        flat = torch.full((torch.empty(SHAPES[name]).numel(),), float("nan"))
        for rank in ranks:
            if name in results[rank]["grads"]:
                low, values = results[rank]["grads"][name]
                flat[low : low + len(values)] = torch.tensor(values)
        wholes.append(flat)
    assert all(torch.equal(w, wholes[0]) for w in wholes)
    return wholes[0].view(SHAPES[name])


@pytest.mark.parametrize(
    ("replicate", "shard", "replicas"),
    [(1, 3, [[0, 1, 2]]), (2, 1, [[0], [1]]), (2, 2, [[0, 1], [2, 3]])],
    ids=["1x3", "2x1", "2x2"],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_micro_batches_are_added_in_their_order(replicate, shard, replicas, on_host):
    """In fp32, rank by rank within each micro-batch, and rounded once: bit for bit. On the host in pieces."""
    world = replicate * shard
    results = run_ranks(world, _reduce, replicate, shard, 2, True, "exact", True, on_host)
    for name in SHAPES:
        terms = [_gradient(name, rank, m).float() for m in range(2) for rank in range(world)]
        expected = functools.reduce(torch.add, terms, torch.zeros(SHAPES[name])).bfloat16().float()
        assert torch.equal(_whole(results, name, replicas), expected), name


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("on_host", [False, True])
def test_gradients_that_ranks_copy_are_those_that_they_send(replicate, shard, on_host, tmp_path):
    case = (replicate * shard, _reduce, replicate, shard, 2, True, "exact", True, on_host, False)
    assert run_ranks(*case, tmp_path) == run_ranks(*case)


@pytest.mark.gpu
def test_gradients_that_gpus_copy_to_each_other_are_those_that_nccl_sends():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command = [*launch, "tests.parallel.sharding.copied_gradients"]
    done = subprocess.run(command, cwd=ROOT, env=PYTHON_FIRST, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stdout.count("equal") == 2, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [1, 7, 8, 9, 100, 129])
def test_sums_are_rounded_in_their_own_memory(dtype, elements, monkeypatch):
    monkeypatch.setattr(gradients, "ROUNDED_AT_ONCE", 8)
    sums = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 100
    expected = sums.to(dtype)
    rounded = gradients.rounded_in_place(sums, dtype)
    assert torch.equal(rounded, expected) and rounded.data_ptr() == sums.data_ptr()


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("wire", ["exact", pytest.param("int8", marks=pytest.mark.sweep)])
def test_sums_of_recorded_gradients_are_in_their_memory(replicate, shard, wire, monkeypatch):
    """Of parameters that are sent alone and as they lie in memory; the same bits."""
    monkeypatch.setattr(gradient_buckets, "ALONE_BYTES", 1)
    case = (replicate * shard, _reduce, replicate, shard, 1, False, wire, True, False)
    results, expected = run_ranks(*case, True), run_ranks(*case)
    for result, other in zip(results, expected, strict=True):
        assert result["grads"] == other["grads"]
        in_order = replicate == 1 or shard == 1  # else the parts of two shards follow each other in a message
        assert all(result["in place"].values()) == in_order and not any(other["in place"].values())


@pytest.mark.parametrize("wire", GRADIENT_WIRES)
def test_low_bit_sums_are_close_and_cheap(wire):
    """Against the fp64 sum: within the rounding of each term, and a quarter to a half of bf16's bytes."""
    (first, *_) = results = run_ranks(2, _reduce, 1, 2, 1, False, wire)
    elements = sum(torch.empty(shape).numel() for shape in SHAPES.values())
    for name in SHAPES:
        terms = [_gradient(name, rank, 0).double() for rank in range(2)]
        error = (_whole(results, name, [[0, 1]]).double() - sum(terms)).abs()
        scale = {"exact": 2**-8, "int8": 1 / 127, "fp8": 1 / 8, "int4": 1 / 7}[wire]
        largest = sum(_gradient(n, r, 0).double().abs().max() for r in range(2) for n in SHAPES)
        assert bool((error <= scale * largest).all()), name
    most = {"exact": 2.0, "int8": 1.25, "fp8": 1.25, "int4": 0.75}[wire]  # small messages fill up blocks
    assert first["sent"] <= most * elements


@pytest.mark.parametrize(("replicate", "shard"), [(1, 4), (2, 2), (4, 1), (1, 6)])
@pytest.mark.parametrize(("every", "alone"), [(True, False), (False, False), (False, True)])
def test_machines_add_first_and_then_exchange_their_sums(replicate, shard, every, alone, monkeypatch):
    """Each machine's sum in fp32, rounded to bf16, then the sum over machines: bit for bit, of parameters that are sent
    together or alone."""
    if alone:
        monkeypatch.setattr(gradient_buckets, "ALONE_BYTES", 1)
    world, replicas = replicate * shard, [list(range(r * shard, (r + 1) * shard)) for r in range(replicate)]
    results = run_ranks(world, _reduce, replicate, shard, 1, every, "exact", on_machine=2)
    for name in SHAPES:
        of_machines = [
            (_gradient(name, first, 0).float() + _gradient(name, first + 1, 0).float()).bfloat16().float()
            for first in range(0, world, 2)
        ]
        expected = functools.reduce(torch.add, of_machines).bfloat16().float()
        assert torch.equal(_whole(results, name, replicas), expected), name


@pytest.mark.parametrize("wire", GRADIENT_WIRES)
def test_few_bytes_leave_a_machine(wire):
    """Three machines of two: a rank sends half of its gradients to its neighbor, and two thirds of its half of the
    machine's sum to other machines; one exchange of all ranks would send four sixths of all to other machines."""
    results = run_ranks(6, _reduce, 1, 6, 1, False, wire, on_machine=2)
    elements = sum(torch.empty(shape).numel() for shape in SHAPES.values())
    size = 2 if wire == "exact" else GRADIENT_WIRES[wire].bytes_per_element
    filled = {"exact": 0, "int8": 256, "fp8": 256, "int4": 64}[wire] * 4  # the last blocks of small messages
    assert sum(r["sent"] for r in results) <= 6 * (elements / 2 * size + filled)
    assert sum(r["of machines"] for r in results) <= 6 * (elements / 3 * size + filled)
    scale = {"exact": 2**-8, "int8": 1 / 127, "fp8": 1 / 8, "int4": 1 / 7}[wire]
    largest = sum(_gradient(n, r, 0).double().abs().max() for r in range(6) for n in SHAPES)
    for name in SHAPES:
        exact = sum(_gradient(name, rank, 0).double() for rank in range(6))
        error = (_whole(results, name, [list(range(6))]).double() - exact).abs()
        assert bool((error <= 2 * scale * largest).all()), name


def _silent(every: bool) -> list:
    mesh = make_mesh(1, 2, "cpu")
    p = nn.Parameter(torch.zeros(2, 64))
    (sharded,) = shard_parameters([("p", p)], mesh, lambda _: False)
    reduction = GradientReduction([[sharded]], every_micro_batch=every)
    if mesh.rank == 1:
        p.grad = torch.ones(2, 64)
    reduction.add_group(0)
    reduction.finish()
    return sharded.master.grad.to_local().tolist()


@pytest.mark.parametrize("every", [True, False])
def test_a_rank_without_a_gradient_adds_zeros(every):
    assert run_ranks(2, _silent, every) == [[[1] * 64]] * 2
