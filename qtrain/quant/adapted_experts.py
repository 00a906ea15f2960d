"""Low-rank adapters of a mixture's experts: of each expert a pair A [r, K], B [N, r] and its frozen matrix.

    y = base(x) + scale * (x · Aᵀ) · Bᵀ, a group's rows times the matrices of its own expert

The pairs are stacked like the experts, A [E * r, K] and B [E * N, r], in fp32, and multiply in the dtype of the
activations, as grouped products in high precision. There a rank is padded with zeros to a multiple of 8: the grouped
kernels take rows in multiples of 16 bytes.

One autograd function computes both linears. An adapter reads rows in high precision, so the sorted rows of x are in
memory while they are multiplied. Backward keeps x, the output of gate_up and the rows times A; the sorted rows and the
activation, as large as all routes, are computed again. Base weights have no gradient. Where ranks hold some of the
experts each, tokens of the others are gathered in forward and again in backward, which keeps those of the rank alone.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.grouped.grouped_plain_mm import k_grouped_plain_mm, m_grouped_plain_mm
from qtrain.kernels.grouped.permute import combine_rows, route_weight_grad, weights_of_rows
from qtrain.kernels.grouped.token_permutation import TokenPermutation, group_rows
from qtrain.kernels.quantize.gather_rows import gather_rows
from qtrain.kernels.swiglu.quantize import activation, activation_dots
from qtrain.quant.arguments import LinearArguments, codes_or, save_operands, saved_operands
from qtrain.quant.execute import quantize_operands
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.high_precision import linear_arguments
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.swiglu_mlp import KEEP_ALL, MLPMemory, kept_gate_up, restored_gate_up
from qtrain.quant.tensor_roles import NeedsOperand
from qtrain.tensors.quantized_tensor import Operand


def padded_rank(rank: int) -> int:
    """The columns of rows times A: 8 elements of bf16 are 16 bytes."""
    return -(-rank // 8) * 8


_ROWS = NeedsOperand(rows=True, columns=False)


class AdaptedExperts(NamedTuple):
    """A linear of the experts and its adapters, fp32 a [E * r, K] and b [E * N, r]; None: it has none. dropout: the
    share of the elements of its rows that A does not read; 0 in evaluation."""

    linear: GroupedLinear | LowBitLinear
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0


class TokensOfRanks(Protocol):
    """How ranks that hold some of the experts each see the tokens of all."""

    def gather(self, t: Tensor) -> Tensor:
        """t [T, ...] of every rank -> [ranks * T, ...]."""

    def sum_own(self, t: Tensor) -> Tensor:
        """The inverse, of terms that every rank has: t [ranks * T, ...] -> the sums of this rank's tokens [T, ...]."""


class _OneRank:
    """The exchange of a process that holds all experts."""

    def gather(self, t: Tensor) -> Tensor:
        return t

    def sum_own(self, t: Tensor) -> Tensor:
        return t


ONE_RANK = _OneRank()


class AdaptedArguments(NamedTuple):
    """What the autograd function needs of a linear besides its weight and adapters."""

    linear: LinearArguments
    scale: float
    dropout: float


class Adapters(NamedTuple):
    """Those of a linear as products read them: [E * r, K] and [E * N, r], r padded, b times the scale. rank: r
    without the padding."""

    a: Tensor
    b: Tensor
    rank: int


class SavedRows(NamedTuple):
    """What backward needs of a linear with adapters: its rows times A [R, r], r padded, and the elements that dropout
    left, bool [R, K]."""

    rows_a: Tensor | MaybeNone = None
    mask: Tensor | None = None


class AdapterGradients(NamedTuple):
    """Of `SavedRows.rows_a` and, in fp32, of the adapters."""

    rows_a: Tensor | MaybeNone = None
    a: Tensor | None = None
    b: Tensor | None = None


def _adapters(a: Tensor | None, b: Tensor | None, adapted: AdaptedArguments, dtype: torch.dtype) -> Adapters | None:
    if a is None or b is None:
        return None
    rank = b.shape[1]
    if missing := padded_rank(rank) - rank:
        # Rows of zeros in each A, columns of zeros in each B: the products are unchanged.
        a = F.pad(a.view(adapted.linear.groups.count, rank, -1), (0, 0, 0, missing)).flatten(0, 1)
        b = F.pad(b, (0, missing))
    return Adapters(a.to(dtype), (adapted.scale * b).to(dtype), rank)  # scaled in fp32, then rounded once


