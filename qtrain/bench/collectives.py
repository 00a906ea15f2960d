"""Collectives of torch and ours: python -m torch.distributed.run --nproc_per_node 2 -m qtrain.bench.collectives

A reduce-scatter of ours is an all-to-all of messages, in bf16 or in 8 or 4 bits with scales, and their sum in fp32 in
the order of the ranks; encoding, decoding and summing are timed with it. Each call is timed alone, with its launch.

Sizes are those of the whole tensor in bf16, whatever is sent: what a rank has after an all-gather, and before a
reduce-scatter, an all-reduce and an all-to-all. Algorithm bandwidth is that size over the time. Bus bandwidth counts
what each rank has to send of it, as nccl-tests do: (R - 1) / R, for an all-reduce twice that. Of low-bit gradients it
is that of the bf16 tensor, not of the bytes on the wire, so that rows compare by time.

The smallest size is checked against sums of all ranks' inputs before anything is timed.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.bench.arguments import split_list
from qtrain.bench.tables import Cell, Table, about_run, check_json, figures_path, write_json
from qtrain.comm.ranks import all_gather, join_world, launched_world, leave_world, rank, world
from qtrain.comm.wire import all_gather_single, exchange, gather
from qtrain.core.checks import Range, shown, user_path
from qtrain.core.config import parse
from qtrain.core.errors import UserError, first_line
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.hardware.rates import synchronized_time
from qtrain.core.process import run_script
from qtrain.kernels.elementwise import add_in_order
from qtrain.parallel.sharding.gradient_wire import FIRST_NUMBER, GRADIENT_WIRES, GradientWire
from qtrain.train.settings.machine import choose_device

# torch 2.13 renamed them.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MIB, MAX_MIB = 2**20, 16384
SIZES = {"cuda": "1,4,16,64,256", "cpu": "1,4"}


@dataclass(frozen=True)
class CollectiveSettings:
    """Time collectives between the processes that torchrun started."""

    sizes: str = ""
    """Sizes of the whole bf16 tensor in MiB, separated by commas; empty: 1 to 256, on a CPU 1 and 4."""
    repeats: Annotated[int, Range(3, 10_000)] = 20
    """Timed calls per figure, which is their median; of several ranks the slowest one's."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    json: str | None = None
    """File for all figures; none: runs/collectives/<time>.json."""


@dataclass(frozen=True)
class Collective:
    """run: takes this rank's bf16 tensor [n], returns what it has afterwards. expected: that from the tensors of all
    ranks [R, n] in fp64, and how far off each element may be. bus: bytes that each rank sends, of the tensor's."""

    name: str
    run: Callable[[Tensor], Tensor]
    expected: Callable[[Tensor], tuple[Tensor, Tensor | float]]
    bus: Callable[[int], float] = lambda ranks: (ranks - 1) / ranks


def _part(whole: Tensor) -> Tensor:
    """This rank's part of the last dimension."""
    return whole.chunk(world(), dim=-1)[rank()]


# ---- torch's ---------------------------------------------------------------------------------------------------------


def _gather_torch(whole: Tensor) -> Tensor:
    received = torch.empty_like(whole)
    all_gather_single(received, _part(whole))
    return received


def _reduce_scatter_torch(whole: Tensor) -> Tensor:
    received = torch.empty_like(_part(whole))
    _reduce_scatter(received, whole)
    return received


def _all_reduce_torch(whole: Tensor) -> Tensor:
    total = whole.clone()  # as much traffic of memory as the receiving buffer of the others
    dist.all_reduce(total)
    return total


def _all_to_all_torch(whole: Tensor) -> Tensor:
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    return received


# ---- ours ------------------------------------------------------------------------------------------------------------


def _gather_ours(whole: Tensor) -> Tensor:
    part = _part(whole)
    return torch.cat(gather(part, [len(part)] * world(), None, "bench"))


def _reduce_scatter_ours(wire: GradientWire | None) -> Callable[[Tensor], Tensor]:
    def run(whole: Tensor) -> Tensor:
        messages = whole.chunk(world())
        elements = len(messages[0])
        if wire is None:
            received = exchange(whole, [elements] * world(), elements, None, "bench")
        else:
            key = torch.tensor([0, 0, FIRST_NUMBER], device=whole.device)  # Philox key of the stochastic rounding
            encoded = torch.cat([wire.encode(message, key) for message in messages])
            size = wire.size(elements)
            received = [wire.decode(row, elements) for row in exchange(encoded, [size] * world(), size, None, "bench")]
        total = received[0].float()  # fp32, in the order of the ranks: the same bits on every run
        add_in_order(total, received[1:])
        return total.to(whole.dtype)

    return run


# ---- what is right ---------------------------------------------------------------------------------------------------


def _gathered(every: Tensor) -> tuple[Tensor, float]:
    return torch.cat([row.chunk(world())[r] for r, row in enumerate(every)]), 0.0


def _exchanged(every: Tensor) -> tuple[Tensor, float]:
    return torch.cat([_part(row) for row in every]), 0.0


def _summed(every: Tensor) -> tuple[Tensor, Tensor]:
    """A ring rounds to bf16 after every addition."""
    return every.sum(0), every.abs().sum(0) * len(every) * 2**-8


