"""The plan of a run, made before anything is allocated: sizes, memory by kind, and the shortest possible time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from qtrain.core.hardware.device import Hardware
from qtrain.kernels.autotune import check_environment
from qtrain.models.cost.memory import Peak
from qtrain.parallel.mesh import Mesh
from qtrain.quant import LinearChoice
from qtrain.quant.scheme import SCHEMES, Scheme
from qtrain.quant.scheme_schedule import Phase
from qtrain.train.log.metrics import TOKENS, SampleUnit
from qtrain.train.log.status import duration, short_number, three_digits
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.cluster import Cluster
from qtrain.train.plan.linears import shares
from qtrain.train.plan.step_time import (
    BANDWIDTH_REACHED,
    BetweenProducts,
    Passes,
    Shares,
    compute_seconds,
    emulated_arithmetics,
    low_bit_share,
    measured_sol,
    offload_seconds,
    shortest_seconds,
    token_seconds,
)
from qtrain.train.plan.traffic import Traffic
from qtrain.train.plan.world import Work, WorldPlan, refuse_world
from qtrain.train.settings.machine import find_wire, wire_in_node
from qtrain.train.settings.settings import BatchGeometry, TrainSettings

GIB = 1024**3


@dataclass(frozen=True)
class PlannedPhase:
    """What linears run in from a step on."""

    phase: Phase
    first_step: int
    """Optimizer steps before it."""
    linears: tuple[LinearChoice, ...]
    plan: "Plan"
    """As if it were the whole run."""

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of every linear, for `reassign`."""
        bf16 = SCHEMES.make("bf16", {}, "--quantize_schedule")
        return {linear.name: linear.assigned or bf16 for linear in self.linears}


