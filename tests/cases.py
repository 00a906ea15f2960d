"""One generator of numeric cases, shared by tests and benchmarks: odd shapes, outliers, zero rows, layouts."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qtrain.quant.scheme import SCHEMES

SHAPES = [(1, 1), (1, 256), (3, 5), (17, 33), (128, 128), (130, 257), (64, 1000), (257, 64)]


def matrix(rows: int, columns: int, seed: int, kind: str = "normal", dtype: torch.dtype = torch.float32) -> Tensor:
    """A random matrix of a kind: normal; outlier (one column 1,000 times the rest); zero_row; tiny; strided."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "outlier":
        x[:, columns // 2] *= 1000
    elif kind == "zero_row":
        x[rows // 2] = 0
    elif kind == "tiny":
        x *= 1e-20
    elif kind == "strided":
        x = torch.randn(columns, rows, generator=generator).t()
    return x.to(dtype)


KINDS = ["normal", "outlier", "zero_row", "tiny", "strided"]


def without_norms(scheme: str) -> dict[str, Any]:
    """Options under which a scheme changes linears only, and so takes every model."""
    return {"sub_norm": False} if SCHEMES.get(scheme, "--quantize").sub_norm else {}


FULL_SWEEP = bool(os.environ.get("QTRAIN_FULL_SWEEP"))
"""Whether slow tests run in full: `make test-full`."""


def sampled(cases: list[Any], swept: Callable[..., bool]) -> list[Any]:
    """Cases of a slow test; those of which `swept` holds run in the full sweep only."""
    lists = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.sweep if swept(*case) else ()) for case in lists]


def without_e5m2(cases: list[Any]) -> list[Any]:
    """Cases of a kernel in the interpreter; those in e5m2, which take e4m3's path, only in the full sweep."""
    return sampled(cases, lambda fmt, *_: fmt == "e5m2")
