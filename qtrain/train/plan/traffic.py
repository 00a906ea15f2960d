"""What the ranks of a mesh send each other in a step, from what trains: gradients there, updated weights back.

The gradients of all ranks meet once a step, after the last micro-batch, in an all-to-all inside each machine and one
between machines (`parallel/gradients.py`), with --deterministic after every micro-batch in one of all ranks;
replicas then gather the sums of their shards. Ranks of a shard group gather the updated
weights: codes where a scheme's codes may travel, else the values themselves (`parallel/sharded_codes.py`).

With full sharding (`parallel/full_shard.py`) layers are gathered before their forward and before their backward pass
of every micro-batch, an embedding and a head of their own before their forward pass, and gradients meet after each.

With --tp ranks have parts of all layers, whose gradients and weights travel between those that hold the same parts, and
inputs and outputs of every layer's two halves travel between the ranks that compute it together
(`models/native/tensor_parallel.py`).

With --ep each rank has a part of the experts, whose gradients and weights travel between the ranks that hold the same
part, and the tokens of every micro-batch travel to the experts (`parallel/layers/experts.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qtrain.comm.wire import ALONE_BYTES, BUCKET_BYTES
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.parallel.gradient_wire import GRADIENT_WIRES
from qtrain.parallel.layers.exchange import gathers_codes, gathers_routed_codes, gathers_second_codes
from qtrain.parallel.mesh import Mesh
from qtrain.quant import LinearChoice, LowBitScheme
from qtrain.quant.weight_codes import reads_codes_only, wire_format
from qtrain.train.plan.cluster import Cluster, Cost, Ranks
from qtrain.train.plan.scheme_bytes import weight_bytes

EXCHANGES_A_LAYER = 7
"""Collectives between experts: routes, their weights, x and y; in backward dout, dx and the weights' gradients."""
EXCHANGES_A_HALF = 4
"""Collectives of --tp: where attention, or the MLP, begins and ends, in both directions. As many for embedding and head
together: where the one ends and the other begins."""


@dataclass(frozen=True)
class ExpertTraffic:
    """Of experts that --ep divides. parameters: of all experts, as if none was divided; layers: mixtures; tokens: of a
    rank's micro-batch; bytes_per_token: that reach each other rank, in one layer, forward and backward."""

    parameters: "Traffic"
    layers: int
    tokens: int
    bytes_per_token: float

    def costs(self, expert_mesh: Mesh, cluster: Cluster, reshards: bool) -> dict[str, Cost]:
        ranks, node = expert_mesh.tp, cluster.gpus_per_node
        found = self.part(ranks).costs(Mesh(expert_mesh.replicate, expert_mesh.shard), cluster.every(ranks), reshards)
        volume, calls = ranks * self.layers * self.tokens * self.bytes_per_token, self.layers * EXCHANGES_A_LAYER
        tokens = cluster.all_gather(Ranks(ranks, min(ranks, node)), volume, calls)
        return found | {"tokens of experts": tokens * self.parameters.micro_batches}

    def part(self, ranks: int) -> "Traffic":
        """Of one rank's experts."""
        whole = self.parameters
        weights, in_layers, outside = (size / ranks for size in (whole.weights, whole.in_layers, whole.outside))
        return replace(
            whole, parameters=whole.parameters // ranks, weights=weights, in_layers=in_layers, outside=outside
        )


@dataclass(frozen=True)
class TensorTraffic:
    """Of layers that --tp divides. tokens: of a micro-batch; bytes_per_token: that one has in all exchanges, each of
    which moves (ranks - 1) / ranks of them; calls: how many these are."""

    tokens: int
    bytes_per_token: float
    calls: int

    def cost(self, ranks: int, cluster: Cluster) -> Cost:
        """Of a micro-batch."""
        group = Ranks(ranks, min(ranks, cluster.gpus_per_node))
        return cluster.all_gather(group, self.tokens * self.bytes_per_token, self.calls)