@dataclass(frozen=True)
class Plan:
    """The plan of a run. A token is an image in the plan of a vision model."""

    model: str
    scheme: str
    geometry: BatchGeometry
    n_steps: int
    tokens_per_step: int
    hardware: Hardware
    parameters: int | None = None
    """None for a model that only transformers knows (--model_impl hf); flops, seconds and memory are empty then."""
    active: int | None = None
    """Parameters that a token uses, in a mixture of experts (MoE)."""
    flops: dict[str, float] = field(default_factory=dict)
    """Per token, forward and backward, by kind of work."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The shortest time per token by kind of work, each at the dense peak of the arithmetic that it runs in."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of tensors at the peak, by kind."""
    moment: str = ""
    """When that is."""
    apart: int = 0
    """Bytes that are taken beside them because nothing else can use the memory of CUDA graphs."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of pinned host memory, by the names of --offload."""
    step_seconds: float = 0.0
    """Of a step on one GPU: computation at the fraction of the speed of light that was measured, the optimizer's step,
    and what moves because of settings that only move memory."""
    sol_source: str = ""
    """Of which runs that fraction is; "": of none that are like this one."""
    memory_seconds: Mapping[str, float] = field(default_factory=dict)
    """The shortest time of a step's work that is bound by memory, at the bandwidth of a copy: `between products`, with
    the weights' codes, and `optimizer`; those that are known."""
    advice: tuple[str, ...] = ()
    """What to change where it does not fit, or where much memory is free."""
    within: Callable[[float], str | None] = lambda _: None
    """Bytes -> the flags of the fastest run that takes at most so many; None: none does, or it is not known."""
    emulated: tuple[str, ...] = ()
    """Arithmetic of the swapped linears that the device lacks, or lacks for grouped GEMMs ("grouped")."""
    unit: SampleUnit = TOKENS
    world: WorldPlan | None = None
    """With --world_size."""
    linear_rows: Mapping[str, float] | None = None
    """Rows of the input of each linear, by its name; None: the same for all."""
    phases: tuple[PlannedPhase, ...] = ()
    """Of --quantize_schedule; none without."""
    data: Sequence[str] = ()
    """Lines that describe the data."""

    def at(self, phase: int) -> "Plan":
        """The plan of a phase; without phases, of the run."""
        return self.phases[phase].plan if self.phases else self

    def efficiency(self, tok_s: float) -> dict[str, float | None]:
        """`sol`: fraction of the speed of light; `mfu`: of the dense bf16 peak. None if the FLOPs are unknown,
        `mfu` also without a datasheet: a rate that was timed here is no peak, and may be passed."""
        if not self.flops:
            return {"sol": None, "mfu": None}
        per_device = tok_s / self.geometry.devices
        # MFU is over the dense bf16 peak whatever the scheme, as papers report it; sol is over the arithmetic in use.
        peak = self.hardware.peak("bf16") * 1e12
        mfu = None if self.hardware.measured else per_device * sum(self.flops.values()) / peak
        return {"sol": per_device * sum(self.seconds.values()), "mfu": mfu}

    @property
    def memory_taken(self) -> int:
        """Bytes of the device with what a run takes beside its tensors."""
        return self.hardware.memory_taken(sum(self.memory.values()) + self.apart)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def host_limit(self) -> float:
        """Bytes of host memory that a process may pin, of the several of this machine."""
        pinnable = self.hardware.pinnable
        return math.inf if pinnable is None else pinnable / min(self.geometry.devices, self.hardware.gpus)

    @property
    def fits(self) -> bool:
        """Whether the memory of the device and of the host, where it is known, is enough."""
        have = self.hardware.memory_bytes or math.inf  # unknown: taken to fit
        return self.memory_taken <= have and self.host_bytes <= self.host_limit

    def settings_in_force(self, settings: TrainSettings) -> TrainSettings:
        """The settings with the values of the batch geometry in place of zeros."""
        micro, accumulation = self.geometry.micro_batch_size, self.geometry.gradient_accumulation
        return replace(settings, micro_batch_size=micro, gradient_accumulation=accumulation)

    def lines(self) -> list[str]:
        """The plan as text."""
        g, tokens = self.geometry, self.n_steps * self.tokens_per_step
        sequences = g.micro_batch_size * g.gradient_accumulation * g.world
        unit, devices = self.unit, f"device{'s' * (g.world > 1)}" if g.group == 1 else f"groups of {g.group} devices"
        total = f", {self.tokens_per_step:,} tokens" if self.unit is TOKENS else ""
        count = f"{_billions(self.parameters)} parameters, " if self.parameters else ""
        count += f"{_billions(self.active)} of them active, " if self.active else ""
        rows = [
            ("model", f"{self.model}, {count}linears in {self.scheme}"),
            *(("data", line) for line in self.data),
            (
                "batch",
                f"{sequences:,} {unit.batch} ({g.micro_batch_size} x {g.gradient_accumulation} accumulated x {g.world} "
                f"{devices}){total}",
            ),
            ("steps", f"{self.n_steps:,}, {short_number(tokens)} {unit.many}"),
            ("device", f"{self.hardware.name}, {self._peaks()}"),
        ]
        rows += [("", self.hardware.software)] if self.hardware.software else []
        if self.emulated:
            missing = " or ".join(self.emulated)
            rows.append(("", f"no {missing} arithmetic: emulated, with the same results but no speedup"))
        rows += self._memory_rows() + self._time_rows(tokens)
        rows += self.world.rows(self.n_steps) if self.world else []
        # Eight columns: the report reads the plan back from train.log by them.
        return [f"{name:8}{text}" for name, text in rows]

    def _peaks(self) -> str:
        peaks = self.hardware.peaks.items()
        rates = ", ".join(f"{name} {three_digits(rate)}" for name, rate in peaks if name != "bandwidth")
        if self.hardware.measured:
            return f"measured TFLOP/s: {rates} (no datasheet: sol is over these, mfu is left out)"
        return f"datasheet TFLOP/s: {rates}"

    def _memory_rows(self) -> list[tuple[str, str]]:
        if not self.memory:
            return []
        total, taken, have = sum(self.memory.values()), self.memory_taken, self.hardware.memory_bytes
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in self.memory.items())
        kinds += f", beside recorded steps {self.apart / GIB:.2f}" if self.apart else ""
        own = taken - total - self.apart
        kinds += f", CUDA and its allocator {own / GIB:.2f}" if own > 0 else ""
        of = f" of {have / GIB:.1f}" if have else ""
        rows = [("memory", f"{taken / GIB:.2f}{of} GiB, most at {self.moment}: {kinds}")]
        if self.host:
            kinds = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.host.items())
            of = f" of {self.host_limit / GIB:.1f}" if self.host_limit < math.inf else ""
            rows.append(("", f"{self.host_bytes / GIB:.2f}{of} GiB of pinned host memory: {kinds}"))
        if not self.fits:
            rows.append(("", "warning: this does not fit" + "".join(f"; {line}" for line in self.advice)))
        else:
            rows += [("", line) for line in self.advice]
        return rows

    def _time_rows(self, tokens: int) -> list[tuple[str, str]]:
        if not self.flops:
            return []
        fastest = self.geometry.devices / sum(self.seconds.values())  # tokens per second of all devices
        shares = ", ".join(f"{kind} {100 * s / sum(self.seconds.values()):.0f}%" for kind, s in self.seconds.items())
        time = f"{duration(tokens / fastest)} at the speed of light ({self._rate(fastest)}){self._slower(fastest)}"
        return [
            ("compute", f"{short_number(sum(self.flops.values()))}FLOP {self.unit.one}; of the shortest time {shares}"),
            ("time", time),
        ]

    def _slower(self, fastest: float) -> str:
        """How long the run may take, beside its time at `fastest` tokens per second."""
        if self.world:  # its own rows say
            return ""
        if not self.sol_source:
            return f"; {duration(2 * self.n_steps * self.tokens_per_step / fastest)} at half of it"
        rate = self.tokens_per_step / self.step_seconds
        exchange = ", without what devices send each other" * (self.geometry.devices > 1)
        return (
            f"; {duration(self.n_steps * self.step_seconds)} at {100 * rate / fastest:.0f}% of it ({self._rate(rate)}; "
            f"{self.sol_source}){exchange}"
        )

    def _rate(self, rate: float) -> str:
        return f"{short_number(rate)} {self.unit.per_second}"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the plan of a model computes with, where its sizes are known."""

    active: int | None = None
    """Those that a token uses, in a mixture of experts (MoE)."""
    flops: dict[str, float]
    """Per token, forward and backward, by kind of work."""
    work: Mapping[str, float]
    """Of each linear, by name, in proportion to its FLOPs."""
    frozen: bool = False
    """Whether the linears have no grad_weight, as under adapters."""
    again: Mapping[str, float] = field(default_factory=dict)
    """By kind of work, the share of the forward pass that backward recomputes."""
    moe: bool = False
    memory_on: Callable[[Mesh, bool], Peak]
    """Bytes per GPU on a mesh, with layers fully sharded or not."""
    between: BetweenProducts | None = None
    """None: not counted apart from products."""
    embedding_bytes: float = 0.0
    """Of an embedding that --offload weights has in host memory."""
    moved_bytes: float = 0.0
    """Of a GPU's memory in a step, because of settings that only move memory (`models/cost/step_traffic.py`)."""
    update_bytes: float = 0.0
    """That the optimizer's step reads and writes on one GPU; 0: its time is part of the fraction that was measured."""
    requantized_bytes: float = 0.0
    """That are read and written where the weights are quantized after it."""
    traffic: Callable[[], Traffic]
    """The communication of a step on any mesh; asked with --world_size only."""
    resharding: str = "never"
    """--reshard_after_forward, where the plan of a world takes full sharding into account."""

    def shortest(
        self, by_kind: Mapping[str, Shares], hardware: Hardware, dtype: torch.dtype, *, reached: bool = False
    ) -> dict[str, float]:
        """`shortest_seconds` of this work."""
        return shortest_seconds(self.flops, by_kind, hardware, dtype, frozen=self.frozen, reached=reached)

    def passes(
        self, by_kind: Mapping[str, Shares], hardware: Hardware, dtype: torch.dtype, samples: int, sol: float
    ) -> Passes:
        """What `samples` take at the fraction `sol` of the speed of light."""
        again, frozen, between = self.again, self.frozen, self.between
        if between is None:
            return compute_seconds(self.shortest(by_kind, hardware, dtype), samples, sol, again, frozen)
        reached = self.shortest(by_kind, hardware, dtype, reached=True)
        products = between.products_sol(sol, by_kind, dtype)
        return token_seconds(reached, samples, products, again, frozen, between.run, hardware.memory_bandwidth)


