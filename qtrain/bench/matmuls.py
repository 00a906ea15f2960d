"""The matmul table: rates of matrix products, one column per problem size, one row per implementation
(`matmul_rows.py`).

A row takes a `Problem` and returns a `Case`, or raises UnavailableError with the reason why it cannot run here.
Quantizing the operands is not timed; converting an operand to K-major is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.bench.case import Bench, Case, Row, UnavailableError, check_product, fill_rates
from qtrain.bench.tables import Cell, Table
from qtrain.core.hardware.capabilities import FP8_CAPABILITY, MX_CAPABILITY, compute_capability
from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.quantize.operators import quantize

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
        return 2.0 * self.m * self.n * self.k  # a multiplication and an addition each

    def normal(self, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
        """Random normal A [M, K] and B [N, K], K-major, from a fixed seed."""
        # Of the size: every row multiplies the same numbers.
        generator = torch.Generator(self.device).manual_seed(self.m + self.n + self.k)
        shapes = ((self.m, self.k), (self.n, self.k))
        a, b = (torch.randn(*s, device=self.device, generator=generator).to(dtype) for s in shapes)
        return a, b

    def stored(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The operands in the problem's layout."""
        return (
            a.t().contiguous().t() if self.a_column_major else a,  # [M, K], strides (1, M)
            b.t().contiguous().t() if self.b_column_major else b,  # [N, K], strides (1, N)
        )

    def only_k_major(self, why: str) -> None:
        if self.a_column_major or self.b_column_major:
            raise UnavailableError(why)


def need_capability(what: str, capability: tuple[int, int], device: torch.device) -> None:
    """Refuse a GPU below the compute capability; a CPU runs every row's reference."""
    if device.type == "cuda" and compute_capability(device) < capability:
        needs, has = (".".join(map(str, c)) for c in (capability, compute_capability(device)))
        raise UnavailableError(f"{what} needs compute capability {needs}; this GPU has {has}")


ROWS: list[Row[Problem]] = []


def row(name: str, arithmetic: str) -> Callable[[Callable[[Problem], Case]], Callable[[Problem], Case]]:
    """Decorator that registers a function as a row of the table."""

    def add(prepare: Callable[[Problem], Case]) -> Callable[[Problem], Case]:
        ROWS.append(Row(name, arithmetic, prepare))
        return prepare

    return add


def matmul_table(problems: dict[str, Problem], rows: Sequence[Row[Problem]], bench: Bench) -> Table:
    """TFLOP/s of every row on every problem, and the device's peaks."""
    first = next(iter(problems.values()))
    a, b = "Aᵀ" if first.a_column_major else "A", "B" if first.b_column_major else "Bᵀ"
    table = Table(f"Matrix products {a}·{b}, M x N x K", "TFLOP/s; TOPS for integers", list(problems))
    if bench.device.type == "cpu":
        table.notes.append(
            "On a CPU, Triton's rows run their PyTorch references, and cuBLAS's rows PyTorch's own products."
        )
    fill_rates(table, problems, rows, bench)
    # A row for each peak that bounds a row above, so that shares can be read off the table.
    source, peaks = "measured" if bench.hardware.measured else "datasheet, dense", bench.hardware.peaks
    for arithmetic in sorted({r.arithmetic for r in rows} & peaks.keys()):
        for column in problems:
            table.put(f"peak {arithmetic.upper()} ({source})", column, Cell(peaks[arithmetic]))
    return table


FP32_SUM, BF16_SUM, FP8_SUM = 2.0**-20, 2.0**-12, 2.0**-10
"""Error of a sum relative to the sum of magnitudes: in fp32; with partial sums over K added in bf16; in FP8 tensor
cores, which keep about 13 bits below the largest product."""
K_MAJOR_ONLY = "cuBLAS takes FP8 operands K-major only"


class CodedPair(NamedTuple):
    """Codes of A [M, K] and B [N, K], laid out as the problem says, their scales, and what they encode, fp64."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    values_a: Callable[[], Tensor]
    values_b: Callable[[], Tensor]

    def case(self, run: Callable[..., Tensor], accumulation: float, family: str | None = None) -> Case:
        """run(codes of A, codes of B, scale of A, scale of B), checked against the product of the values."""
        return Case(self[:4], run, check_product(self.values_a, self.values_b, accumulation), family)


def coded_pair(p: Problem, fmt: str, granularity_a: str, granularity_b: str) -> CodedPair:
    """Random operands in a format, each at its granularity."""
    if fmt == "e4m3":
        need_capability("FP8", FP8_CAPABILITY, p.device)
    x, w = p.normal()
    (a, scale_a), (b, scale_b) = quantize(x, fmt, granularity_a), quantize(w, fmt, granularity_b)
    # Values come from the K-major codes: the check does not depend on the layout that it checks.
    values_a = partial(encoded, a, scale_a, fmt, granularity_a, p.k)
    values_b = partial(encoded, b, scale_b, fmt, granularity_b, p.k)
    # The layout is changed afterwards, and is not timed.
    return CodedPair(*p.stored(a, b), scale_a, scale_b, values_a, values_b)


def encoded(codes: Tensor, scale: Tensor, fmt: str, granularity: str, k: int) -> Tensor:
    """The values of codes and scale, fp64."""
    return dequantize(codes, scale, fmt, granularity, (codes.shape[0], k), torch.float64)


def need_family(names: Sequence[str], family: str | None, p: Problem) -> None:
    """Refuse a family that has no implementation for these operands: the dispatch would silently use another."""
    if p.device.type == "cuda" and family and not any(name.startswith(family) for name in names):
        raise UnavailableError(f"{family} does not take this shape: K and N need more factors of two")


def need_gpu(p: Problem, what: str) -> None:
    if p.device.type != "cuda":
        raise UnavailableError(f"{what} run on a GPU only")


def need_blackwell(p: Problem, what: str) -> None:
    need_gpu(p, f"{what} tensor cores")
    need_capability(what, MX_CAPABILITY, p.device)
    p.only_k_major(f"{what} operands are K-major")
