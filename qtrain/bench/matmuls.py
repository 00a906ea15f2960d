"""The matmul table: rates of matrix products, one column per problem size, one row per implementation
(`matmul_rows.py`).

A row takes a `Problem` and returns a `Case`, or raises UnavailableError with the reason why it cannot run here.
Quantizing the operands is not timed; converting an operand to K-major is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.bench.case import Case, Report, UnavailableError, examine
from qtrain.bench.tables import Cell, Table
from qtrain.core.hardware import Hardware, compute_capability

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Problem:
    """The size of a product, and the memory layout of its operands: K-major, or column-major."""

    m: int
    n: int
    k: int
    device: torch.device
    a_column_major: bool = False
    b_column_major: bool = False

    @property
    def operations(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def normal(self, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
        """Random normal A [M, K] and B [N, K], K-major, from a fixed seed."""
        generator = torch.Generator(self.device).manual_seed(self.m + self.n + self.k)
        shapes = ((self.m, self.k), (self.n, self.k))
        return tuple(torch.randn(*s, device=self.device, generator=generator).to(dtype) for s in shapes)

    def stored(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The operands in the problem's layout."""
        return (
            a.t().contiguous().t() if self.a_column_major else a,
            b.t().contiguous().t() if self.b_column_major else b,
        )

    def only_k_major(self, why: str) -> None:
        if self.a_column_major or self.b_column_major:
            raise UnavailableError(why)

    def need_capability(self, what: str, capability: tuple[int, int]) -> None:
        """Refuse a GPU below the compute capability; a CPU runs every row's reference."""
        if self.device.type == "cuda" and compute_capability(self.device) < capability:
            needs, has = (".".join(map(str, c)) for c in (capability, compute_capability(self.device)))
            raise UnavailableError(f"{what} needs compute capability {needs}; this GPU has {has}")


@dataclass(frozen=True)
class Row:
    """A line of the table. arithmetic: key of `Hardware.peaks` whose peak bounds it."""

    name: str
    arithmetic: str
    prepare: Callable[[Problem], Case]


ROWS: list[Row] = []


def row(name: str, arithmetic: str) -> Callable[[Callable[[Problem], Case]], Callable[[Problem], Case]]:
    """Decorator that registers a function as a row of the table."""

    def add(prepare: Callable[[Problem], Case]) -> Callable[[Problem], Case]:
        ROWS.append(Row(name, arithmetic, prepare))
        return prepare

    return add


def matmul_table(
    problems: dict[str, Problem], rows: Sequence[Row], budget_ms: float, hardware: Hardware, report: Report
) -> Table:
    """TFLOP/s of every row on every problem, and the device's peaks."""
    first = next(iter(problems.values()))
    a, b = "Aᵀ" if first.a_column_major else "A", "B" if first.b_column_major else "Bᵀ"
    table = Table(f"Matrix products {a}·{b}, M x N x K", "TFLOP/s; TOPS for integers", list(problems))
    if first.device.type == "cpu":
        table.notes.append(
            "On a CPU, Triton's rows run their PyTorch references, and cuBLAS's rows PyTorch's own products."
        )
    for r in rows:
        peak = hardware.peaks.get(r.arithmetic)
        for column, problem in problems.items():

            def show(_: Case, ms: float, problem: Problem = problem, peak: float | None = peak) -> Cell:
                rate = problem.operations / ms / 1e9
                return Cell(rate, details={"share_of_peak": rate / peak if peak else None})

            cell = examine(lambda r=r, problem=problem: r.prepare(problem), first.device, show, budget_ms)
            table.put(r.name, column, cell)
            report(f"{r.name}, {column}", cell)
    source = "measured" if hardware.measured else "datasheet, dense"
    for arithmetic in sorted({r.arithmetic for r in rows} & hardware.peaks.keys()):
        for column in problems:
            table.put(f"peak {arithmetic.upper()} ({source})", column, Cell(hardware.peaks[arithmetic]))
    return table