def _multiply(rows: Tensor, matrices: Tensor, groups: TokenPermutation) -> Tensor:
    return m_grouped_plain_mm(rows, matrices, groups.group_of_block, groups.starts)


def _dropped(rows: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    return rows if mask is None else rows * mask / (1 - dropout)  # the mean of what A reads is unchanged


def _forward(
    rows: Tensor, weight: Operand, adapters: Adapters | None, adapted: AdaptedArguments
) -> tuple[Tensor, SavedRows]:
    """The output [R, N] for rows [R, K]."""
    linear, dropout, mask = adapted.linear, adapted.dropout, None
    y = linear.multiply("output", quantize_operands(rows, linear.request("x", _ROWS)).rows, weight, rows.dtype)
    if adapters is None:
        return y, SavedRows()
    if dropout:
        mask = torch.empty_like(rows, dtype=torch.bool).bernoulli_(1 - dropout)
    rows_a = _multiply(_dropped(rows, mask, dropout), adapters.a, linear.groups)  # [R, r]
    return y + _multiply(rows_a, adapters.b, linear.groups), SavedRows(rows_a, mask)


def _adapters_backward(
    dy: Tensor, rows: Tensor, adapters: Adapters, kept: SavedRows, adapted: AdaptedArguments
) -> AdapterGradients:
    """dy [R, N], rows [R, K]."""
    groups, rank = adapted.linear.groups, adapters.rank
    drows_a = _multiply(dy, adapters.b.t(), groups)  # [R, r]; b has the scale already, db below gets it
    # fp32 [E, r, K], flat.
    da = k_grouped_plain_mm(drows_a.t(), _dropped(rows, kept.mask, adapted.dropout).t(), groups.starts, torch.float32)
    db = k_grouped_plain_mm(dy.t(), kept.rows_a.t(), groups.starts, torch.float32)  # fp32 [E * N, r]
    return AdapterGradients(
        drows_a, da.unflatten(0, (groups.count, -1))[:, :rank].flatten(0, 1), adapted.scale * db[:, :rank]
    )


def _rows_backward(
    dy: Tensor,
    drows_a: Tensor | MaybeNone,
    weight: Operand,
    adapters: Adapters | None,
    kept: SavedRows,
    adapted: AdaptedArguments,
) -> Tensor:
    """The gradient of the rows [R, K]."""
    linear = adapted.linear
    drows = linear.multiply("grad_input", quantize_operands(dy, linear.request("dy", _ROWS)).rows, weight, dy.dtype)
    if adapters is None:
        return drows
    return drows.add_(_dropped(_multiply(drows_a, adapters.a.t(), linear.groups), kept.mask, adapted.dropout))


class AdaptedExpertsFunction(torch.autograd.Function):
    """`adapted_experts_mlp`; the arguments of each linear with `groups`, the rows of each expert."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd sees tensors that are arguments alone
        ctx,
        x: Tensor,  # [T, C]
        weights: Tensor,  # fp32 [T, k]
        a_up: Tensor | None,  # [E * r, C]
        b_up: Tensor | None,  # [E * 2I, r]
        a_down: Tensor | None,  # [E * r, I]
        b_down: Tensor | None,  # [E * C, r]
        w_up: Tensor,  # [E * 2I, C]
        w_down: Tensor,  # [E * C, I]
        up: AdaptedArguments,
        down: AdaptedArguments,
        memory: MLPMemory,
        exchange: TokensOfRanks,
    ) -> Tensor:
        groups, up_part, down_part = up.linear.groups, up.linear.weight, down.linear.weight
        weights = exchange.gather(weights)
        rows = gather_rows(exchange.gather(x), groups.token_of_row)
        gate_up, up_kept = _forward(rows, codes_or(up_part.rows, w_up), _adapters(a_up, b_up, up, x.dtype), up)
        h = activation(gate_up, None)  # [R, I]; not saved: backward computes it again from gate_up
        y, down_kept = _forward(h, codes_or(down_part.rows, w_down), _adapters(a_down, b_down, down, x.dtype), down)
        columns = codes_or(up_part.columns, w_up), codes_or(down_part.columns, w_down)
        x_kept = None if a_up is None else x
        gate_up = kept_gate_up(gate_up)[0] if memory.gate_up_8bit else gate_up
        save_operands(ctx, *columns, x_kept, gate_up, *up_kept, *down_kept, a_up, b_up, a_down, b_down)
        ctx.memory, ctx.exchange, ctx.weights, ctx.up, ctx.down = (
            memory,
            exchange,
            weights,
            *(adapted._replace(linear=adapted.linear._replace(weight=None)) for adapted in (up, down)),
        )
        return exchange.sum_own(combine_rows(y, weights, groups.row_of_topk))

    @staticmethod
    def backward(ctx, dout: Tensor):
        w_up, w_down, x, gate_up, *kept, a_up, b_up, a_down, b_down = saved_operands(ctx)
        up, down, weights, exchange = ctx.up, ctx.down, ctx.weights, ctx.exchange
        if ctx.memory.gate_up_8bit:
            gate_up = restored_gate_up(gate_up, dout.dtype)
        groups, (needs_dx, needs_dweights) = up.linear.groups, ctx.needs_input_grad[:2]
        up_part = down_part = AdapterGradients()
        dx = dweights = None
        kept_up, kept_down = SavedRows(*kept[:2]), SavedRows(*kept[2:])
        dy = gather_rows(exchange.gather(dout), groups.token_of_row, weights_of_rows(weights, groups))
        adapters = _adapters(a_down, b_down, down, dy.dtype)
        if adapters is not None:
            down_part = _adapters_backward(dy, activation(gate_up, None), adapters, kept_down, down)
        if needs_dx or needs_dweights or a_up is not None:
            dh = _rows_backward(dy, down_part.rows_a, w_down, adapters, kept_down, down)
            del dy  # [R, C], before the gradient of gate_up [R, 2I] is allocated
            # <dh, h> of each row: the gradient of its route's weight, without the output y.
            dgate_up, dots = activation_dots(gate_up, dh, needs_dweights)
            adapters = _adapters(a_up, b_up, up, dout.dtype)
            if needs_dweights:
                dweights = exchange.sum_own(route_weight_grad(dots, weights, groups.row_of_topk))
            if adapters is not None:
                rows = gather_rows(exchange.gather(x), groups.token_of_row)
                up_part = _adapters_backward(dgate_up, rows, adapters, kept_up, up)
                del rows  # [R, C], before their gradient is allocated
            if needs_dx:
                drows = _rows_backward(dgate_up, up_part.rows_a, w_up, adapters, kept_up, up)
                dx = exchange.sum_own(combine_rows(drows, None, groups.row_of_topk))
        return dx, dweights, up_part.a, up_part.b, down_part.a, down_part.b, None, None, None, None, None, None


def adapted_experts_mlp(
    gate_up: AdaptedExperts,
    down: AdaptedExperts,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    memory: MLPMemory = KEEP_ALL,
) -> Tensor:
    """`experts_mlp` of frozen experts with adapters: x [T, C], experts int64 [T, k], weights fp32 [T, k] -> [T, C]."""
    groups = group_rows(experts, down.linear.weight.shape[0] // x.shape[1])
    return apply_adapted_experts(gate_up, down, x, weights, groups, memory)


def apply_adapted_experts(
    gate_up: AdaptedExperts,
    down: AdaptedExperts,
    x: Tensor,
    weights: Tensor,
    groups: TokenPermutation,
    memory: MLPMemory = KEEP_ALL,
    exchange: TokensOfRanks = ONE_RANK,
) -> Tensor:
    """The same for the rows `groups`, of the tokens that `exchange` gathers."""
    up_arguments, down_arguments = (
        AdaptedArguments(linear_arguments(adapted.linear)._replace(groups=groups), adapted.scale, adapted.dropout)
        for adapted in (gate_up, down)
    )
    return AdaptedExpertsFunction.apply(
        x,
        weights,
        gate_up.a,
        gate_up.b,
        down.a,
        down.b,
        gate_up.linear.weight,
        down.linear.weight,
        up_arguments,
        down_arguments,
        memory,
        exchange,
    )
