"""What a collective costs on machines of several GPUs: bytes on each kind of wire, and seconds.

Every GPU has a link inside its machine and one to the other machines. A collective takes as long as the slower of the
two: bytes over bandwidth, and the start of every message.

    all-to-all     a message of 1/R of the bytes for each of R ranks; those for other machines leave by the GPU's own
                   adapter
    all-gather     a ring: every GPU passes on R - 1 parts, but each part enters a machine once, and its n GPUs share
                   those
"""

import math
from dataclasses import dataclass, replace

from qtrain.parallel.mesh import Mesh
from qtrain.train.settings.machine import START_SECONDS, Wire


@dataclass(frozen=True)
class Ranks:
    """The ranks of a collective."""

    count: int
    in_node: int
    """How many of them share a machine."""


@dataclass(frozen=True)
class Cost:
    """Communication of one GPU in a step."""

    inside: float = 0.0
    """Bytes sent intra-node."""
    between: float = 0.0
    """Bytes sent inter-node."""
    seconds: float = 0.0
    """Time on the wires: the slower of the two kinds, latency included."""

    @property
    def bytes(self) -> float:
        return self.inside + self.between

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.inside + other.inside, self.between + other.between, self.seconds + other.seconds)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.inside * times, self.between * times, self.seconds * times)


@dataclass(frozen=True)
class Cluster:
    """Machines of equally many GPUs."""

    gpus_per_node: int
    inside: Wire
    """Each GPU's intra-node link."""
    between: Wire
    """Each GPU's inter-node link."""

    def nodes(self, world: int) -> int:
        return -(-world // self.gpus_per_node)

    def every(self, step: int) -> "Cluster":
        """The cluster of every `step`-th rank, as for groups of ranks that count as one."""
        return replace(self, gpus_per_node=max(self.gpus_per_node // step, 1))

    def world(self, mesh: Mesh) -> Ranks:
        return Ranks(mesh.world, min(mesh.world, self.gpus_per_node))

    def shard_group(self, mesh: Mesh) -> Ranks:
        """Consecutive ranks."""
        # The largest groups of consecutive ranks that never cross the border of a machine.
        together = self.world(mesh).in_node
        return Ranks(mesh.shard, min(mesh.shard, math.gcd(mesh.shard, together)))

    def replicate_group(self, mesh: Mesh) -> Ranks:
        """Ranks that are `mesh.shard` apart."""
        together = self.world(mesh).in_node
        return Ranks(mesh.replicate, together // mesh.shard if together % mesh.shard == 0 else 1)

    def all_to_all(self, ranks: Ranks, volume: float, calls: int) -> Cost:
        """volume: bytes that each rank has for all ranks together, itself included."""
        near, far = ranks.in_node - 1, ranks.count - ranks.in_node  # peers intra-node, inter-node
        message = volume / ranks.count  # what a rank has for itself is not sent
        return self._cost(ranks, calls, near * message, far * message, near, far)

    def reduction(self, ranks: Ranks, volume: float, calls: int, by_machine: bool) -> Cost:
        """Of gradients, by one all-to-all of all ranks, or by one inside each machine and one of its sums between
        machines. volume: as of `all_to_all`."""
        machines = ranks.count // ranks.in_node
        if not by_machine or 1 in (machines, ranks.in_node):
            return self.all_to_all(ranks, volume, calls)
        # Reduced inside the machine first, each GPU has 1/in_node of the sums to exchange with its peers elsewhere.
        inside = self.all_to_all(Ranks(ranks.in_node, ranks.in_node), volume, calls)
        return inside + self.all_to_all(Ranks(machines, 1), volume / ranks.in_node, calls)

    def all_gather(self, ranks: Ranks, volume: float, calls: int) -> Cost:
        """volume: bytes that each rank has afterwards."""
        part, nodes = volume / ranks.count, ranks.count // ranks.in_node
        # Each part from elsewhere enters a machine once, over one of its in_node adapters, and goes round inside.
        between = (ranks.count - ranks.in_node) * part / ranks.in_node
        inside = (ranks.count - 1) * part - between
        return self._cost(ranks, calls, inside, between, ranks.in_node - 1, nodes - 1)

    def _cost(self, ranks: Ranks, calls: int, inside: float, between: float, near: int, far: int) -> Cost:
        if ranks.count == 1:
            return Cost()
        # Both kinds of wire are busy at once: a collective takes as long as the slower one.
        seconds = max(
            inside / self.inside.bandwidth + calls * near * self.inside.message_seconds,
            between / self.between.bandwidth + calls * far * self.between.message_seconds,
        )
        return Cost(inside, between, calls * START_SECONDS + seconds)
