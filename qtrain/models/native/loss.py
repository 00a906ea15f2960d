"""Cross-entropy through the head in chunks of tokens, so that the logits of a long sequence are never materialized.

The head is 28% of a 0.5 B model's FLOPs, so nothing of it is computed twice. For each chunk, forward computes the
logits [t, V] in the model's dtype and softmax statistics in fp32, overwrites the logits with their gradient in the same
pass, and multiplies it into the gradients of hidden and weight; backward only scales these. The trade-off: the weight's
gradient exists from the forward pass on, in fp32, so that chunks accumulate accurately. The losses are sums, so the
gradients of logits are of order 1, which suits bf16.

For any other module as head (a quantized linear) its own backward gives a chunk's gradients, in the forward pass too.
Where it reads FP8 codes of the logits' gradient, they are computed from the logits, and the gradient is never written.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from qtrain.kernels.cross_entropy import cross_entropy
from qtrain.kernels.elementwise import add_in_order, scaled
from qtrain.models.native.mlp_chunks import ALIGNMENT
from qtrain.quant.linear import LowBitLinear
from qtrain.tensors.softmax_gradient import softmax_gradient


class LossSums(NamedTuple):
    """Sums over the trained tokens, fp32 scalars. The caller divides by the step's token count."""

    loss: Tensor
    """What is backpropagated: negative log-likelihood, plus z-loss if it is on."""
    nll: Tensor
    """Negative log-likelihood alone, detached, for the log."""


Entropy = Callable[[Tensor, Tensor, float, bool], Tensor]
"""As `cross_entropy`: (logits [t, V], labels [t], z_loss, with_grad) -> fp32 [2, t], loss and nll of each row."""
EntropyOf = Callable[[slice], Entropy]
"""The entropy of a chunk of tokens."""


def plain_entropy(chunk: slice) -> Entropy:
    return cross_entropy


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    chunks: int = 0,
    z_loss: float = 0.0,
    entropy_of: EntropyOf = plain_entropy,
) -> LossSums:
    """Cross-entropy of head(hidden) against labels, summed.

    hidden [T, C], labels int64 [T] (-100 is ignored), chunks >= 1, or 0 to choose by size. z_loss adds
    z_loss * logsumexp(logits)² per token (PaLM, arXiv:2204.02311). entropy_of: what is computed instead.
    """
    rows = chunk_rows(hidden.shape[0], chunks, hidden.is_cuda)
    if torch.is_grad_enabled():
        if type(head).forward is nn.Linear.forward and head.bias is None:
            return LossSums(*_PlainHead.apply(hidden, head.weight, labels, rows, z_loss, entropy_of))
        trained = [p for p in head.parameters() if p.requires_grad]
        return LossSums(*_AnyHead.apply(hidden, labels, rows, z_loss, entropy_of, head, *trained))
    loss, nll = hidden.new_zeros((2,), dtype=torch.float32)
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        sums = cross_entropy_sums(head(hidden[chunk]), labels[chunk], z_loss, entropy_of(chunk))
        loss, nll = loss + sums.loss, nll + sums.nll
    return LossSums(loss, nll)


def cross_entropy_sums(
    logits: Tensor, labels: Tensor, z_loss: float = 0.0, entropy: Entropy = cross_entropy
) -> LossSums:
    """The same sums from logits [T, V], whose memory is overwritten with their gradient."""
    if torch.is_grad_enabled():
        return LossSums(*_SoftmaxLoss.apply(logits, labels, z_loss, entropy))
    return LossSums(*entropy(logits, labels, z_loss, False).sum(dim=1))


