"""Low-bit all-gather: every rank quantizes its rows of a weight, and codes are what ranks gather.

A scale that spans ranks needs the absmax of all of its elements: ranks reduce those of all weights at once, 4 bytes a
scale, with MAX over their bit patterns, which order as the numbers do with NaN above Inf. The means of ternary and
binary codes need a SUM in fp64. Then scales are known everywhere, and codes are those of the whole weight, bit for bit,
however its rows are sharded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.comm.peer_memory import PeerMemory, peer_memory
from qtrain.comm.rank_group import RankGroup
from qtrain.comm.wire import sent
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, codes_shape, empty_scale, scale_shape
from qtrain.kernels.numerics.philox import NEAREST
from qtrain.kernels.quantize.reference import amax_ref
from qtrain.parallel.layers.exchange import reduce_statistics
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.shards import Sharded, as_bytes, by_mesh, local_tensors
from qtrain.parallel.sharding.weights import gather_weights, is_even
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.quantizers import quantize_rows
from qtrain.quant.scales import center_of_statistic, is_mean, scale_of_statistic, tensor_statistic
from qtrain.quant.weight_codes import wire_format
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

START_BYTES = 256
"""What a weight's codes start at a multiple of, in memory that they share."""


@dataclass
class ShardedCodes:
    """The codes of a linear's weight, of which this rank computes its rows."""

    sharded: Sharded
    linear: LowBitLinear
    scale: Tensor | MaybeNone = None
    center: Tensor | None = None
    """What the weight's elements are compared with, fp32 [1], where codes are signs."""
    keeps: bool = False
    """Whether the scale and this rank's codes stay in memory, to be gathered more than once: always the same memory,
    which recorded steps read."""
    _kept: list[Tensor] | MaybeNone = None
    memory: PeerMemory | None = None
    """Where every rank keeps its codes for the others to read; None: they are sent."""
    _rank_views: list[Tensor] | MaybeNone = None
    """There, of every shard rank, the bytes of its codes."""

    @cached_property
    def _format(self) -> OperandFormat | MaybeNone:
        return wire_format(self.linear.scheme)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.linear.out_features, self.linear.in_features

    @property
    def spans_ranks(self) -> bool:
        """Whether a scale covers all of the weight, other tensor ranks' parts too."""
        return self._format.granularity == "tensorwise"

    @property
    def is_mean(self) -> bool:
        """Whether the scale is a mean, not an absmax."""
        return is_mean(self._format)

    def _pieces(self) -> Iterator[tuple[Tensor, slice]]:
        """This rank's rows, and the rows of the scale that belong to them. Blocks start at multiples of their height in
        the whole weight: rows above the first such row are a piece of their own."""
        for rows in local_tensors(self.sharded.master):
            low = self.sharded.bounds[self.sharded.mesh.shard_rank] // self.linear.in_features
            height = GRANULARITIES[self._format.granularity][0]
            if height is None:
                yield rows, slice(None)
                continue
            head = min(-low % height, len(rows))  # rows until the next block begins
            first = (low + head) // height
            if head:
                yield rows[:head], slice(low // height, low // height + 1)  # a block that another rank's rows begin
            if head < len(rows):
                # Rounded up: the last block may go on in another rank's rows.
                yield rows[head:], slice(first, first - (head - len(rows)) // height)

    def statistics(self) -> Tensor:
        """Of this rank's rows: the absmax of every scale's group, flat, fp32; for a mean the sums that it follows from,
        fp64."""
        device = self.linear.weight.device
        if self.is_mean:
            found = tensor_statistic(torch.zeros(0, device=device), self._format)  # of no rows: zeros
            for rows, _ in self._pieces():
                found += tensor_statistic(rows, self._format)
            return found
        # 0 where this rank has no rows: the smallest absmax, which no maximum takes.
        found = torch.zeros(scale_shape(self._format.granularity, *self._shape), device=device)
        for rows, covered in self._pieces():
            if self.spans_ranks:
                found.copy_(tensor_statistic(rows, self._format, self.linear.known_amax))
            else:
                found[covered] = amax_ref(rows, self._format.granularity)
        return found.view(-1)

    def set_scale(self, statistics: Tensor) -> None:
        """Compute the scale from the statistics of all ranks."""
        self.center = center_of_statistic(statistics, self._format)
        if not self.is_mean:
            statistics = statistics.view(scale_shape(self._format.granularity, *self._shape))
        scale = scale_of_statistic(statistics, self._format, self._shape, self.linear.scheme.power_of_two)
        # In the same memory: a recorded gather reads it in every replay.
        (self.scale,) = _replace_values(self.scale if self.scale is None else [self.scale], [scale])

    # ---- Gathered ----------------------------------------------------------------------------------------------------

    def empty(self) -> list[Tensor]:
        shape, dtype = codes_shape(self._format.fmt, *self._shape), FORMATS[self._format.fmt].dtype
        codes = self.linear.weight_codes.output_codes
        if codes.dtype == dtype and codes.shape == shape:  # not packed on the wire: no copy
            return [codes]
        return [torch.empty(shape, dtype=dtype, device=self.linear.weight.device)]

    def own(self) -> list[Tensor]:
        return self._kept if self.keeps else self._codes()

    def update(self) -> None:
        """Keep this rank's codes under the new scale."""
        self._kept = _replace_values(self._kept, self._codes())
        self.linear.mark_fresh()

    def share(self, memory: PeerMemory, start: int) -> None:
        """Keep this rank's codes where the others read them, from byte `start` on."""
        mesh, fmt = self.sharded.mesh, self._format.fmt
        self.memory, self._rank_views = memory, memory.rank_views(start, start + self.bytes() // mesh.shard)
        shapes = [codes_shape(fmt, *rows.shape) for rows, _ in self._pieces()]  # one after the other
        own = self._rank_views[mesh.shard_rank].view(FORMATS[fmt].dtype).split([math.prod(shape) for shape in shapes])
        self._kept = [piece.view(shape) for piece, shape in zip(own, shapes, strict=True)]

    def read(self) -> None:
        """Give the linear the codes that all ranks share."""
        (whole,) = self.empty()
        parts, me = as_bytes(whole).chunk(len(self._rank_views)), self.sharded.mesh.shard_rank
        # Each rank begins with its own: no two read from the same one at a time.
        for rank in (*range(me, len(parts)), *range(me)):
            parts[rank].copy_(self._rank_views[rank])
        sent["codes"] += (len(parts) - 1) * len(parts[0])
        self.receive([whole])

    def _codes(self) -> list[Tensor]:
        return [self._encode(rows, self.scale[of]) for rows, of in self._pieces()]

    def _encode(self, rows: Tensor, scale: Tensor) -> Tensor:
        # A piece's scales with the strides that the quantizer expects of a whole matrix.
        laid_out = empty_scale(self._format.granularity, rows.shape[0], rows.shape[1], scale).copy_(scale)
        return quantize_rows(rows.contiguous(), self._format, NEAREST, False, laid_out, self.center).codes

    def receive(self, tensors: list[Tensor]) -> None:
        self.linear.receive_codes(QuantizedTensor(tensors[0], self.scale, self._format))
        if not self.keeps:  # codes that are kept come again, with the second layout where a backward pass reads it
            self.linear.weight_codes.derive_second_layout()
            self.scale = None

    def bytes(self) -> int:
        rows, width = codes_shape(self._format.fmt, *self._shape)
        return rows * width


def _replace_values(kept: list[Tensor] | None, values: list[Tensor]) -> list[Tensor]:
    """`kept` with new values in the same memory; without any, the values themselves."""
    if kept is None:
        return values
    for old, new in zip(kept, values, strict=True):
        old.copy_(new)
    return kept


@torch.no_grad()
def update_codes(weights: Sequence[ShardedCodes]) -> None:
    """Compute the scales of updated masters, and give the linears their codes, or keep this rank's to be gathered when
    they are needed. Every rank of the shard group calls it."""
    for mesh, members in by_mesh(weights, lambda weight: weight.sharded):
        _update_scales(members, mesh)
    gather_weights([w for w in weights if not w.keeps], "codes")
    for weight in weights:
        if weight.keeps:
            weight.update()
    # Now all ranks may read them. Nobody reads the old ones any more: all have reduced statistics since.
    for memory in dict.fromkeys(weight.memory for weight in weights if weight.memory is not None):
        memory.meet()


def gather_codes(weights: Sequence[ShardedCodes], second_layout: bool) -> None:
    """Give linears the codes that ranks keep, for `output` alone or in both layouts."""
    gather_weights([weight for weight in weights if weight.memory is None], "codes")
    for weight in weights:
        if weight.memory is not None:
            weight.read()
        if second_layout:
            weight.linear.weight_codes.derive_second_layout()


def share_codes(weights: Sequence[ShardedCodes]) -> None:
    """Have the ranks of a machine keep codes where the others read them. Every rank of the shard group calls it."""
    for mesh, members in by_mesh(weights, lambda weight: weight.sharded):
        even = [weight for weight in members if is_even(weight.sharded)]
        sizes = (-(-weight.bytes() // (mesh.shard * START_BYTES)) * START_BYTES for weight in even)
        starts = list(accumulate(sizes, initial=0))
        memory = peer_memory(starts[-1], mesh.shard_group, even[0].linear.weight.device) if even else None
        if memory is not None:
            for weight, start in zip(even, starts, strict=False):
                weight.share(memory, start)


def _update_scales(weights: Sequence[ShardedCodes], mesh: Mesh) -> None:
    for group, op in (
        ([w for w in weights if not w.is_mean], dist.ReduceOp.MAX),
        ([w for w in weights if w.is_mean], dist.ReduceOp.SUM),
    ):
        if not group:
            continue
        own = [weight.statistics() for weight in group]
        flat = torch.cat(own)
        # Bits of |x| order as the numbers do: an integer maximum that keeps NaN, which one of floats may drop.
        dist.all_reduce(flat.view(torch.int32) if op is dist.ReduceOp.MAX else flat, op, group=mesh.shard_group)
        if mesh.tp_group is not None:
            flat = _over_tensor_ranks(
                flat, [(len(s), w.spans_ranks) for s, w in zip(own, group, strict=True)], mesh.tp_group
            )
        for weight, statistics in zip(group, flat.split([len(s) for s in own]), strict=True):
            weight.set_scale(statistics)


def _over_tensor_ranks(flat: Tensor, sizes: Sequence[tuple[int, bool]], group: RankGroup) -> Tensor:
    """The statistics `flat` of several weights, each (length, whether its scale covers other tensor ranks' parts)."""
    if not any(spans for _, spans in sizes):
        return flat
    # One message for all; scales that end at this rank's part keep its own statistics.
    reduced = reduce_statistics(flat, group)
    spanning = torch.cat([torch.full((n,), spans, device=flat.device) for n, spans in sizes])
    return torch.where(spanning, reduced, flat)
