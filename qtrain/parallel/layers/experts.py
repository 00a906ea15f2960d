"""Experts that several ranks hold: each computes its own for the tokens of all, and the ranks add what they found.

Rank j of N holds the experts [j * E / N, (j + 1) * E / N). Every rank routes its own tokens; then the ranks gather all
tokens with their routes, as codes where the scheme allows it (`exchange.py`), and send back sums. A token meets
nearly all ranks where it has many routes, so this is less than a message for every route; messages do not depend on the
routing. Nor do the rows that a rank computes where a step is recorded as CUDA graphs: as many as any routing needs, and
the host reads nothing back. Else they are those of `group_rows_of`, which grow with the busiest routing of a step.

    added      all tokens are one batch. A rank's rows are those routed to its experts, and what is sent back is the sum
               over a token's routes to them, [T, C] in x's dtype, added in fp32 in the order of the ranks
    in order   tokens of each rank are a batch of their own, as they would be on a process that holds all experts: the
               same rows, codes and random bits. What is sent back is the output of every route, to which other ranks
               add zeros, and the tokens' own rank adds the k routes. Gradients of weights are kept for each rank's
               tokens (`EPExperts.terms`). Then everything is what that process computes, bit for bit, at k times the
               bytes.

Experts with adapters are added (`quant/adapted_experts.py`); tokens are gathered in x's dtype, which adapters read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.comm.rank_group import RANK_RNG_OFFSET, RankGroup
from qtrain.kernels.grouped.permute import combine_rows, route_weight_grad, weights_of_rows
from qtrain.kernels.grouped.token_permutation import TokenPermutation, group_rows, group_rows_of
from qtrain.kernels.quantize.gather_rows import GatheredRows, RowIndex, gather_rows
from qtrain.models.native.moe import Experts
from qtrain.parallel.layers import become
from qtrain.parallel.layers.exchange import ScaleExchange, quantize_routed
from qtrain.quant.adapted_experts import AdaptedExperts, apply_adapted_experts
from qtrain.quant.arguments import LinearArguments, save_operands, saved_operands
from qtrain.quant.execute import quantize_operands
from qtrain.quant.high_precision import linear_arguments
from qtrain.quant.swiglu_mlp import MLPMemory, NeedsGradient, mlp_backward, mlp_forward
from qtrain.quant.tensor_roles import NeedsOperand

ROUTES = "routes"
"""Kind of message: experts and weights of tokens, and the weights' gradients."""


