"""Cross-entropy through a head whose vocabulary is divided over a tensor group: no rank has all logits of a token.

As in `loss.py`, in chunks of tokens whose logits are overwritten with their gradient. Of each token a rank sends three
numbers: the maximum of its logits, the sum of exponentials below it, and the label's logit, if it is among them. From
those of all ranks everyone computes the same logsumexp and loss. In PyTorch's operations on all devices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qtrain.distributed.tensor_group import TensorGroup
from qtrain.kernels.cross_entropy import IGNORED
from qtrain.models.loss import LossSums, add_product, chunk_rows, scaled
from qtrain.models.tensor_parallel import TensorParallel

STATISTICS = "loss statistics"
"""The kind of message."""


def parallel_cross_entropy(
    hidden: Tensor, head: nn.Module, labels: Tensor, tensor: TensorParallel, chunks: int = 0, z_loss: float = 0.0
) -> LossSums:
    """As `linear_cross_entropy`, with the rank's rows of the head. hidden [T, C], labels [T]: of all tokens, on all
    ranks; the gradient of hidden is this rank's term."""
    rows = chunk_rows(hidden.shape[0], chunks, hidden.is_cuda)
    group, first = tensor.group, tensor.first_token
    if torch.is_grad_enabled() and type(head).forward is nn.Linear.forward and head.bias is None:
        return LossSums(*_DividedHead.apply(hidden, head.weight, labels, rows, z_loss, group, first))

    def one_chunk(x: Tensor, y: Tensor) -> LossSums:
        return LossSums(*_DividedSoftmax.apply(head(x), y, z_loss, group, first, torch.is_grad_enabled()))

    loss, nll = hidden.new_zeros((2,), dtype=torch.float32)
    for x, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        if torch.is_grad_enabled():
            chunk = checkpoint(one_chunk, x, y, use_reentrant=False, preserve_rng_state=False)
        else:
            chunk = one_chunk(x, y)
        loss, nll = loss + chunk.loss, nll + chunk.nll
    return LossSums(loss, nll)


def divided_cross_entropy(
    logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool, group: TensorGroup, first: int
) -> Tensor:
    """logits [t, rows of this rank], which begin at the token `first` -> fp32 [2, t]: loss and nll of each row.

    with_grad: the logits are overwritten by their gradient."""
    x = logits.float()
    trained, target = labels != IGNORED, labels - first
    own = trained & (target >= 0) & (target < x.shape[1])
    target = torch.where(own, target, 0).unsqueeze(-1)
    label_logit = torch.where(own, x.gather(-1, target).squeeze(-1), 0.0)
    peak = x.amax(dim=-1)
    below = (x - peak.unsqueeze(-1)).exp_().sum(dim=-1)
    every = group.gathered(torch.stack([peak, below, label_logit])[None], STATISTICS)  # [ranks, 3, t]
    top = every[:, 0].amax(dim=0)
    log_total = top + (every[:, 1] * (every[:, 0] - top).exp()).sum(dim=0).log()
    nll = torch.where(trained, log_total - every[:, 2].sum(dim=0), 0.0)
    loss = nll + torch.where(trained, z_loss * log_total.square(), 0.0)
    if with_grad:
        x = x.sub_(log_total.unsqueeze(-1)).exp_().mul_((1.0 + 2.0 * z_loss * log_total).unsqueeze(-1))
        x.scatter_add_(-1, target, -own.float().unsqueeze(-1))
        logits.copy_(x.masked_fill_(~trained.unsqueeze(-1), 0.0))
    return torch.stack([loss, nll])


class _DividedHead(torch.autograd.Function):
    """Loss of hidden·weightᵀ; the forward pass computes the gradients, as in `loss._PlainHead`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        z_loss: float,
        group: TensorGroup,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None

        def one_chunk(start: int) -> Tensor:  # a function, so that its logits are freed before the next are allocated
            chunk = slice(start, start + rows)
            logits = hidden[chunk] @ weight.t()
            sums = divided_cross_entropy(logits, labels[chunk], z_loss, needs_hidden or needs_weight, group, first)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, logits.t(), hidden[chunk])
            return sums.sum(dim=1)

        sums = hidden.new_zeros((2,), dtype=torch.float32)
        for start in range(0, hidden.shape[0], rows):
            sums += one_chunk(start)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        loss, nll = sums.unbind()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = scaled(grad_hidden, grad_loss)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.dtype)
        return grad_hidden, grad_weight, *[None] * 5


class _DividedSoftmax(torch.autograd.Function):
    """Loss of this rank's logits [t, rows], whose memory is overwritten with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, group: TensorGroup, first: int, grad_enabled: bool
    ) -> tuple[Tensor, Tensor]:
        with_grad = grad_enabled and ctx.needs_input_grad[0]
        loss, nll = divided_cross_entropy(logits, labels, z_loss, with_grad, group, first).sum(dim=1).unbind()
        ctx.save_for_backward(logits.detach())
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return scaled(grad, grad_loss), *[None] * 5
