"""The plan of a world that is not the one that runs: memory, wires and step time of a mesh, and a table of sizes.

Every size of the table trains the same micro-batches on each GPU (weak scaling). Efficiency is over one GPU of the same
kind, computing the same without any exchange.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qtrain.core.errors import UserError
from qtrain.core.hardware.device import Hardware
from qtrain.models.cost.memory import Peak
from qtrain.parallel.mesh import Mesh, planned_mesh
from qtrain.train.log.metrics import SampleUnit
from qtrain.train.log.status import duration, short_number
from qtrain.train.plan.cluster import Cluster, Cost
from qtrain.train.plan.sharding import resharded
from qtrain.train.plan.step_time import exchange_overhead, exposed_seconds, tp_overhead
from qtrain.train.plan.traffic import Traffic
from qtrain.train.settings.machine import Wire
from qtrain.train.settings.settings import TrainSettings

GIB, MIB = 1024**3, 1024**2
SIZES = tuple(2**n for n in range(13))
"""GPUs of the table's rows: 1 to 4,096."""


@dataclass(frozen=True)
class SizedStep:
    """A step on a mesh."""

    mesh: Mesh
    reshards: bool
    """Whether layers are fully sharded: they exist in full only while they run."""
    memory: int
    """Bytes per GPU at the peak."""
    costs: dict[str, Cost]
    """Communication by what is sent."""
    compute: float
    """Seconds of computation."""
    exposed: float
    """Seconds of communication that do not overlap with it."""
    overhead: float
    """Seconds of copies and launches of the exchange."""
    samples: float
    """Tokens or images of a data-parallel rank that no other one computes too."""
    alone: float
    """Seconds in which one GPU computes those."""

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.overhead

    @property
    def sent(self) -> Cost:
        return sum(self.costs.values(), Cost())

    @property
    def rate(self) -> float:
        """Tokens or images per second of all GPUs."""
        return self.samples * self.mesh.dp_size / self.seconds

    @property
    def efficiency(self) -> float:
        return self.alone / self.seconds


@dataclass(frozen=True)
class Work:
    """What one GPU computes in a step, with --tp several together."""

    samples: int
    """Tokens or images."""
    repeats: int
    """Ranks that compute the same ones."""
    unit: SampleUnit
    seconds: float
    """Of computation."""
    update: float
    """Of the optimizer's step, on one GPU."""
    sol: float
    """The fraction of the speed of light that `seconds` assumes."""
    sol_source: str
    """Where `sol` is from."""


