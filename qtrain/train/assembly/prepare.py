"""From checked settings to a run that can be built: the scheme of every linear, and the plan.

When `prepare` returns, everything that can be refused has been refused; nothing has been written, and no weight has
been allocated.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from qtrain.comm.ranks import from_rank_0
from qtrain.core.hardware.device import Hardware, with_measured_host_link
from qtrain.models.cost.trained import TrainedPart
from qtrain.parallel.layers.place import order_notes
from qtrain.quant import LinearChoice, choose_linears, describe_choices
from qtrain.quant.scheme_schedule import Phase
from qtrain.train.assembly.architecture import Architecture
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.fit import advice, fit, flags_within
from qtrain.train.plan.linears import (
    check_overrides,
    describe_low_bits,
    refuse_no_swap,
    resolve_auto_scheme,
    resumed_map,
    warn_high_precision,
)
from qtrain.train.plan.phases import describe_phases, last_linears, plan_of_phases
from qtrain.train.plan.plan import Plan
from qtrain.train.plan.sharding import reshards
from qtrain.train.settings.machine import planned_hardware

BUILT_IN_FULL = (
    "note    full sharding: every process builds this model in full before it shards it; --model_impl native builds "
    "matrix by matrix"
)


@dataclass(frozen=True, kw_only=True)
class Prepared(CheckedSettings):
    """A run that can be built."""

    architecture: Architecture
    linears: tuple[LinearChoice, ...]
    plan: Plan
    text: str
    """The plan and the list of linears, as printed."""


def prepare(
    checked: CheckedSettings, architecture: Architecture, data: Sequence[str], trained: TrainedPart | None = None
) -> Prepared:
    """Choose the scheme of every linear and plan the run. Raises UserError.

    data: lines that describe the data. trained: what trains, if not everything does.
    """
    model = architecture.empty
    head = architecture.head(model)
    checked, auto_lines = resolve_auto_scheme(
        checked, model, head, checked.geometry.micro_batch_size * architecture.rows
    )
    checked, linears = _resolved(checked, architecture)
    hardware = planned_hardware(checked.settings, checked.device)
    phases = _linears_of_phases(checked, architecture)
    planned = functools.partial(_planned, architecture, phases or [linears], hardware, trained)
    checked, plan = planned(checked)
    if plan.memory and (hardware.is_gpu or not plan.fits):
        within = functools.partial(flags_within, checked, plan_of=lambda changed: planned(changed)[1])
        fitted = getattr(checked.settings, "fit", "off") == "auto"  # it has searched already
        found = () if fitted else advice(checked, plan, lambda changed: planned(changed)[1])
        plan = dataclasses.replace(plan, advice=found, within=within)
    plan = dataclasses.replace(plan, linear_rows=architecture.linear_rows, data=data)
    told = list(last_linears(plan, linears))
    lines = [
        describe_low_bits(told, plan.linear_rows),
        *plan.lines(),
        *describe_phases(plan.phases),
        *([f"mesh    {checked.mesh.describe(checked.reshards)}"] if checked.mesh.world > 1 else []),
        *(order_notes(checked.mesh, _rounds_experts(linears)) if checked.settings.deterministic else []),
        *([BUILT_IN_FULL] if checked.reshards and not architecture.is_native else []),
        *checked.notes,
        *auto_lines,
        "linears",
        *describe_choices(told),
    ]
    lines += architecture.notes(linears)
    if not plan.phases:
        lines += warn_high_precision(linears, checked.scheme, checked.dtype, plan.linear_rows)
    lines += plan.world.table() if plan.world else []
    shared = {f.name: getattr(checked, f.name) for f in dataclasses.fields(CheckedSettings)}
    return Prepared(**shared, architecture=architecture, linears=tuple(linears), plan=plan, text="\n".join(lines))


def _resolved(
    checked: CheckedSettings, architecture: Architecture, flag: str = "--quantize"
) -> tuple[CheckedSettings, list[LinearChoice]]:
    """The map of schemes in force, that of a checkpoint included, and what it does to each linear. UserError for one
    that asks for what no linear can do. flag: what names the scheme."""
    model, settings = architecture.empty, checked.settings
    planned = functools.partial(
        choose_linears,
        model,
        device=checked.device,
        head=architecture.head(model),
        quantize_head=settings.quantize_lm_head,
        min_size=settings.quantize_min_size,
        left=architecture.left_linears(checked.scheme),
    )
    linears = planned(checked.scheme)
    if not checked.phases:
        check_overrides(linears, checked.scheme)
        refuse_no_swap(linears, checked.scheme, settings.quantize, flag)
    resumed = resumed_map(checked, linears)
    if resumed is not checked:
        linears = planned(resumed.scheme)
    return resumed, linears


def _linears_of_phases(checked: CheckedSettings, architecture: Architecture) -> list[list[LinearChoice]]:
    """What each phase of --quantize_schedule does to the linears. UserError for one that asks for what none can do."""
    return [_resolved(_alone(checked, phase), architecture, "--quantize_schedule")[1] for phase in checked.phases]


def _alone(checked: CheckedSettings, phase: Phase) -> CheckedSettings:
    """A phase as the whole of a run, which resumes from nothing: its map is that of the settings."""
    return dataclasses.replace(checked.at(phase), folder=dataclasses.replace(checked.folder, resumed_from=None))


def _planned(
    architecture: Architecture,
    linears: Sequence[Sequence[LinearChoice]],
    hardware: Hardware,
    trained: TrainedPart | None,
    checked: CheckedSettings,
) -> tuple[CheckedSettings, Plan]:
    """The plan, with full sharding where --reshard_after_forward asks for it, and the settings that say so. linears: of
    each phase of --quantize_schedule; without, of the run."""

    def plan_of(checked: CheckedSettings) -> Plan:
        if not checked.phases:
            return architecture.plan(checked, linears[0], hardware, trained)
        # With the scheme that the model is built for: norms that come with a later one are there from the first step.
        alone = [dataclasses.replace(checked.at(phase), scheme=checked.scheme) for phase in checked.phases]
        plans = [architecture.plan(one, own, hardware, trained) for one, own in zip(alone, linears, strict=True)]
        return plan_of_phases(checked.phases, linears, plans, checked.settings.steps)

    checked = dataclasses.replace(checked, reshards=False)
    plan = plan_of(checked)
    model = architecture.empty
    if reshards(checked, plan.memory_taken, hardware.memory_bytes, model, architecture.blocks(model)):
        checked = dataclasses.replace(checked, reshards=True)
        plan = plan_of(checked)
    return checked, plan


def fit_memory(
    checked: CheckedSettings, architecture: Architecture, trained: TrainedPart | None = None
) -> CheckedSettings:
    """With --fit auto: the settings that it chooses, which the plan's notes tell; else `checked` itself. UserError
    where nothing fits."""
    settings = checked.language
    if settings.fit == "off":
        return checked
    asked = checked.scheme
    checked, linears = _resolved(checked, architecture)
    hardware = planned_hardware(settings, checked.device)
    if checked.device.type == "cuda":
        hardware = from_rank_0(lambda: with_measured_host_link(hardware, checked.device))
    phases = _linears_of_phases(checked, architecture)
    planned = functools.partial(_planned, architecture, phases or [linears], hardware, trained)
    checked, lines = fit(checked, lambda changed: planned(changed)[1])
    return dataclasses.replace(checked, scheme=asked, notes=(*lines, *checked.notes))


def _rounds_experts(linears: Sequence[LinearChoice]) -> bool:
    """Whether experts' weights are rounded stochastically."""
    schemes = [linear.scheme for linear in linears if linear.groups > 1 and linear.scheme is not None]
    return any(s.stored_format is not None or any(s.rounds("w")) for s in schemes)
