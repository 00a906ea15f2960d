"""Quantized operands of a matrix product, and what a row of the matmul table may require."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.bench.case import Case, UnavailableError, check_product
from qtrain.bench.matmuls import Problem
from qtrain.core.hardware import FP8_CAPABILITY, MX_CAPABILITY
from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.quantize.operators import quantize

FP32_SUM, BF16_SUM, FP8_SUM = 2.0**-20, 2.0**-12, 2.0**-10
"""Error of a sum relative to the sum of magnitudes: in fp32; with partial sums over K added in bf16; in FP8 tensor
cores, which keep about 13 bits below the largest product."""
K_MAJOR_ONLY = "cuBLAS takes FP8 operands K-major only"


class Operand(NamedTuple):
    """Codes, laid out as the problem says, with their scale. values: what they encode, fp64."""

    codes: Tensor
    scale: Tensor
    values: Callable[[], Tensor]


@dataclass(frozen=True)
class Operands:
    """A [M, K] and B [N, K]."""

    a: Operand
    b: Operand

    def case(self, run: Callable[..., Tensor], accumulation: float, family: str | None = None) -> Case:
        """run(codes of A, codes of B, scale of A, scale of B), checked against the product of the values."""
        inputs = (self.a.codes, self.b.codes, self.a.scale, self.b.scale)
        return Case(inputs, run, check_product(self.a.values, self.b.values, accumulation), family)


def quantized(p: Problem, fmt: str, granularity_a: str, granularity_b: str) -> Operands:
    """Random operands in a format, each at its granularity."""
    if fmt == "e4m3":
        p.need_capability("FP8", FP8_CAPABILITY)
    granularities = granularity_a, granularity_b
    pairs = [quantize(x, fmt, granularity) for x, granularity in zip(p.normal(), granularities, strict=True)]
    stored = p.stored(*(codes for codes, _ in pairs))
    return Operands(
        *(
            Operand(layout, scale, lambda c=codes, s=scale, g=granularity: encoded(c, s, fmt, g, p.k))
            for layout, (codes, scale), granularity in zip(stored, pairs, granularities, strict=True)
        )
    )


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
    p.need_capability(what, MX_CAPABILITY)
    p.only_k_major(f"{what} operands are K-major")
