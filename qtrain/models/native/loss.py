"""Cross-entropy through the head in chunks of tokens, so that the logits of a long sequence are never materialized.

The head is 28% of a 0.5 B model's FLOPs, so nothing of it is computed twice. For each chunk, forward computes the
logits [t, V] in the model's dtype and softmax statistics in fp32, overwrites the logits with their gradient in the same
pass, and multiplies it into the gradients of hidden and weight; backward only scales these. The trade-off: the weight's
gradient exists from the forward pass on, in fp32, so that chunks accumulate accurately. The losses are sums, so the
gradients of logits are of order 1, which suits bf16.

For any other module as head (a quantized linear) its own backward gives a chunk's gradients, in the forward pass too.
Where it reads codes of the logits' gradient, they are computed from the logits, and the gradient is never written.
The chunks' gradients of a parameter are added in fp32: those of a few chunks in the pass that scales them.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from qtrain.kernels.cross_entropy import cross_entropy
from qtrain.kernels.elementwise import add_in_order, scaled_sum, sum_in_order
from qtrain.kernels.gemm.bf16_mm import bf16_mm, bf16_mm_into
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
FEW_CHUNKS, AT_ONCE = 4, 2
"""So many chunks' gradients of a parameter are kept as they are. Of more chunks so many at once are added to a sum in
fp32: of bf16 that takes as much memory, 8 bytes an element."""


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
            logits = bf16_mm(hidden[chunk], weight.t())  # [t, V]
            with_grad = needs_hidden or needs_weight
            sums = entropy_of(chunk)(logits, labels[chunk], z_loss, with_grad).sum(dim=1)
            if grad_hidden is not None:
                # [t, V] · [V, C]: the entropy has put the gradient where the logits were.
                bf16_mm_into(grad_hidden[chunk], logits, weight)
            if grad_weight is not None:
                bf16_mm_into(grad_weight, logits.t(), hidden[chunk], keep=start > 0)
            return sums

        sums = _sum_over_chunks(one_chunk, hidden, rows)
        kept = [[] if gradient is None else [gradient] for gradient in (grad_hidden, grad_weight)]
        return _keep_gradients(ctx, sums, kept, [hidden.dtype, weight.dtype])

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
        few = hidden.shape[0] <= FEW_CHUNKS * rows
        # Of each parameter what is left to add, in this order.
        terms: list[list[Tensor]] = [[] if hidden.shape[0] else [torch.zeros_like(p)] for p in trained]

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
            for left, term in zip(terms, found, strict=True):
                left.append(term.contiguous())
                if not few:
                    _add_pending(left)
            return sums

        sums = _sum_over_chunks(one_chunk, hidden, rows)
        kept = [[grad_hidden] if needs_hidden else [], *terms]
        return _keep_gradients(ctx, sums, kept, [t.dtype for t in (hidden, *trained)])

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


def _add_pending(left: list[Tensor]) -> None:
    """Add what is left of a parameter's gradient to its sum in fp32, the first of them, once AT_ONCE are there."""
    summed = left[0].dtype == torch.float32 and len(left) > 1
    if len(left) - summed < AT_ONCE:
        return
    flat = [term.view(-1) for term in left]
    if summed:
        add_in_order(flat[0], flat[1:])
    else:
        left[0] = sum_in_order(flat, torch.empty_like(flat[0], dtype=torch.float32)).view(left[0].shape)
    del left[1:]


def _keep_gradients(
    ctx: Any, sums: Tensor, terms: list[list[Tensor]], dtypes: list[torch.dtype]
) -> tuple[Tensor, Tensor]:
    """The outputs loss and nll from their `sums` [2], with the terms of gradients for `_scaled_gradients` to return,
    none of one that is not wanted."""
    ctx.save_for_backward(*(term for of_one in terms for term in of_one))
    ctx.counts, ctx.dtypes = [len(of_one) for of_one in terms], dtypes
    loss, nll = sums.unbind()
    ctx.mark_non_differentiable(nll)
    return loss, nll


def _scaled_gradients(ctx: Any, grad_loss: Tensor) -> list[Tensor | None]:
    """The kept gradients times grad_loss, in the dtypes of what they are gradients of, and in their memory."""
    terms = iter(ctx.saved_tensors)
    gradients = [list(itertools.islice(terms, count)) for count in ctx.counts]
    return [scaled_sum(g, grad_loss, dtype) if g else None for g, dtype in zip(gradients, ctx.dtypes, strict=True)]


class _SoftmaxLoss(torch.autograd.Function):
    """Loss of logits [t, V], whose memory is overwritten with their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, entropy: Entropy) -> tuple[Tensor, Tensor]:
        sums = entropy(logits, labels, z_loss, ctx.needs_input_grad[0]).sum(dim=1)
        return _keep_gradients(ctx, sums, [[logits.detach()]], [logits.dtype])  # their gradient by now

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled_gradients(ctx, grad_loss), None, None, None
