"""The table of `--profile`: device time of a step by kind of kernel, beside the shortest that the plan allows."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from qtrain.train.log.kernel_kinds import KINDS, OTHER, kernel_kind

BETWEEN = ("quantize", "norm and RoPE", "activation function", "loss", "sums")
"""Kinds of what is read and written between products."""
FLOORS = ("attention", "between products", "optimizer")
"""Of the plan's kinds of work those that are no products of linears."""
MOST_NAMES = 8
"""Kernels of a kind that are listed by name."""
NAME_WIDTH = 90


@dataclass(frozen=True)
class Kernel:
    """One launch, in microseconds of the device's clock; of a CPU an operator, without those that it calls."""

    name: str
    start: float
    end: float
    spent: float


def kernels_of(events: Iterable[FunctionEvent], on_gpu: bool) -> list[Kernel]:
    """The kernels among a profiler's events; on a CPU its operators."""
    if not on_gpu:
        # Operators have a namespace, as aten::mm; ranges that code has named have none.
        found = [e for e in events if e.device_type == DeviceType.CPU and "::" in e.name]
        return [Kernel(e.name, e.time_range.start, e.time_range.end, e.self_cpu_time_total) for e in found]
    # Ranges that code has named, such as a step or a collective, are shown on the device too.
    device = [e for e in events if e.device_type == DeviceType.CUDA and not _is_range(e)]
    return [Kernel(e.name, r.start, r.end, r.end - r.start) for e in device for r in (e.time_range,)]


def _is_range(event: FunctionEvent) -> bool:
    named = event.name.startswith(("ProfilerStep", "## ", "nccl:", "Optimizer.", "Torch-Compiled"))
    return named or bool(getattr(event, "is_user_annotation", False))


@dataclass(frozen=True)
class KernelTable:
    """Kernels of some steps, in milliseconds per step."""

    ms: dict[str, float]
    """By kind, the longest first."""
    launches: dict[str, float]
    by_name: dict[str, list[tuple[str, float, float]]]
    """By kind: name, milliseconds and launches of each kernel, the longest first."""
    idle: float
    """While no kernel ran."""
    floor: Mapping[str, float]
    """The plan's shortest times: of `GEMM` and `attention` at dense peaks, of the others of FLOORS at the bandwidth of
    a copy."""
    overlap: float = 0.0
    """While more than one kernel ran, counted once for each further one."""

    @property
    def busy(self) -> float:
        """While at least one kernel ran."""
        return sum(self.ms.values()) - self.overlap

    @property
    def total(self) -> float:
        """From the first kernel's start to the last one's end."""
        return self.busy + self.idle

    def short(self) -> str:
        """One line: the largest kinds."""
        shares = {**dict(sorted(self.ms.items(), key=lambda item: -item[1])[:6]), "idle": self.idle}
        parts = ", ".join(f"{kind} {100 * ms / max(self.total, 1e-9):.0f}%" for kind, ms in shares.items())
        return f"a step takes {self.total:.3g} ms of the device: {parts}"

    def text(self) -> str:
        """The whole table: kinds, GEMMs first, then the kernels of each by name."""
        gemms = [kind for kind in self.ms if kind.startswith("GEMM")]
        between = [kind for kind in self.ms if kind in BETWEEN]
        lines = [f"{'kind':22}{'ms a step':>12}{'share':>8}{'launches':>10}{'floor ms':>10}{'of floor':>10}", ""]
        for name, kinds, floor in (("all GEMMs", gemms, "GEMM"), ("all between products", between, "between products")):
            lines += [self._row(kind, self.ms[kind], self.launches[kind]) for kind in kinds]
            if kinds:
                ms, launches = (sum(values[kind] for kind in kinds) for values in (self.ms, self.launches))
                lines.append(self._row(name, ms, launches, self.floor.get(floor)))
        others = [kind for kind in self.ms if kind not in (*gemms, *between)]
        lines += [self._row(kind, self.ms[kind], self.launches[kind], self.floor.get(kind)) for kind in others]
        # Negative, so that the column adds up to the step.
        lines += [self._row("overlapping", -self.overlap), self._row("idle", self.idle)]
        lines += [self._row("step", self.total, sum(self.launches.values()), sum(self.floor.values())), ""]
        lines.append(
            "floor: the plan's FLOPs at the dense peak of each GEMM's arithmetic, its bytes at a copy's bandwidth"
        )
        for kind, names in self.by_name.items():
            lines += ["", f"{kind}:"]
            lines += [
                f"{ms:12.3f} ms {launches:8,.0f} x  {name[:NAME_WIDTH]}" for name, ms, launches in names[:MOST_NAMES]
            ]
            if left := names[MOST_NAMES:]:
                lines.append(f"{sum(ms for _, ms, _ in left):12.3f} ms in {len(left)} more")
        return "\n".join(lines) + "\n"

    def _row(self, kind: str, ms: float, launches: float | None = None, floor: float | None = None) -> str:
        count = "" if launches is None else f"{launches:,.0f}"
        beside = f"{floor:10.3f}{ms / floor:9.2f}x" if floor else ""
        return f"{kind:22}{ms:12.3f}{100 * ms / max(self.total, 1e-9):7.1f}%{count:>10}{beside}".rstrip()


def kernel_table(kernels: Iterable[Kernel], steps: int, floor: Mapping[str, float]) -> KernelTable:
    """floor: of a step, in milliseconds, by the plan's kinds of work."""
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    kernels = sorted(kernels, key=lambda kernel: kernel.start)
    for kernel in kernels:
        spent[kernel.name] += kernel.spent / 1000 / steps  # us of all steps -> ms of one
        count[kernel.name] += 1
    by_name: dict[str, list[tuple[str, float, float]]] = {kind: [] for kind in KINDS}
    for name in sorted(spent, key=lambda name: -spent[name]):
        by_name[kernel_kind(name)].append((name, spent[name], count[name] / steps))
    ms = {kind: sum(own for _, own, _ in names) for kind, names in by_name.items() if names}
    order = sorted(ms, key=lambda kind: (kind == OTHER, -ms[kind]))  # what has no name comes last
    busy, span = _busy(kernels)
    return KernelTable(
        {kind: ms[kind] for kind in order},
        {kind: sum(launches for _, _, launches in by_name[kind]) for kind in order},
        {kind: by_name[kind] for kind in order},
        idle=(span - busy) / 1000 / steps,
        floor=_grouped(floor),
        # Without overlap, rounding may leave a difference just below 0.
        overlap=max(sum(ms.values()) - busy / 1000 / steps, 0.0),
    )


def _busy(kernels: list[Kernel]) -> tuple[float, float]:
    """Microseconds during which some kernel ran, and from the first start to the last end. kernels: by start."""
    busy, until = 0.0, kernels[0].start if kernels else 0.0
    for kernel in kernels:
        # The union of intervals: of an overlap only the part after `until` is new.
        busy += max(kernel.end - max(kernel.start, until), 0.0)
        until = max(until, kernel.end)
    return busy, until - kernels[0].start if kernels else 0.0


def _grouped(floor: Mapping[str, float]) -> dict[str, float]:
    """The plan's kinds of work as the table's: all but FLOORS are products."""
    gemm = sum(ms for kind, ms in floor.items() if kind not in FLOORS)
    return {kind: ms for kind, ms in (("GEMM", gemm), *((kind, floor.get(kind, 0.0)) for kind in FLOORS)) if ms}
