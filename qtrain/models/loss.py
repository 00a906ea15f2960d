"""Cross-entropy through the head, a chunk of tokens at a time, so that the logits of a long sequence never exist whole.

The head is 28% of a 0.5 B model's arithmetic, so nothing of it is done twice. The forward pass makes a chunk's logits
[t, V] in the model's dtype, takes softmax statistics in fp32, overwrites the logits with their own gradient in the same
pass, and multiplies that into the gradients of hidden and weight at once; backward only scales what is there. What is
traded: the weight's gradient is held from the forward pass on, in fp32, so that many chunks add up without loss. The
losses are sums, so gradients of logits are of order 1 and bf16 holds them well.

Where the head is some other module (a quantized linear), its own backward is used: each chunk is a checkpoint, whose
logits are made a second time in backward.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qtrain.kernels.cross_entropy import cross_entropy


class LossSums(NamedTuple):
    """Sums over the trained tokens, fp32 scalars. The caller divides by the step's token count."""

    loss: Tensor
    """What is backpropagated: negative log-likelihood, and z-loss if asked for."""
    nll: Tensor
    """Negative log-likelihood alone, detached, for the log."""


def linear_cross_entropy(
    hidden: Tensor, head: nn.Module, labels: Tensor, chunks: int = 0, z_loss: float = 0.0
) -> LossSums:
    """Cross-entropy of head(hidden) against labels, summed.

    hidden [T, C], labels int64 [T] (-100 is not trained on), chunks >= 1, or 0 to choose. z_loss adds
    z_loss * logsumexp(logits)² a token (PaLM, arXiv:2204.02311).
    """
    rows = chunk_rows(hidden.shape[0], chunks, hidden.is_cuda)
    if torch.is_grad_enabled() and type(head).forward is nn.Linear.forward and head.bias is None:
        return LossSums(*_PlainHead.apply(hidden, head.weight, labels, rows, z_loss))

    def one_chunk(x: Tensor, y: Tensor) -> LossSums:
        return cross_entropy_sums(head(x), y, z_loss)

    loss, nll = hidden.new_zeros((2,), dtype=torch.float32)
    for x, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        if torch.is_grad_enabled():
            chunk = checkpoint(one_chunk, x, y, use_reentrant=False, preserve_rng_state=False)
        else:
            chunk = one_chunk(x, y)
        loss, nll = loss + chunk.loss, nll + chunk.nll
    return LossSums(loss, nll)


def cross_entropy_sums(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> LossSums:
    """The same sums from logits [T, V] that exist already. Their memory is taken for their gradient."""
    if torch.is_grad_enabled():
        return LossSums(*_SoftmaxLoss.apply(logits, labels, z_loss))
    return LossSums(*cross_entropy(logits, labels, z_loss, False).sum(dim=1))


def chunk_rows(tokens: int, chunks: int, large: bool) -> int:
    """Tokens a chunk: `tokens` over `chunks`, or for 0 about 8192 where `large` (GPUs want large GEMMs), else 1024."""
    chunks = chunks or -(-tokens // (8192 if large else 1024))
    return max(1, -(-tokens // max(1, chunks)))


class _PlainHead(torch.autograd.Function):
    """Loss of hidden·weightᵀ; gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None

        def one_chunk(start: int) -> Tensor:  # a function, so that its logits are gone before the next are made
            part = slice(start, start + rows)
            logits = hidden[part] @ weight.t()  # [t, V]
            sums = cross_entropy(logits, labels[part], z_loss, needs_hidden or needs_weight).sum(dim=1)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), hidden[part])
            return sums

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
            grad_hidden = _scaled(grad_hidden, grad_loss)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_loss).to(ctx.dtype)  # in place: [V, C] fp32 once is enough
        return grad_hidden, grad_weight, None, None, None


class _SoftmaxLoss(torch.autograd.Function):
    """Loss of logits [t, V], whose memory then holds their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        loss, nll = cross_entropy(logits, labels, z_loss, ctx.needs_input_grad[0]).sum(dim=1).unbind()
        ctx.save_for_backward(logits.detach())
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return _scaled(grad, grad_loss), None, None


def _scaled(grad: Tensor, by: Tensor) -> Tensor:
    """grad * by, where `by` is an fp32 scalar that plain multiplication would first round to grad's dtype."""
    return grad * by if grad.dtype == torch.float32 else (grad.float() * by).to(grad.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a·b, with total fp32 [N, K] and a, b of any one dtype."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif total.is_cuda:  # the GEMM accumulates and writes fp32 itself
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.add_(a @ b)
