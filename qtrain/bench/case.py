"""What the tables of benchmark_mm.py share: a case to measure, and how cells are filled.

A case is checked before it is timed, or there is a reason why it cannot run here. Tables have a row for each
implementation, or for each scheme.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from qtrain.bench.tables import Cell, Table
from qtrain.bench.timing import measure
from qtrain.core.errors import first_line
from qtrain.core.hardware.device import Hardware
from qtrain.quant import LowBitScheme, QuantizedModel, Scheme, quantize_linears

Check = Callable[[Any], float]
"""Takes a call's result; returns its largest error as a fraction of the tolerance, or raises WrongResultError."""
P = TypeVar("P", bound=Any)  # A problem: sizes of operands, and the device


class UnavailableError(Exception):
    """This row cannot run here; the message says why."""


class WrongResultError(Exception):
    """A result is outside its tolerance: it is not timed."""


@dataclass(frozen=True)
class Case:
    """A call run(*inputs), and the `check` of its result. family: the implementations that a dispatch may choose from
    (QTRAIN_IMPL); None: all. unread: bytes of the inputs that the call does not read."""

    inputs: Sequence[Tensor]
    run: Callable[..., Any]
    check: Check
    family: str | None = None
    unread: int = 0


@dataclass(frozen=True)
class Bench:
    """Where and how long the cells of tables are measured. report: called with each cell as it is filled, since a table
    takes minutes."""

    device: torch.device
    hardware: Hardware
    budget_ms: float
    report: Callable[[str, Cell], None]

    def fill(
        self, table: Table, row: str, column: str, prepare: Callable[[], Case], show: Callable[[Case, float], Cell]
    ) -> Cell:
        """Put what `examine` finds into the table."""
        cell = self.examine(prepare, show)
        table.put(row, column, cell)
        self.report(f"{row}, {column}", cell)
        return cell

    def examine(self, prepare: Callable[[], Case], show: Callable[[Case, float], Cell]) -> Cell:
        """Prepare, check and time a case. Returns a cell with its figure, or with the reason why there is none.

        show: (case, milliseconds) -> the cell; the timing is added to its details.
        """
        try:
            case = prepare()
            # The same call is checked and timed, under the same family of implementations.
            with implementation(case.family):
                share = case.check(case.run(*case.inputs))
                timing = measure(case.run, case.inputs, self.device, self.budget_ms)
        except UnavailableError as error:
            return Cell(reason=str(error))
        except WrongResultError as error:
            return Cell(reason=f"wrong result, not timed: {error}", details={"wrong": True})
        except Exception as error:  # a failing row must not end the table
            return Cell(reason=f"{type(error).__name__}: {first_line(error)[:160]}")
        # Problems differ in size: what one leaves in the allocator would fragment the next.
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        cell = show(case, timing.ms)
        timed = {"ms": timing.ms, "ms_quartiles": [timing.low, timing.high], "runs": timing.runs, "error_share": share}
        return dataclasses.replace(cell, details={**timed, **cell.details})


@contextlib.contextmanager
def implementation(family: str | None) -> Iterator[None]:
    """Inside, operators with several implementations choose from this family; None does not change the choice."""
    before = os.environ.get("QTRAIN_IMPL")
    if family is not None:
        os.environ["QTRAIN_IMPL"] = family  # which every dispatch reads at each call
    try:
        yield
    finally:
        if family is not None:
            os.environ.pop("QTRAIN_IMPL")
            if before is not None:
                os.environ["QTRAIN_IMPL"] = before