class EPExperts(Experts):
    """This rank's experts. Every rank calls it with its own tokens."""

    def __init__(self, experts: Experts, group: RankGroup, every_routing: bool = True):
        become(self, experts)
        self.group, self.every_routing, self.in_order = group, every_routing, False
        self.terms: tuple[Tensor | None, ...] = (None, None)
        """In order: what receives the gradients of gate_up and of down_proj in place of the parameters, [N, *shape],
        one for the tokens of each rank; None: the weights do not train."""

    def keep_in_order(self) -> dict[int, Tensor]:
        """From now on compute as a process with all experts would, bit for bit. Returns `terms` by id of a weight, of
        no memory."""
        weights, self.in_order = (self.gate_up.weight, self.down_proj.weight), True
        # Views of one element: leaves of the full shape whose `.grad` autograd allocates, without memory of their own.
        terms = {
            id(w): w.new_zeros(()).expand(self.group.ranks, *w.shape).requires_grad_()
            for w in weights
            if w.requires_grad
        }
        self.terms = tuple(terms.get(id(w)) for w in weights)
        return terms

    def compute(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        apply = ParallelExpertsFunction.apply if self.every_routing else _apply_uncompiled
        return apply(
            x,
            weights,
            self.gate_up.weight,
            self.down_proj.weight,
            *self.terms,
            experts,
            linear_arguments(self.gate_up),
            linear_arguments(self.down_proj),
            self.memory,
            self.group,
            self.every_routing,
            self.in_order,
            torch.is_grad_enabled(),
        )

    def compute_adapted(
        self, gate_up: AdaptedExperts, down: AdaptedExperts, x: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        apply = _apply_adapted if self.every_routing else _apply_adapted_uncompiled
        return apply(self, gate_up, down, x, experts, weights)


@torch.compiler.disable  # sizes that the host reads have no place in a graph
def _apply_uncompiled(*arguments) -> Tensor:
    return ParallelExpertsFunction.apply(*arguments)


@dataclass(frozen=True)
class _Tokens:
    """The tokens of all ranks, for experts with adapters."""

    group: RankGroup

    def gather(self, t: Tensor) -> Tensor:
        return self.group.all_gather_no_grad(t)

    def sum_own(self, t: Tensor) -> Tensor:
        return self.group.reduce_scatter_no_grad(t)


def _apply_adapted(
    own: EPExperts, gate_up: AdaptedExperts, down: AdaptedExperts, x: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    group, count = own.group, down.linear.weight.shape[0] // x.shape[1]
    routes = group.all_gather_no_grad(experts.int(), ROUTES).long()
    groups = group_rows_of(routes, count * group.ranks, group.rank * count, count, own.every_routing)
    return apply_adapted_experts(gate_up, down, x, weights, groups, own.memory, _Tokens(group))


@torch.compiler.disable  # as above
def _apply_adapted_uncompiled(*arguments) -> Tensor:
    return _apply_adapted(*arguments)


class _Batch(NamedTuple):
    """Tokens that are computed together."""

    weights: Tensor
    """fp32 [T, k]."""
    groups: TokenPermutation
    up: LinearArguments
    down: LinearArguments


class ParallelExpertsFunction(torch.autograd.Function):
    """`experts_mlp` on a rank of `group`, of its own tokens."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd sees tensors that are arguments alone
        ctx,
        x: Tensor,  # [T, C]
        weights: Tensor,  # fp32 [T, k]
        w_up: Tensor,  # [E / N * 2I, C]
        w_down: Tensor,  # [E / N * C, I]
        up_terms: Tensor | None,  # [N, *w_up.shape]
        down_terms: Tensor | None,  # [N, *w_down.shape]
        experts: Tensor,  # int64 [T, k]
        up: LinearArguments,
        down: LinearArguments,
        memory: MLPMemory,
        group: RankGroup,
        every_routing: bool,
        in_order: bool,
        grad_enabled: bool,
    ) -> Tensor:
        ctx.in_order, ctx.group = in_order, group
        needs = ctx.needs_input_grad
        needs_dx, needs_dweights = (grad_enabled and needed for needed in needs[:2])
        # The weight, or its terms.
        needs_dup, needs_ddown = (grad_enabled and (needs[i] or needs[i + 2]) for i in (2, 3))
        ctx.needs = NeedsGradient(needs_dx, needs_dup or needs_dweights, needs_ddown)
        x_needs = NeedsOperand(True, ctx.needs.up)
        # Int32 on the wire: half the bytes.
        routes = group.all_gather_no_grad(experts.int(), ROUTES).long(), group.all_gather_no_grad(weights, ROUTES)
        count = w_down.shape[0] // x.shape[1]  # experts on this rank: w_down is [count * C, I]
        if ctx.in_order:
            # A batch per source rank: rows, scales and random bits are those that a process with all experts has.
            ctx.batches = _in_order(*routes, count, up, down, group)
            every = group.all_gather_no_grad(x).split(len(x))
            operands = [
                quantize_operands(gather_rows(tokens, batch.groups.token_of_row), batch.up.request("x", x_needs))
                for batch, tokens in zip(ctx.batches, every, strict=True)
            ]
        else:
            ctx.batches = [_added(*routes, count, up, down, group, every_routing)]
            operands = [quantize_routed(ctx.batches[0].up, x, x_needs, group)]
        found = [
            mlp_forward(rows, w_up, w_down, batch.up, batch.down, ctx.needs, x.dtype, memory)
            for batch, rows in zip(ctx.batches, operands, strict=True)
        ]
        save_operands(ctx, *(operand for _, saved in found for operand in saved.operands))
        ctx.mlps = [saved._replace(operands=()) for _, saved in found]
        ctx.weights = weights
        return _to_tokens(ctx, [y for y, _ in found], weights=True)

    @staticmethod
    def backward(ctx, dout: Tensor):
        batches, group = ctx.batches, ctx.group
        saved = saved_operands(ctx)
        each = len(saved) // len(batches)  # operands of one batch
        every = group.all_gather_no_grad(dout).chunk(len(batches))
        gradients = []
        for i, (batch, tokens, mlp) in enumerate(zip(batches, every, ctx.mlps, strict=True)):
            # [R, C]: weight * dout of a row's token; not in memory where codes alone are read, under scales of its own.
            factors = weights_of_rows(batch.weights, batch.groups)
            dy = GatheredRows(tokens, RowIndex(batch.groups.token_of_row, factors))
            batch_saved = mlp._replace(operands=saved[i * each : (i + 1) * each])
            gradients.append(mlp_backward(batch_saved, dy, ctx.needs, router_dots=ctx.needs_input_grad[1]))
        dx = dweights = dup = ddown = None
        if ctx.needs_input_grad[0]:
            dx = _to_tokens(ctx, [g.x for g in gradients], weights=False)
        if ctx.needs_input_grad[1]:
            per_route = [
                route_weight_grad(g.router_dots, batch.weights, batch.groups.row_of_topk)
                for g, batch in zip(gradients, batches, strict=True)
            ]
            # Other ranks have zeros for its routes.
            dweights = group.reduce_scatter_no_grad(torch.cat(per_route), ROUTES)
        needs_up, needs_down = (ctx.needs_input_grad[i] or ctx.needs_input_grad[i + 2] for i in (2, 3))
        if needs_up:
            dup = [g.up for g in gradients]
        if needs_down:
            ddown = [g.down for g in gradients]
        weight_gradients = [dup and dup[0], ddown and ddown[0], None, None]
        if ctx.in_order:
            weight_gradients = [None, None, dup and torch.stack(dup), ddown and torch.stack(ddown)]
        return dx, dweights, *weight_gradients, None, None, None, None, None, None, None, None


def _added(
    experts: Tensor,
    weights: Tensor,
    count: int,
    up: LinearArguments,
    down: LinearArguments,
    group: RankGroup,
    every_routing: bool,
) -> _Batch:
    """All ranks' tokens, of which this rank computes `count` experts."""
    groups = group_rows_of(experts, count * group.ranks, group.rank * count, count, every_routing)
    return _Batch(weights, groups, up._replace(groups=groups), down._replace(groups=groups))


def _in_order(
    experts: Tensor, weights: Tensor, count: int, up: LinearArguments, down: LinearArguments, group: RankGroup
) -> list[_Batch]:
    """Each rank's tokens, with the rows and keys of a process that holds all experts."""
    batches = []
    for source, (chosen, factors) in enumerate(
        zip(experts.chunk(group.ranks), weights.chunk(group.ranks), strict=True)
    ):
        # Rows where a process with all experts has them.
        groups = group_rows(chosen, count * group.ranks).part(group.rank * count, count)
        own = [
            linear._replace(groups=groups, exchange=ScaleExchange(group), key=_key_of_source(linear.key, source, group))
            for linear in (up, down)
        ]
        batches.append(_Batch(factors, groups, *own))
    return batches


def _key_of_source(key: Tensor | None, source: int, group: RankGroup) -> Tensor | None:
    """The key that a process which holds all experts would have for the micro-batch of rank `source`: neighbors' micro-
    batches have consecutive numbers, and a rank's linears have numbers of their own."""
    if key is None:
        return None
    return torch.stack([key[0], key[1] + (source - group.rank), key[2] - group.rank * RANK_RNG_OFFSET])


def _to_tokens(ctx, per_row: Sequence[Tensor], weights: bool) -> Tensor:
    """From rows of this rank's experts to the sums over the routes of this rank's tokens, with their weights or not."""
    if not ctx.in_order:
        batch = ctx.batches[0]
        sums = combine_rows(per_row[0], batch.weights if weights else None, batch.groups.row_of_topk)
        return ctx.group.reduce_scatter_no_grad(sums)  # [T, C] of this rank's tokens
    per_route = [
        gather_rows(rows, batch.groups.row_of_topk.flatten()) for rows, batch in zip(per_row, ctx.batches, strict=True)
    ]
    own = ctx.group.reduce_scatter_no_grad(torch.cat(per_route))
    # Own rows are in the order of (token, k).
    routes = torch.arange(len(own), dtype=torch.int32, device=own.device).view_as(ctx.weights)
    return combine_rows(own, ctx.weights if weights else None, routes)