def chunk_rows(tokens: int, chunks: int, large: bool) -> int:
    """Tokens per chunk: `tokens` / `chunks`, in whole tiles; for 0 chunks about 8192 if `large` (GPUs need large
    GEMMs), else 1024."""
    chunks = chunks or -(-tokens // (8192 if large else 1024))
    rows = max(1, -(-tokens // max(1, chunks)))
    # A chunk is the sum's length of the head's gradient, which tensor cores take in multiples of 16.
    return -(-rows // ALIGNMENT) * ALIGNMENT if rows > ALIGNMENT else rows


class _PlainHead(torch.autograd.Function):
    """Loss of hidden·weightᵀ; the forward pass computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, z_loss: float, entropy_of: EntropyOf
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # The first chunk writes it without reading it; without a token there is no chunk.
        new = torch.empty_like if hidden.shape[0] else torch.zeros_like
        grad_weight = new(weight, dtype=torch.float32) if needs_weight else None

        def one_chunk(start: int) -> Tensor:  # a function, so that its logits are freed before the next are allocated
            chunk = slice(start, start + rows)
            logits = hidden[chunk] @ weight.t()  # [t, V]
            with_grad = needs_hidden or needs_weight
            sums = entropy_of(chunk)(logits, labels[chunk], z_loss, with_grad).sum(dim=1)
            if grad_hidden is not None:
                # [t, V] · [V, C]: the entropy has put the gradient where the logits were.
                torch.mm(logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), hidden[chunk], first=start == 0)
            return sums

        sums = _sum_over_chunks(one_chunk, hidden, rows)
        return _keep_gradients(ctx, sums, [grad_hidden, grad_weight], [hidden.dtype, weight.dtype])

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled_gradients(ctx, grad_loss), None, None, None, None


class _AnyHead(torch.autograd.Function):
    """The same of any module and its trained parameters, whose gradients several chunks add up in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        rows: int,
        z_loss: float,
        entropy_of: EntropyOf,
        head: nn.Module,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden = ctx.needs_input_grad[0]
        grad_hidden: Any = torch.empty_like(hidden) if needs_hidden else None
        several = hidden.shape[0] > rows
        totals = [] if hidden.shape[0] else [torch.zeros_like(p) for p in trained]

        def one_chunk(start: int) -> Tensor:
            chunk = slice(start, start + rows)
            x = hidden[chunk].detach().requires_grad_(needs_hidden)
            with torch.enable_grad():
                logits = head(x)
            # Taken before the logits are overwritten: a view that has changed since gets a backward of copies.
            edge = get_gradient_edge(logits) if logits.requires_grad else None
            gradient, entropy = logits.detach(), entropy_of(chunk)  # in the same memory
            plain = edge is not None and entropy is cross_entropy and isinstance(head, LowBitLinear)
            if plain and head.reads_softmax_gradient(gradient, needs_hidden):
                losses, gradient = softmax_gradient(gradient, labels[chunk], z_loss)
            else:
                losses = entropy(gradient, labels[chunk], z_loss, edge is not None)
            sums = losses.sum(dim=1)
            if edge is None:
                return sums
            found = torch.autograd.grad(edge, [x, *trained] if needs_hidden else trained, gradient)
            if needs_hidden:
                grad_hidden[chunk], *found = found
            if start == 0:
                # fp32 only to add chunks up; of a single one in the parameters' dtypes.
                totals.extend(term.float() if several else term for term in found)
            else:
                for total, term in zip(totals, found, strict=True):
                    add_in_order(total.view(-1), term.reshape(1, -1))
            return sums

        sums = _sum_over_chunks(one_chunk, hidden, rows)
        return _keep_gradients(ctx, sums, [grad_hidden, *totals], [t.dtype for t in (hidden, *trained)])

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *trained_only = _scaled_gradients(ctx, grad_loss)
        return grad_hidden, None, None, None, None, None, *trained_only


def _sum_over_chunks(one_chunk: Callable[[int], Tensor], hidden: Tensor, rows: int) -> Tensor:
    """Loss and nll [2] of all tokens of `hidden`; one_chunk gives those of `rows` tokens, from the number of the
    first."""
    sums = hidden.new_zeros((2,), dtype=torch.float32)
    for start in range(0, hidden.shape[0], rows):
        sums += one_chunk(start)
    return sums


def _keep_gradients(
    ctx: Any, sums: Tensor, gradients: list[Tensor | None], dtypes: list[torch.dtype]
) -> tuple[Tensor, Tensor]:
    """The outputs loss and nll from their `sums` [2], with gradients for `_scaled_gradients` to return."""
    ctx.save_for_backward(*gradients)
    ctx.dtypes = dtypes
    loss, nll = sums.unbind()
    ctx.mark_non_differentiable(nll)
    return loss, nll


def _scaled_gradients(ctx: Any, grad_loss: Tensor) -> list[Tensor | None]:
    """The kept gradients times grad_loss, in the dtypes of what they are gradients of."""

    def one(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if gradient is None:
            return None
        # In place where it is fp32: no second fp32 [V, C].
        in_place = gradient.dtype == dtype == torch.float32
        return gradient.mul_(grad_loss) if in_place else scaled(gradient, grad_loss, dtype)

    return [one(gradient, dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]


class _SoftmaxLoss(torch.autograd.Function):
    """Loss of logits [t, V], whose memory is overwritten with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, entropy: Entropy) -> tuple[Tensor, Tensor]:
        sums = entropy(logits, labels, z_loss, ctx.needs_input_grad[0]).sum(dim=1)
        return _keep_gradients(ctx, sums, [logits.detach()], [logits.dtype])  # their gradient by now

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled_gradients(ctx, grad_loss), None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a·b, or = if it is the first; total fp32 [N, K], a and b of one dtype."""
    keep = 0.0 if first else 1.0  # with 0 the total is not read
    if a.dtype == torch.float32:
        total.addmm_(a, b, beta=keep)
    elif total.is_cuda:  # a GEMM with fp32 output
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, beta=keep, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