def make_plan(
    checked: CheckedSettings,
    linears: Sequence[LinearChoice],
    hardware: Hardware,
    figures: Figures | None,
    *,
    parameters: int | None = None,
    per_sample: int = 1,
    unit: SampleUnit = TOKENS,
) -> Plan:
    """The plan of a run. Raises UserError for --world_size without figures.

    figures: None for a model whose sizes are not known without running it. per_sample: tokens of a sequence.
    """
    check_environment()
    settings, geometry = checked.settings, checked.geometry
    name = getattr(checked.scheme.root, "name", "") or settings.quantize
    plan = Plan(
        model=settings.model,
        scheme=name + ", some by --quantize_overrides" * bool(settings.quantize_overrides),
        geometry=geometry,
        n_steps=settings.steps,
        tokens_per_step=settings.batch_size * per_sample,
        hardware=hardware,
        emulated=emulated_arithmetics(linears, hardware),
        unit=unit,
        parameters=parameters,
    )
    if figures is None:
        refuse_world(settings)
        return plan
    samples = geometry.micro_batch_size * geometry.gradient_accumulation * per_sample // settings.sequence_parts
    return _with_figures(plan, checked, linears, figures, samples)


def _with_figures(
    plan: Plan, checked: CheckedSettings, linears: Sequence[LinearChoice], figures: Figures, samples: int
) -> Plan:
    """`plan` with memory and time. samples: tokens or images that a GPU computes in a step."""
    settings, hardware, dtype = checked.settings, plan.hardware, checked.dtype
    kinds = {"blocks": [n for n in linears if not n.is_head], "head": [n for n in linears if n.is_head]}
    by_kind = {kind: shares(found, figures.work) for kind, found in kinds.items()}
    seconds, peak = figures.shortest(by_kind, hardware, dtype), figures.memory_on(checked.mesh, checked.reshards)
    low_bit = low_bit_share(by_kind, seconds, figures.shortest({}, hardware, dtype), figures.frozen)
    # A user's own fraction, or the nearest measurement, with the name of what was measured.
    sol, source = settings.sol, "--sol"
    if sol is None:
        assert plan.parameters is not None  # as all figures need them
        sol, source = measured_sol(plan.unit, plan.parameters, low_bit=low_bit, moe=figures.moe)
        source += "" if "H200" in hardware.name else f"; assumed of {hardware.name}"
    bandwidth = BANDWIDTH_REACHED * hardware.memory_bandwidth
    # A user's fraction is of the whole step, as the log of a run tells it.
    update = figures.update_bytes / bandwidth if settings.sol is None else 0.0
    passes, world = figures.passes(by_kind, hardware, dtype, samples, sol), None
    if settings.world_size is not None:
        world = WorldPlan(
            mesh=checked.mesh,
            keeps_shard=bool(settings.dp_shard or settings.dp_replicate),
            cluster=Cluster(settings.gpus_per_node, wire_in_node(hardware), find_wire(settings.wire)),
            hardware=hardware,
            traffic=figures.traffic(),
            memory_on=figures.memory_on,
            resharding=figures.resharding,
            work=Work(samples, settings.cp // settings.sequence_parts, plan.unit, sum(passes), update, sol, source),
        )
    micro_batches, link = plan.geometry.gradient_accumulation, hardware.host_bandwidth or math.inf
    forward, backward = (size / micro_batches for size in passes)
    waits = offload_seconds(peak.host, link, forward, backward, micro_batches, figures.embedding_bytes)
    # As the measured steps were: compiled, on tensor cores, all parameters stepped at once by an elementwise optimizer.
    whole = settings.optimizer_in_backward or checked.optimizer.needs_whole(hidden=True)
    known = settings.compile and not (hardware.measured or plan.emulated or whole)
    return replace(
        plan,
        active=figures.active,
        flops=figures.flops,
        seconds=seconds,
        memory=peak.kinds,
        moment=peak.moment,
        apart=peak.apart,
        host=peak.host,
        step_seconds=sum(passes) + update / checked.mesh.shard + figures.moved_bytes / bandwidth + waits,
        sol_source=source if settings.sol is not None or known else "",
        world=world,
        memory_seconds=_memory_seconds(figures, samples, bandwidth),
    )


def _memory_seconds(figures: Figures, samples: int, bandwidth: float) -> dict[str, float]:
    if figures.between is None:
        return {}
    between = figures.between.run * samples + figures.requantized_bytes
    return {"between products": between / bandwidth, "optimizer": figures.update_bytes / bandwidth}


def _billions(number: int) -> str:
    """A number with B for billions, as parameters are counted."""
    return short_number(number).replace("G", "B")