def random_bf16(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Random values in bf16."""
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed)).bfloat16()


# ---- checks ----------------------------------------------------------------------------------------------------------


def largest_share(error: Tensor, allowed: Tensor) -> float:
    """Of the tolerance of each element. A NaN is the largest error, not the least."""
    return float((error.abs() / allowed).max().nan_to_num(nan=torch.inf))


def within(share: float, tolerance: str = "the tolerance", most: float = 1) -> float:
    """An error as a share of the tolerance, or WrongResultError where it is above `most`."""
    if share > most:
        raise WrongResultError(f"an error {share:.3g} times {tolerance}")
    return share


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23, torch.int32: 0.0}
"""Largest relative error of rounding a result to its dtype; fp32 may be rounded twice."""


def check_product(a: Callable[[], Tensor], b: Callable[[], Tensor], accumulation: float) -> Check:
    """A check of A · Bᵀ against fp64; `a` and `b` return the multiplied values, fp64 [M, K] and [N, K].

    The tolerance of an element is the rounding of its dtype plus `accumulation` times the sum of the magnitudes of its
    products. Integers must be exact.
    """

    def check(out: object) -> float:
        assert isinstance(out, Tensor)
        x, w = a(), b()
        if out.shape != (x.shape[0], w.shape[0]):
            raise WrongResultError(f"shape {tuple(out.shape)}, not {(x.shape[0], w.shape[0])}")
        worst = 0.0
        for start in range(0, len(x), 4096):  # in chunks, which keeps the fp64 matrices small
            rows, result = x[start : start + 4096], out[start : start + 4096]
            truth = rows @ w.t()  # fp64 [4096, N]
            # 1e-30: products of zeros have no magnitude to be relative to.
            allowed = ROUNDING[out.dtype] * truth.abs() + accumulation * (rows.abs() @ w.abs().t()) + 1e-30
            worst = max(worst, largest_share(result.double() - truth, allowed))
        return within(worst)

    return check


EIGHT_BITS, FOUR_BITS, LATENT = 0.1, 0.5, 1.0
"""Relative error (Frobenius norm) above which a result is wrong: of 8-bit and 4-bit formats, and of weights that are
quantized from latent ones."""


def relative_error(name: str, result: Tensor, expected: Tensor, limit: float) -> float:
    """The error of a result that is called `name`, in the dtype of what is expected. WrongResultError above `limit`."""
    # Frobenius norms: a single wrong element is found by the tables of products, which check elementwise.
    error = float((result.to(expected.dtype) - expected).norm() / expected.norm())
    if not error <= limit:  # also for NaN
        raise WrongResultError(f"{name} has a relative error of {error:.3g}, above {limit}")
    return error


def check_against(names: Sequence[str], truth: Callable[[], Sequence[Tensor]], scheme: Scheme) -> Check:
    """The check of results that are called `names`."""

    def check(out: Any) -> float:
        worst, limit = 0.0, _limit(scheme)
        for name, result, expected in zip(names, out, truth(), strict=True):
            worst = max(worst, relative_error(name, result, expected, limit))
        return worst / limit

    return check


def _limit(scheme: Scheme) -> float:
    if isinstance(scheme, LowBitScheme) and scheme.latent:
        return LATENT
    stored = scheme.stored_format if isinstance(scheme, LowBitScheme) else None
    return FOUR_BITS if {"int4", "nvfp4"} & {stored, *scheme.gemm_dtypes().values()} else EIGHT_BITS


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row(Generic[P]):
    """A line of a table of rates: how an implementation prepares a problem.

    arithmetic: key of `Hardware.peaks` whose peak bounds it. prepare: raises UnavailableError with the reason why it
    cannot run here."""

    name: str
    arithmetic: str
    prepare: Callable[[P], Case]


def fill_rates(table: Table, problems: Mapping[str, P], rows: Sequence[Row[P]], bench: Bench) -> None:
    """TFLOP/s of every row on every problem, which has `operations`."""
    for row in rows:
        peak = bench.hardware.peaks.get(row.arithmetic)
        for column, problem in problems.items():

            def show(_: Case, ms: float, problem: P = problem, peak: float | None = peak) -> Cell:
                rate = problem.operations / ms / 1e9  # 1e12 operations in 1e3 ms
                return Cell(rate, details={"share_of_peak": rate / peak if peak else None})

            bench.fill(table, row.name, column, partial(row.prepare, problem), show)


UNIT = "ms of forward and backward; speed over bf16; share of the roofline"  # of a table with a row for each scheme


def swapped(model: nn.Module, scheme: Scheme) -> QuantizedModel:
    """Quantize the linears of a model under a scheme. UnavailableError where the scheme leaves one in bf16."""
    quantized = quantize_linears(model, scheme, seed=0)
    left = next((choice.reason for choice in quantized.choices if choice.reason), None)
    if isinstance(scheme, LowBitScheme) and left is not None:
        raise UnavailableError(f"left in bf16: {left}")
    return quantized


def fill_by_scheme(
    table: Table,
    problems: Mapping[str, P],
    schemes: Mapping[str, Scheme],
    prepare: Callable[[P, Scheme], Case],
    roofline_ms: Callable[[P, Scheme], float],
    bench: Bench,
) -> None:
    """A row for each scheme, bf16 first if it is among them, and a column for each problem."""
    for column, problem in problems.items():
        # bf16 runs first: the speed of every other scheme is relative to it.
        plain_ms = None
        for label, scheme in sorted(schemes.items(), key=lambda item: item[0] != "bf16"):

            def show(_: Case, ms: float, scheme=scheme, problem=problem, plain=plain_ms) -> Cell:
                roofline = roofline_ms(problem, scheme)
                over = f", {plain / ms:.2f}x" if plain else ""
                details = {"over_bf16": plain / ms if plain else None, "roofline_ms": roofline}
                return Cell(ms, text=f"{ms:.3g}{over}, {100 * roofline / ms:.0f}%", details=details)

            cell = bench.fill(table, label, column, partial(prepare, problem, scheme), show)
            plain_ms = cell.value if label == "bf16" else plain_ms
