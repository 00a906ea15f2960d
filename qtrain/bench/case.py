"""A case to measure: its result is checked before it is timed, or there is a reason why it cannot run."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.bench.tables import Cell
from qtrain.bench.timing import measure
from qtrain.core.errors import first_line

Check = Callable[[object], float]
"""Takes a call's result; returns its largest error as a fraction of the tolerance, or raises WrongResultError."""
Report = Callable[[str, Cell], None]
"""Called with each cell as it is filled: a table takes minutes."""


class UnavailableError(Exception):
    """This row cannot run here; the message says why."""


class WrongResultError(Exception):
    """A result is outside its tolerance: it is not timed."""


@dataclass(frozen=True)
class Case:
    """A call run(*inputs), and the `check` of its result. family: the implementations that a dispatch may choose from
    (QTRAIN_IMPL); None: all."""

    inputs: Sequence[Tensor]
    run: Callable[..., object]
    check: Check
    family: str | None = None


def examine(
    prepare: Callable[[], Case], device: torch.device, show: Callable[[Case, float], Cell], budget_ms: float
) -> Cell:
    """Prepare, check and time a case. Returns a cell with its figure, or with the reason why there is none.

    show: (case, milliseconds) -> the cell; the timing is added to its details.
    """
    try:
        case = prepare()
        with implementation(case.family):
            share = case.check(case.run(*case.inputs))
            timing = measure(case.run, case.inputs, device, budget_ms)
    except UnavailableError as error:
        return Cell(reason=str(error))
    except WrongResultError as error:
        return Cell(reason=f"wrong result, not timed: {error}", details={"wrong": True})
    except Exception as error:  # a failing row must not end the table
        return Cell(reason=f"{type(error).__name__}: {first_line(error)[:160]}")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    cell = show(case, timing.ms)
    timed = {"ms": timing.ms, "ms_quartiles": [timing.low, timing.high], "runs": timing.runs, "error_share": share}
    return dataclasses.replace(cell, details={**timed, **cell.details})


@contextlib.contextmanager
def implementation(family: str | None) -> Iterator[None]:
    """Inside, operators with several implementations choose from this family; None does not change the choice."""
    before = os.environ.get("QTRAIN_IMPL")
    if family is not None:
        os.environ["QTRAIN_IMPL"] = family
    try:
        yield
    finally:
        if family is not None:
            os.environ.pop("QTRAIN_IMPL")
            if before is not None:
                os.environ["QTRAIN_IMPL"] = before


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
            truth = rows @ w.t()
            allowed = ROUNDING[out.dtype] * truth.abs() + accumulation * (rows.abs() @ w.abs().t()) + 1e-30
            share = ((result.double() - truth).abs() / allowed).max()
            worst = max(worst, float(share.nan_to_num(nan=torch.inf)))
        if worst > 1:
            raise WrongResultError(f"an error {worst:.3g} times the tolerance")
        return worst

    return check