def _summed_part(step: float = 0.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """step: of a low-bit code, as a fraction of its block's absmax."""

    def expected(every: Tensor) -> tuple[Tensor, Tensor]:
        total, error = _summed(_part(every))
        return total, error + step * every.abs().amax(1).sum()

    return expected


# e4m3 has three bits of mantissa: neighboring codes differ by up to 1/8 of their value.
STEPS = {"exact": 0.0, "int8": 1 / 127, "fp8": 1 / 8, "int4": 1 / 7}
COLLECTIVES = (
    Collective("all-gather, torch", _gather_torch, _gathered),
    Collective("all-gather, ours", _gather_ours, _gathered),
    Collective("reduce-scatter, torch", _reduce_scatter_torch, _summed_part()),
    *(
        Collective(f"reduce-scatter, ours, {name}", _reduce_scatter_ours(wire), _summed_part(STEPS[name]))
        for name, wire in GRADIENT_WIRES.items()
    ),
    Collective("all-reduce, torch", _all_reduce_torch, _summed, lambda ranks: 2 * (ranks - 1) / ranks),
    Collective("all-to-all, torch", _all_to_all_torch, _exchanged),
)


# ---- measuring -------------------------------------------------------------------------------------------------------


def drawn(elements: int, seed: int, device: torch.device) -> Tensor:
    """The bf16 tensor of a rank, the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(elements, generator=generator).bfloat16().to(device)


def problem_with(collective: Collective, elements: int, device: torch.device) -> str | None:
    """Why it cannot be timed: the backend lacks it, or its result is wrong on any rank."""
    every = torch.stack([drawn(elements, r, device) for r in range(world())])
    try:
        found = collective.run(every[rank()]).double()
    except RuntimeError as error:
        return f"{dist.get_backend()}: {first_line(error)}"
    expected, error = collective.expected(every.double())
    right = bool(((found - expected).abs() <= error).all())  # False for NaN too
    return None if all(all_gather(right)) else "wrong result, not timed"


def seconds_of(collective: Collective, whole: Tensor, repeats: int) -> float:
    """Median seconds of a call on the slowest rank, after three calls."""
    times = []
    # Each call starts on all ranks together: the barrier is not timed, a late rank would be.
    for _ in range(3 + repeats):
        synchronized_time(whole.device)
        dist.barrier()
        start = synchronized_time(whole.device)
        collective.run(whole)
        times.append(synchronized_time(whole.device) - start)
    return max(all_gather(statistics.median(times[3:])))  # the slowest rank's


def cell_of(collective: Collective, seconds: float, size: int) -> Cell:
    algorithm = size / seconds / 1e9
    bus = algorithm * collective.bus(world())
    figures = {"microseconds": 1e6 * seconds, "algorithm_gb_s": algorithm, "bus_gb_s": bus}
    return Cell(bus, text=f"{1e6 * seconds:,.0f} us, {algorithm:.3g}, {bus:.3g}", details=figures)


def collective_table(sizes: list[int], repeats: int, device: torch.device) -> Table:
    """All collectives over sizes in MiB. Every rank calls it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    title = f"Collectives of {world()} ranks over {backend}: time, algorithm and bus bandwidth"
    table = Table(title, "GB/s", [f"{size} MiB" for size in sizes])
    elements = {size: size * MIB // 2 // world() * world() for size in sizes}  # of bf16, a multiple of the ranks
    for collective in COLLECTIVES:
        # On the smallest size: the check gathers every rank's tensor on every rank.
        reason = problem_with(collective, elements[sizes[0]], device)
        for size in sizes:
            cell = Cell(reason=reason)
            if reason is None:
                whole = drawn(elements[size], rank(), device)
                cell = cell_of(collective, seconds_of(collective, whole, repeats), whole.numel() * 2)
            table.put(collective.name, f"{size} MiB", cell)
            if rank() == 0:
                print(f"  {collective.name}, {size} MiB: {cell.reason or cell.shown()}", file=sys.stderr, flush=True)
    return table


def parse_mib(text: str) -> list[int]:
    """The sizes of --sizes in order. Raises UserError."""
    words = split_list(text)
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) <= 5 and 1 <= int(word) <= MAX_MIB):
            raise UserError(
                f"--sizes: {shown(word)} is not a size; write whole numbers of MiB from 1 to {MAX_MIB:,}, separated by "
                "commas."
            )
    if not words:
        raise UserError("--sizes: it is empty; name at least one size in MiB.")
    return sorted({int(word) for word in words})


def main(argv: list[str]) -> None:
    settings = parse(CollectiveSettings, argv, "-m qtrain.bench.collectives")
    device = choose_device(settings.device)
    sizes = parse_mib(settings.sizes or SIZES[device.type])
    path = user_path(settings.json or figures_path(settings, "collectives"), "--json")
    check_json(path)
    if launched_world() == 1:
        raise UserError(
            "WORLD_SIZE: collectives need several processes; start "
            "python -m torch.distributed.run --nproc_per_node 2 -m qtrain.bench.collectives"
        )
    join_world(device)
    table = collective_table(sizes, settings.repeats, device)
    if rank() == 0:
        print("\n" + table.markdown() + "\n", flush=True)
        write_json([table], Path(path), about_run(settings, f"{world()} x {describe_hardware(device).name}"))
        print(f"figures     {path}")
    leave_world()


if __name__ == "__main__":
    run_script(main)
