"""The plan of a run whose scheme changes on the way (--quantize_schedule): that of the phase that takes most memory,
with the mean time of all."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from qtrain.quant import LinearChoice
from qtrain.quant.scheme_map import spec_text
from qtrain.quant.scheme_schedule import Phase, first_steps
from qtrain.train.plan.plan import Plan, PlannedPhase


def last_linears(plan: Plan, linears: Sequence[LinearChoice]) -> Sequence[LinearChoice]:
    """What the linears of a run end as: those of the last phase; without phases, `linears`."""
    return plan.phases[-1].linears if plan.phases else linears


def phase_at(phases: Sequence[PlannedPhase], step: int) -> int:
    """The number of the phase that the step after `step` steps is in."""
    return sum(phase.first_step <= step for phase in phases) - 1


def plan_of_phases(
    phases: Sequence[Phase], linears: Sequence[Sequence[LinearChoice]], plans: Sequence[Plan], n_steps: int
) -> Plan:
    """The plan of the run: `plans` has one for each phase, `linears` what each does to the linears."""
    firsts = first_steps(phases, n_steps)
    planned = tuple(map(PlannedPhase, phases, firsts, map(tuple, linears), plans))
    shares = [(after - before) / n_steps for before, after in pairwise([*firsts, n_steps])]
    largest = max(plans, key=lambda plan: plan.memory_taken)
    longest = max(zip(shares, plans, strict=True), key=itemgetter(0))[1]
    names = " > ".join(spec_text(phase.spec) for phase in phases)
    kinds = dict.fromkeys(kind for plan in plans for kind in plan.seconds)
    return replace(
        largest,
        scheme=names,
        # Per token, so that the run's mean is that of the phases by their steps.
        seconds={kind: sum(s * p.seconds.get(kind, 0.0) for s, p in zip(shares, plans, strict=True)) for kind in kinds},
        step_seconds=sum(share * plan.step_seconds for share, plan in zip(shares, plans, strict=True)),
        sol_source=longest.sol_source if all(plan.sol_source for plan in plans) else "",
        emulated=tuple(dict.fromkeys(name for plan in plans for name in plan.emulated)),
        phases=planned,
    )


def describe_phases(phases: Sequence[PlannedPhase]) -> list[str]:
    """A line for the plan."""
    if not phases:
        return []
    told = [f"{spec_text(phase.phase.spec)} from step {phase.first_step + 1:,}" for phase in phases]
    return [f"schemes {', '.join(told)}"]
