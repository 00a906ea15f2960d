"""What the ranks of a tensor group send each other within a layer: gathers along tokens, and sums.

Sums are an all-to-all in the tensor's dtype and additions in fp32 in the order of the ranks, rounded once: the same on
all ranks, and in every run. Each operation is a custom op, so that a compiled layer may contain it; `sent` counts the
bytes by `kind`, in a compiled layer too, but not in the replay of a CUDA graph.

    all_gather            [n, ...] of every rank -> [ranks * n, ...]          backward: reduce_scatter
    reduce_scatter        [ranks * n, ...] -> [n, ...], the sum's own rows    backward: all_gather
    copy                  x, which all ranks have -> x                        backward: all_reduce
    all_reduce            sum over the ranks -> all ranks                     backward: nothing
    all_reduce_with_grad  sum over the ranks, each of which reads it          backward: all_reduce
    all_to_all            x[r] of this rank to rank r -> what each sent       backward: all_to_all
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qtrain.comm.compiled_order import collective
from qtrain.comm.wire import all_gather_single, exchange, gather, sent
from qtrain.kernels.elementwise import sum_in_order

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""Process groups by name: custom ops take no objects."""

RANK_RNG_OFFSET = 1 << 21
"""Philox numbers of one tensor rank: ranks round different elements, and must not draw the same bits for them."""

ACTIVATIONS, CODES, SCALES = "activations", "activation codes", "scales"
"""Kinds of message."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks that compute a layer together. name: of the process group."""

    name: str
    ranks: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "RankGroup":
        _GROUPS[group.group_name] = group
        return cls(group.group_name, dist.get_world_size(group), dist.get_rank(group))

    # ---- differentiable ----------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "gather", "scatter_sum", self.name, self.ranks)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "scatter_sum", "gather", self.name, self.ranks)

    def copy(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "", "sum", self.name, self.ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "sum", "", self.name, self.ranks)

    def all_reduce_with_grad(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "sum", "sum", self.name, self.ranks)

    def all_to_all(self, x: Tensor) -> Tensor:
        return _Collective.apply(x, "all_to_all", "all_to_all", self.name, self.ranks)

    # ---- not differentiable ------------------------------------------------------------------------------------------

    def all_gather_no_grad(self, x: Tensor, kind: str = ACTIVATIONS) -> Tensor:
        return group_gather(x, self.name, self.ranks, kind)

    def reduce_scatter_no_grad(self, x: Tensor, kind: str = ACTIVATIONS) -> Tensor:
        return group_scatter_sum(x, self.name, self.ranks, kind)

    def all_reduce_no_grad(self, x: Tensor, kind: str = ACTIVATIONS) -> Tensor:
        return group_sum(x, self.name, self.ranks, kind)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of every rank's fp32 values, NaN above all."""
        return group_maximum(x, self.name, self.ranks)

    def all_reduce_fp64(self, x: Tensor) -> Tensor:
        """The sum over the ranks of fp64 values, in their order."""
        # Gathered, then added: an all-reduce's order depends on the backend, and fp64 sums would differ in a bit.
        return group_gather(x[None], self.name, self.ranks, SCALES).sum(dim=0)

    def all_gather_ragged(self, own: Tensor, sizes: list[int], kind: str) -> list[Tensor]:
        """1-D messages of `sizes` elements, one of each rank."""
        return gather(own, sizes, _GROUPS[self.name], kind)


# ---- custom ops ------------------------------------------------------------------------------------------------------


@collective("group_gather", fake=lambda x, ranks: x.new_empty(ranks * x.shape[0], *x.shape[1:]))
def group_gather(x: Tensor, group: str, ranks: int, kind: str) -> Tensor:
    """x [n, ...] of every rank, one after the other: [ranks * n, ...]."""
    x = x.contiguous()
    received = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather_single(_bytes(received), _bytes(x), group=_GROUPS[group])
    sent[kind] += (ranks - 1) * x.numel() * x.element_size()  # to each other rank
    return received


@collective("group_scatter_sum", fake=lambda x, ranks: x.new_empty(x.shape[0] // ranks, *x.shape[1:]))
def group_scatter_sum(x: Tensor, group: str, ranks: int, kind: str) -> Tensor:
    """x [ranks * n, ...] of every rank -> rows [rank * n, (rank + 1) * n) of their sum."""
    x = x.contiguous()
    own = x.shape[0] // ranks
    return _exchanged_sum(x.view(-1), group, ranks, kind).view(own, *x.shape[1:])


@collective("group_sum", fake=lambda x: x.new_empty(x.shape))
def group_sum(x: Tensor, group: str, ranks: int, kind: str) -> Tensor:
    """The sum over the ranks: each adds a part of the elements, and they gather the parts."""
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))  # zeros, cut off again below
    part = _exchanged_sum(padded, group, ranks, kind)  # [n / ranks], this rank's part
    whole = group_gather(part, group, ranks, kind)
    return whole[: len(flat)].view(x.shape)


@collective("group_all_to_all", fake=lambda x: x.new_empty(x.shape))
def group_all_to_all(x: Tensor, group: str, ranks: int, kind: str) -> Tensor:
    """x [ranks, ...], a message for each rank -> [ranks, ...], what each rank sent to this one."""
    flat = x.contiguous().view(-1)
    own = len(flat) // ranks
    return exchange(flat, [own] * ranks, own, _GROUPS[group], kind).view(x.shape)


@collective("group_maximum", fake=lambda x: torch.empty_like(x))
def group_maximum(x: Tensor, group: str, ranks: int) -> Tensor:
    """The maximum over the ranks of values that are not negative: their bits order as they do, NaN above Inf."""
    found = x.clone()
    # As integers: NCCL's maximum of floats drops NaN.
    dist.all_reduce(found.view(torch.int32), dist.ReduceOp.MAX, group=_GROUPS[group])
    sent[SCALES] += (ranks - 1) * x.numel() * 4
    return found


def _exchanged_sum(flat: Tensor, group: str, ranks: int, kind: str) -> Tensor:
    """flat [ranks * n] of every rank -> [n], this rank's part of their sum."""
    own = len(flat) // ranks
    return sum_in_order(exchange(flat, [own] * ranks, own, _GROUPS[group], kind))


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


# ---- their gradients -------------------------------------------------------------------------------------------------


_OPS = {"gather": group_gather, "scatter_sum": group_scatter_sum, "sum": group_sum, "all_to_all": group_all_to_all}


class _Collective(torch.autograd.Function):
    """One of _OPS in forward, another one in backward; "": the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, gradient_op: str, group: str, ranks: int) -> Tensor:
        ctx.gradient = gradient_op, group, ranks
        # A view: an input that a Function returns as it is would be marked as one of its outputs.
        return _OPS[op](x, group, ranks, ACTIVATIONS) if op else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        op, group, ranks = ctx.gradient
        return (_OPS[op](grad, group, ranks, ACTIVATIONS) if op else grad), None, None, None, None
