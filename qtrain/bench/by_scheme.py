"""Tables of a column's problem under every scheme: milliseconds, speed over bf16, share of a roofline."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from qtrain.bench.case import Case, Check, Report, WrongResultError, examine
from qtrain.bench.tables import Cell, Table
from qtrain.quant import LowBitScheme, Scheme

UNIT = "ms of forward and backward; speed over bf16; share of the roofline"
EIGHT_BITS, FOUR_BITS, LATENT = 0.1, 0.5, 1.0
"""Relative error (Frobenius norm) above which a result is wrong: of 8-bit and 4-bit formats, and of weights that are
quantized from latent ones."""

P = TypeVar("P")


def fill_by_scheme(
    table: Table,
    problems: Mapping[str, P],
    schemes: Mapping[str, Scheme],
    prepare: Callable[[P, Scheme], Case],
    roofline_ms: Callable[[P, Scheme], float],
    device: torch.device,
    budget_ms: float,
    report: Report,
) -> None:
    """A row for each scheme, bf16 first if it is among them, and a column for each problem."""
    for column, problem in problems.items():
        plain_ms = None
        for label, scheme in sorted(schemes.items(), key=lambda item: item[0] != "bf16"):

            def show(_: Case, ms: float, scheme=scheme, problem=problem, plain=plain_ms) -> Cell:
                roofline = roofline_ms(problem, scheme)
                over = f", {plain / ms:.2f}x" if plain else ""
                details = {"over_bf16": plain / ms if plain else None, "roofline_ms": roofline}
                return Cell(ms, text=f"{ms:.3g}{over}, {100 * roofline / ms:.0f}%", details=details)

            cell = examine(lambda scheme=scheme, problem=problem: prepare(problem, scheme), device, show, budget_ms)
            plain_ms = cell.value if label == "bf16" else plain_ms
            table.put(label, column, cell)
            report(f"{label}, {column}", cell)


def check_against(names: Sequence[str], truth: Callable[[], Sequence[Tensor]], scheme: Scheme) -> Check:
    """The check of results that are called `names`."""

    def check(out: object) -> float:
        worst, limit = 0.0, _limit(scheme)
        for name, result, expected in zip(names, out, truth(), strict=True):
            error = float((result.float() - expected).norm() / expected.norm())
            if not error <= limit:  # also for NaN
                raise WrongResultError(f"{name} has a relative error of {error:.3g}, above {limit}")
            worst = max(worst, error)
        return worst / limit

    return check


def _limit(scheme: Scheme) -> float:
    if isinstance(scheme, LowBitScheme) and scheme.latent:
        return LATENT
    stored = scheme.stored_format if isinstance(scheme, LowBitScheme) else None
    return FOUR_BITS if {"int4", "nvfp4"} & {stored, *scheme.gemm_dtypes().values()} else EIGHT_BITS
