"""Communication volume of a step on a mesh: gradients are reduce-scattered, updated weights all-gathered.

Gradients are reduced once a step, after the last micro-batch, by an all-to-all intra-node and one inter-node
(`parallel/sharding/gradients.py`); with --deterministic after every micro-batch, by one all-to-all of all ranks.
Replicas then all-gather the sums of their shards. Shard groups all-gather the updated weights: quantized where the
scheme allows it, else the values themselves (`parallel/sharding/sharded_codes.py`).

Full sharding (FSDP, `parallel/sharding/full_shard.py`) all-gathers layers before the forward and the backward pass of
every micro-batch, an embedding and a head of their own before the forward pass, and reduces gradients after each.

--tp partitions all layers. Ranks that hold the same part reduce its gradients and gather its weights; the ranks of a
tensor-parallel group exchange inputs and outputs of attention and MLP.

--cp changes nothing of that. The ranks of a context-parallel group exchange queries, keys, values and outputs of
attention, by all-to-alls, and wait for each other's scales; with --deterministic they gather layers' inputs alone.

--ep shards the experts of a mixture. Ranks that hold the same experts reduce their gradients and gather their weights;
the ranks of an expert-parallel group, with --tp those of all its tensor-parallel groups, gather the tokens of every
micro-batch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from qtrain.comm.wire import ALONE_BYTES, BUCKET_BYTES
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.parallel.layers.exchange import gathers_codes, gathers_routed_codes, gathers_second_codes
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.gradient_wire import GRADIENT_WIRES
from qtrain.quant import LinearChoice, LowBitScheme
from qtrain.quant.weight_codes import reads_codes_only, wire_format
from qtrain.train.plan.cluster import Cluster, Cost, Ranks
from qtrain.train.plan.scheme_bytes import weight_bytes

EXCHANGES_A_LAYER = 7
"""Collectives of an expert-parallel layer: routes, their weights, x and y; in backward dout, dx and the gradients of
the routes' weights. Adapters of experts' gate_up gather x once more there."""
EXCHANGES_A_HALF = 4
"""Collectives of --tp at attention, or the MLP: at its input and at its output, forward and backward. As many for
embedding and head together: the output of the one, the input of the other."""


@dataclass(frozen=True)
class ExpertTraffic:
    """Communication of experts that --ep shards."""

    parameters: "Traffic"
    """That of all experts' parameters, as if --ep was 1; with --tp of a rank's part."""
    layers: int
    """Layers that are mixtures of experts."""
    tokens: int
    """Of a rank's micro-batch."""
    bytes_per_token: float
    """Bytes that reach each other rank, in one layer, forward and backward."""

    def costs(self, mesh: Mesh, cluster: Cluster, reshards: bool) -> dict[str, Cost]:
        experts, node = mesh.expert_mesh, cluster.gpus_per_node
        ranks, data = experts.tp, Mesh(experts.replicate, experts.shard)
        found = self.part(mesh.ep).costs(data, cluster.every(ranks), reshards)
        # `all_gather` counts what a rank has afterwards: the tokens of all ranks.
        volume, calls = ranks * self.layers * self.tokens * self.bytes_per_token, self.layers * EXCHANGES_A_LAYER
        tokens = cluster.all_gather(Ranks(ranks, min(ranks, node)), volume, calls)
        return found | {"tokens of experts": tokens * self.parameters.micro_batches}

    def part(self, ep: int) -> "Traffic":
        """The traffic of one rank's experts."""
        whole = self.parameters
        parts = {name: getattr(whole, name) / ep for name in ("weights", "in_layers", "outside")}
        return replace(whole, parameters=whole.parameters // ep, **parts)


@dataclass(frozen=True)
class GroupTraffic:
    """Communication of activations in a tensor-parallel or context-parallel group."""

    what: str
    """Name of what is sent."""
    tokens: int
    """Of a micro-batch; with --cp those that one rank computes."""
    bytes_per_token: float
    """Of a token in all collectives of a micro-batch, each of which moves (ranks - 1) / ranks of them."""
    calls: int
    """How many collectives these are."""

    def cost(self, ranks: int, cluster: Cluster) -> Cost:
        """The cost of a micro-batch."""
        group = Ranks(ranks, min(ranks, cluster.gpus_per_node))
        return cluster.all_gather(group, self.tokens * self.bytes_per_token, self.calls)


@dataclass(frozen=True)
class Traffic:
    """What is communicated in a step of the whole model; with --tp of a rank's part."""

    parameters: int
    """Those that train."""
    matrices: int
    """How many matrices they make up."""
    element: int
    """Bytes of a parameter, and of its gradient."""
    weights: float
    """Bytes of all updated weights as they are sent: quantized where the scheme allows it."""
    in_layers: float = 0.0
    """With full sharding: bytes of the layers' weights that are gathered, frozen ones included."""
    outside: float = 0.0
    """With full sharding: bytes of the updated weights that it leaves whole."""
    at_ends: float = 0.0
    """With full sharding: bytes of an embedding and a head that are gathered."""
    micro_batches: int = 1
    """Of a rank."""
    gradient_wire: str = "exact"
    """--gradient_wire."""
    deterministic: bool = False
    """Whether gradients are added in the order of the micro-batches."""
    experts: ExpertTraffic | None = None
    """With --ep; all other fields then leave experts out."""
    group: GroupTraffic | None = None
    """With --tp or --cp."""

    @property
    def gradients(self) -> float:
        """Bytes of all gradients as they are sent."""
        wire = GRADIENT_WIRES[self.gradient_wire]
        return self.parameters * (self.element if wire is None else wire.bytes_per_element)

    def costs(self, mesh: Mesh, cluster: Cluster, reshards: bool = False) -> dict[str, Cost]:
        """Costs by what is sent. A mesh of one rank sends nothing."""
        if self.experts is not None:
            found, others = self.experts.costs(mesh, cluster, reshards), replace(self, experts=None)
            for what, cost in others.costs(mesh, cluster, reshards).items():
                found[what] = found.get(what, Cost()) + cost
            return found
        if self.group is not None:
            # Tensor-parallel ranks are consecutive: the data-parallel peers of one are `mesh.tp` apart.
            data, own = Mesh(mesh.replicate, mesh.shard), replace(self, group=None)
            activations = self.group.cost(max(mesh.tp, mesh.cp), cluster) * self.micro_batches
            return own.costs(data, cluster.every(mesh.tp), reshards) | {self.group.what: activations}
        plain = self.parameters * self.element
        calls, shard_group = self._calls(plain), cluster.shard_group(mesh)
        # Sums go in the gradients' own dtype, whatever --gradient_wire.
        sums = cluster.all_gather(cluster.replicate_group(mesh), plain / mesh.shard, calls)
        gradients = cluster.reduction(cluster.world(mesh), self.gradients, calls, by_machine=not self.deterministic)
        gradients *= self.micro_batches if reshards or self.deterministic else 1
        if not reshards:
            weights = cluster.all_gather(shard_group, self.weights, self._calls(self.weights))
            return {"gradients": gradients + sums, "weights": weights}
        # Twice: before the forward and before the backward pass; what ends the model is kept for the latter.
        layer_gathers = cluster.all_gather(shard_group, self.in_layers, self._calls(self.in_layers)) * 2
        layer_gathers += cluster.all_gather(shard_group, self.at_ends, math.ceil(self.at_ends / BUCKET_BYTES))
        return {
            "gradients": gradients + sums,
            "weights": cluster.all_gather(shard_group, self.outside, math.ceil(self.outside / BUCKET_BYTES)),
            "weights of layers": layer_gathers * self.micro_batches,
        }

    def _calls(self, size: float) -> int:
        """Collectives for `size` bytes of all matrices: one for each large one, one for each bucket of small ones."""
        return self.matrices if size >= self.matrices * ALONE_BYTES else math.ceil(size / BUCKET_BYTES)


def routed_bytes_per_token(
    width: int, per_token: int, element: int, scheme: LowBitScheme | None, *, recomputed: bool, again: bool = False
) -> float:
    """`ExpertTraffic.bytes_per_token`. scheme: of gate_up, None if x is gathered in the model's dtype; recomputed: the
    forward pass runs twice; again: backward gathers x too."""
    codes = scheme is not None and gathers_routed_codes(scheme)
    # The forward pass gathers x, as codes where the scheme allows it, and reduces y; backward gathers dout and reduces
    # dx, both in the model's dtype.
    x = width * (1 / FORMATS[scheme.formats_of("x")[0].fmt].packing if codes else element)
    forward = x + width * element + 8 * per_token  # an expert's number and weight are four bytes each
    # dout and dx, and the fp32 gradient of each route's weight.
    return forward * (1 + recomputed) + (2 + again) * width * element + 4 * per_token


def half_layer_bytes(
    width: int, element: int, scheme: LowBitScheme | None, *, sequence: bool, recomputed: bool, last: bool
) -> float:
    """Bytes of a token in the collectives of attention, or of a plain MLP.

    scheme: of qkv, or of gate_up. sequence: --sequence_parallel. recomputed: the forward pass runs twice, but for the
    last collective of a layer (`last`), whose result backward does not need."""
    # With --sequence_parallel an all-gather at the input and a reduce-scatter at the output; without it all-reduces.
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
    # Weights stored in low bits are sent as they are stored.
    if scheme.stored_format is not None:
        return weight_bytes(scheme, element)
    codes = wire_format(scheme) if codes_only and reads_codes_only(scheme) else None
    return element if codes is None else 1 / FORMATS[codes.fmt].packing


def weights_on_wire(
    parameters: int, trained: Iterable[LinearChoice], element: int, *, codes_only: bool = True
) -> float:
    """Bytes of all updated weights. parameters: that train; trained: the linears among them that hold their weights
    alone."""
    saved = (n.weights * (weight_bytes_on_wire(n.scheme, element, codes_only) - element) for n in trained)
    return parameters * element + sum(saved)