@dataclass(frozen=True)
class Traffic:
    """Of a step of the whole model, with --tp of a rank's part. parameters: that train; matrices: that these make up;
    element: bytes of each parameter and of its gradient; weights: bytes of all updated weights as they travel, outside:
    of those that full sharding does not divide; in_layers, at_ends: of all weights that it gathers, frozen ones too, of
    layers, and of an embedding and a head; micro_batches: of a rank; gradient_wire: see --gradient_wire; deterministic:
    gradients are added in the order of the micro-batches; experts: with --ep, and all else is then without them;
    tensor: with --tp."""

    parameters: int
    matrices: int
    element: int
    weights: float
    in_layers: float = 0.0
    outside: float = 0.0
    at_ends: float = 0.0
    micro_batches: int = 1
    gradient_wire: str = "exact"
    deterministic: bool = False
    experts: ExpertTraffic | None = None
    tensor: TensorTraffic | None = None

    @property
    def gradients(self) -> float:
        """Bytes of all gradients as they travel."""
        wire = GRADIENT_WIRES[self.gradient_wire]
        return self.parameters * (self.element if wire is None else wire.bytes_per_element)

    def costs(self, mesh: Mesh, cluster: Cluster, reshards: bool = False) -> dict[str, Cost]:
        """By what travels. A mesh of one rank sends nothing."""
        if self.experts is not None:
            found, others = self.experts.costs(mesh.expert_mesh, cluster, reshards), replace(self, experts=None)
            return found | {what: cost + found[what] for what, cost in others.costs(mesh, cluster, reshards).items()}
        if self.tensor is not None:
            activations = self.tensor.cost(mesh.tp, cluster) * self.micro_batches
            data, own = Mesh(mesh.replicate, mesh.shard), replace(self, tensor=None)
            of_data = own.costs(data, cluster.every(mesh.tp), reshards)
            return of_data | {"activations": activations}
        plain = self.parameters * self.element
        calls, shard_group = self._calls(plain), cluster.shard_group(mesh)
        sums = cluster.all_gather(cluster.replicate_group(mesh), plain / mesh.shard, calls)
        gradients = cluster.reduction(cluster.world(mesh), self.gradients, calls, by_machine=not self.deterministic)
        gradients *= self.micro_batches if reshards or self.deterministic else 1
        if not reshards:
            weights = cluster.all_gather(shard_group, self.weights, self._calls(self.weights))
            return {"gradients": gradients + sums, "weights": weights}
        of_layers = cluster.all_gather(shard_group, self.in_layers, self._calls(self.in_layers)) * 2
        of_layers += cluster.all_gather(shard_group, self.at_ends, math.ceil(self.at_ends / BUCKET_BYTES))
        return {
            "gradients": gradients + sums,
            "weights": cluster.all_gather(shard_group, self.outside, math.ceil(self.outside / BUCKET_BYTES)),
            "weights of layers": of_layers * self.micro_batches,
        }

    def _calls(self, size: float) -> int:
        """Collectives for `size` bytes of all matrices: large ones travel alone, small ones together."""
        return self.matrices if size >= self.matrices * ALONE_BYTES else math.ceil(size / BUCKET_BYTES)


def routed_bytes_per_token(
    width: int, per_token: int, element: int, scheme: LowBitScheme | None, *, recomputed: bool
) -> float:
    """`ExpertTraffic.bytes_per_token`. scheme: of gate_up; recomputed: the forward pass runs twice."""
    codes = scheme is not None and gathers_routed_codes(scheme)
    x = width * (1 / FORMATS[scheme.formats_of("x")[0].fmt].packing if codes else element)
    forward = x + width * element + 8 * per_token  # an expert's number and weight are four bytes each
    return forward * (1 + recomputed) + 2 * width * element + 4 * per_token


def divided_half_bytes(
    width: int, element: int, scheme: LowBitScheme | None, *, sequence: bool, recomputed: bool, last: bool
) -> float:
    """That a token has in the exchanges of attention, or of a plain MLP. scheme: of qkv, of gate_up; sequence: tokens
    are divided; recomputed: the forward pass runs twice, but for the last exchange of a layer, whose result backward
    does not need."""
    if not sequence:  # what begins a half is there already; what ends it is added in two exchanges, also in backward
        given, ends, backward = 0.0, 2 * width * element, 2 * width * element
    else:
        given, ends, second = width * element, width * element, 0.0
        if scheme is not None and gathers_codes(scheme):
            rows, columns = scheme.formats_of("x")
            given = width / FORMATS[rows.fmt].packing + 4 * (rows.granularity == "rowwise")
            second = width / FORMATS[columns.fmt].packing if gathers_second_codes(scheme) else 0.0
        backward = 2 * width * element + second
    return given + ends + backward + recomputed * (given + ends * (not last))


def weight_bytes_on_wire(scheme: LowBitScheme | None, element: int, codes_only: bool = True) -> float:
    """Bytes per element of a linear's weight as ranks gather it. codes_only: ranks keep no full weight where codes are
    all that is read."""
    if scheme is None:
        return element
    if scheme.stored_format is not None:
        return weight_bytes(scheme, element)
    codes = wire_format(scheme) if codes_only and reads_codes_only(scheme) else None
    return element if codes is None else 1 / FORMATS[codes.fmt].packing


def weights_on_wire(
    parameters: int, trained: Iterable[LinearChoice], element: int, *, codes_only: bool = True
) -> float:
    """Bytes of all updated weights. parameters: that train; trained: the linears among them that hold their weights
    alone."""
    saved = (
        linear.weights * (weight_bytes_on_wire(linear.scheme, element, codes_only) - element) for linear in trained
    )
    return parameters * element + sum(saved)
