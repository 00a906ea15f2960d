"""Schemes over time: --quantize_schedule '[[0,"bf16"],[0.2,"bitnet"]]'.

Each entry is [when, scheme]: linears run in the scheme from there on. `when` below 1 is a share of the run's steps,
from 1 on a number of steps; the scheme is written as in --quantize_overrides. Two published uses: a ternary model
begins in high precision (Nielsen et al. 2025, arXiv:2502.11895), and an NVFP4 run ends with its forward pass in bf16
(NVIDIA 2025, arXiv:2509.25149): [[0,"nvfp4"],[0.85,{"scheme":"nvfp4","output":"bf16"}]].

A change is a `reassign` between two steps. Where a later scheme adds norms to the model (BitNet), the model has them
from its build on.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from qtrain.core.checks import shown
from qtrain.core.errors import UserError
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.scheme_map import SchemeMap, Spec, scheme_of, spec_of, spec_text, with_overrides

FLAG = "--quantize_schedule"


class Phase(NamedTuple):
    """A scheme and when it begins."""

    when: float
    """Below 1 a share of the steps; else a number of steps."""
    scheme: Scheme

    @property
    def spec(self) -> Spec:
        return spec_of(None if self.scheme.leaves_all else self.scheme)

    def first_step(self, n_steps: int) -> int:
        """Optimizer steps before it."""
        return round(self.when * n_steps) if self.when < 1 else int(self.when)


def read_phases(given: Sequence[Any]) -> tuple[Phase, ...]:
    """The entries of --quantize_schedule. UserError for what is none."""
    phases = tuple(_phase(entry, f"{FLAG} ({shown(entry)})") for entry in given)
    if not phases or phases[0].when != 0:
        raise UserError(f'{FLAG}: the first entry must begin at 0, as in [[0,"bf16"],[0.2,"bitnet"]].')
    for before, after in pairwise(phases):
        if before.scheme == after.scheme:
            raise UserError(f"{FLAG}: {spec_text(after.spec)} follows itself; leave one of the two entries out.")
    return phases


def _phase(entry: Any, flag: str) -> Phase:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise UserError(f'{flag}: an entry is a list of two, [when, scheme], as in [0.2,"bitnet"].')
    when, spec = entry
    numeric = isinstance(when, int | float) and not isinstance(when, bool)
    if not numeric or not (0 <= when < 1 or (when >= 1 and when == int(when))):
        raise UserError(
            f"{flag}: {shown(when)} is not allowed; give a share of the steps below 1, or a number of steps."
        )
    scheme = scheme_of(spec, flag)
    if not scheme.leaves_all and not isinstance(scheme, LowBitScheme):
        raise UserError(f"{flag}: {SCHEMES.name_of(scheme)!r} chooses schemes for the whole model; name one.")
    if isinstance(scheme, LowBitScheme) and scheme.stored_format is not None:
        raise UserError(f"{flag}: weights stored in low bits are parameters of another kind; they cannot come or go.")
    return Phase(float(when), scheme)


def first_steps(phases: Sequence[Phase], n_steps: int) -> list[int]:
    """The steps before each phase. UserError where two begin at once, or one after the end."""
    found = [phase.first_step(n_steps) for phase in phases]
    for phase, (before, after) in zip(phases[1:], pairwise(found), strict=True):
        if after <= before:
            raise UserError(
                f"{FLAG}: {spec_text(phase.spec)} begins after {after:,} of {n_steps:,} steps, and the entry before it "
                f"after {before:,}; give entries in the order of their beginning, at least a step apart."
            )
    if found[-1] >= n_steps:
        raise UserError(
            f"{FLAG}: {spec_text(phases[-1].spec)} begins after {found[-1]:,} steps, and there are {n_steps:,}; let it "
            "begin earlier, or leave it out."
        )
    return found


def built_scheme(phases: Sequence[Phase], overrides: Mapping[str, Any] | None) -> Scheme:
    """What the model is built with: the first scheme, with the norms that a later one may need."""
    first = phases[0].scheme
    needs = next((phase.scheme for phase in phases if phase.scheme.root.sub_norm), None)
    if needs is not None and not first.root.sub_norm:
        first = SchemeMap(needs, (("*", first),), f"{FLAG} begins without it")
    return with_overrides(overrides, first)