@dataclass(frozen=True)
class WorldPlan:
    """The plan for a mesh on a cluster, and for other sizes of it."""

    mesh: Mesh
    keeps_shard: bool
    """Whether the meshes of the table have shard groups of this mesh's size; else of all ranks."""
    cluster: Cluster
    hardware: Hardware
    traffic: Traffic
    memory_on: Callable[[Mesh, bool], Peak]
    """Bytes per GPU on a mesh, with layers fully sharded or not."""
    resharding: str
    """--reshard_after_forward."""
    work: Work
    """Of a data-parallel rank."""

    @property
    def compute(self) -> float:
        """Seconds of a GPU's computation in a step; --tp ranks share that of one."""
        return self.work.seconds / self.mesh.tp

    def step(self, mesh: Mesh) -> SizedStep:
        """A step on `mesh` with the same micro-batches per GPU."""
        # Weak scaling: the compute of a GPU stays, so only memory and communication depend on the mesh.
        memory = self.hardware.memory_taken(self.memory_on(mesh, False).reserved)
        reshards = resharded(self.resharding, mesh, memory, self.hardware.memory_bytes)
        costs = self.traffic.costs(mesh, self.cluster, reshards)
        update = self.work.update / mesh.tp
        return SizedStep(
            mesh=mesh,
            reshards=reshards,
            memory=self.hardware.memory_taken(self.memory_on(mesh, True).reserved) if reshards else memory,
            costs=costs,
            compute=self.compute + update / mesh.shard,
            exposed=exposed_seconds(costs, self.compute, reshards),
            overhead=exchange_overhead(self.traffic, mesh, reshards) + tp_overhead(self.compute, mesh.tp),
            samples=self.work.samples / self.work.repeats,
            alone=(self.compute + update) / self.work.repeats,
        )

    def rows(self, n_steps: int) -> list[tuple[str, str]]:
        """Lines of the plan of a run of this many steps, each with its name."""
        step, cluster, per_second = self.step(self.mesh), self.cluster, self.work.unit.per_second
        nodes = cluster.nodes(self.mesh.world)
        between = f" and {_wire(cluster.between)} between them" if nodes > 1 else ""
        sent = ", ".join(f"{what} {_size(cost.bytes)}" for what, cost in step.costs.items() if cost.bytes)
        across = f", {_size(step.sent.between)} of it to other machines" if nodes > 1 else ""
        wire = f"; gradients in {self.traffic.gradient_wire}" if self.traffic.gradient_wire != "exact" else ""
        wire += "; gradients are added inside machines first" if nodes > 1 and not self.traffic.deterministic else ""
        hidden = step.sent.seconds - step.exposed
        overlap = f"{hidden:.3f} more overlap with it" if step.reshards else "none of it overlaps"
        return [
            (
                "world",
                f"{self.mesh.world:,} GPUs, {nodes:,} machine{'s' * (nodes > 1)} of "
                f"{min(self.mesh.world, cluster.gpus_per_node)}: {_wire(cluster.inside)} inside{between}",
            ),
            ("wire", f"a GPU sends {_size(step.sent.bytes)} a step ({sent}{wire}){across}"),
            (
                "step",
                f"{step.seconds:.3f} s: computation {step.compute:.3f}, wires {step.exposed:.3f} ({overlap}), copies "
                f"and launches of the exchange {step.overhead:.3f}; {short_number(step.rate)} {per_second}, "
                f"{100 * step.efficiency:.0f}% of {self.mesh.world:,} times one GPU; {n_steps:,} steps in "
                f"{duration(n_steps * step.seconds)}",
            ),
            ("", f"computation at {100 * self.work.sol:.0f}% of the speed of light ({self.work.sol_source})"),
        ]

    def table(self) -> list[str]:
        """The same for other numbers of GPUs."""
        head = ["GPUs", "replicate x shard", "GiB a GPU", "GiB sent", "to machines", "wires", "step", "", "of one"]
        head[7] = self.work.unit.per_second
        steps = [self.step(mesh) for mesh in self.meshes()]
        have = self.hardware.memory_bytes or 0
        grid = [head] + [_cells(step, have) for step in steps]
        widths = [max(len(row[column]) for row in grid) for column in range(len(head))]
        samples = self.work.samples // self.work.repeats
        lines = [f"sizes   {samples:,} {self.work.unit.many} a GPU and step at every size (weak scaling)"]
        lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in grid]
        if any(step.memory > have for step in steps):
            lines.append(f"* does not fit: {self.hardware.name} has {have / GIB:.1f} GiB")
        return lines

    def meshes(self) -> Sequence[Mesh]:
        """Those of the table: shard groups of the same size as asked for, or, where no flag says their size, of all
        ranks."""
        found, node, tensor = [], self.cluster.gpus_per_node, self.mesh.tp
        for world in sorted({*SIZES, self.mesh.world}):
            data = world // tensor
            shard = min(self.mesh.shard, data) if self.keeps_shard else data
            if world % tensor or not data or data % shard or (world > node and world % node):
                continue  # no whole groups, or a machine that is not full
            if data % self.mesh.cp == 0:
                with contextlib.suppress(UserError):  # --ep does not divide them, or crosses borders of shard groups
                    found.append(planned_mesh(data // shard, shard, self.mesh.ep, tensor, self.mesh.cp))
        return found


def refuse_world(settings: TrainSettings) -> None:
    """UserError for --world_size with a model whose sizes are not known."""
    if settings.world_size is not None:
        raise UserError(
            f"--world_size: what {settings.model} computes and keeps is not known without running it (a model of "
            "--model_impl hf, or one that does not run on the meta device); plan with a native shape."
        )


def _cells(step: SizedStep, have: int) -> list[str]:
    return [
        f"{step.mesh.world:,}",
        f"{step.mesh.replicate} x {step.mesh.shard}{f' x {tensor}' if (tensor := step.mesh.tp) > 1 else ''}"
        f"{', ZeRO-3' if step.reshards else ''}",
        f"{step.memory / GIB:.1f}{'*' if step.memory > have else ' '}",
        f"{step.sent.bytes / GIB:.2f}",
        f"{step.sent.between / GIB:.2f}",
        f"{step.exposed:.3f} s",
        f"{step.seconds:.3f} s",
        f"{step.rate:,.0f}",
        f"{100 * step.efficiency:.0f}%",
    ]


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.2f} MiB"


def _wire(wire: Wire) -> str:
    return f"{wire.name} ({wire.bandwidth / 1e9:.3g} GB/s)"
