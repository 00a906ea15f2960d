"""A layer whose MLP runs in chunks of tokens, so that what it computes between its linears exists for one chunk only.

    x - norm - attention - + - h      h, chunk by chunk:    h - norm - gate_up - silu(gate) * up - down - +

At 131,072 tokens gate_up's output of a 7B model is 9.3 GiB, as much as eleven residual streams, and a layer's backward
holds its gradient and the activation besides. Every row of the MLP is computed by itself, so tokens can be split
(Arctic's TiledMLP, arXiv:2506.13996).

As with recomputation of whole layers, forward keeps the layer's input alone. Backward computes attention again and
keeps what its gradient reads; then for each chunk the MLP's forward and backward pass follow each other; then comes
attention's backward. So nothing is computed more often than if the whole layer is recomputed, and the gradient of h is
written where h was. A parameter's gradients of several chunks are added in fp32 and rounded once to its dtype, as those
of the loss's chunks are.

A compiler sees either half as a function of its own, that of the MLP for a chunk: its loop stays in Python, and
however many chunks there are, they share their code.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.elementwise import add_in_order
from qtrain.models.native.attention import SequenceInfo
from qtrain.quant.chunk_keys import chunk_keys, rounding_linears

ALIGNMENT = 128
"""Chunks begin at multiples of so many tokens: no block of a scheme's scales spans two of them."""


class TwoHalves(Protocol):
    """A layer, [B, S, C] -> [B, S, C], as its attention and its MLP, each with the residual around it."""

    attn_norm: Any
    attn: Any
    mlp_norm: Any
    mlp: Any

    def attention_half(self, x: Tensor, info: SequenceInfo) -> Tensor: ...

    def mlp_half(self, x: Tensor) -> Any: ...


def mlp_chunk_rows(tokens: int, chunks: int) -> int:
    """Tokens of a chunk; the last one may have fewer."""
    # tokens / chunks, rounded up to a multiple of ALIGNMENT.
    return -(-tokens // (chunks * ALIGNMENT)) * ALIGNMENT


def run_in_chunks(layer: TwoHalves, x: Tensor, info: SequenceInfo, chunks: int) -> Tensor:
    """`layer` of x, its MLP in at most `chunks` chunks of tokens."""
    if not torch.is_grad_enabled():
        return _forward(layer, x, info, chunks)
    attention, mlp = _trained(layer.attn_norm, layer.attn), _trained(layer.mlp_norm, layer.mlp)
    # Parameters are arguments: autograd records nothing of what runs inside of forward.
    return _ChunkedLayer.apply(x, layer, info, chunks, len(attention), *attention, *mlp)


def _trained(*modules: nn.Module) -> list[Tensor]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def _forward(layer: TwoHalves, x: Tensor, info: SequenceInfo, chunks: int) -> Tensor:
    stream = layer.attention_half(x, info)
    rows = stream.view(-1, stream.shape[-1])  # [T, C]
    linears = rounding_linears(layer.mlp)
    for number, chunk in enumerate(rows.split(mlp_chunk_rows(len(rows), chunks))):
        with chunk_keys(linears, number):
            chunk.copy_(layer.mlp_half(chunk))  # in place: nothing else reads the stream
    return stream


class _ChunkedLayer(torch.autograd.Function):
    """attention: how many of the trained parameters are those of the attention's half, which come first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: TwoHalves, info: SequenceInfo, chunks: int, attention: int, *trained: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.info, ctx.chunks = layer, info, chunks
        ctx.attention, ctx.mlp = trained[:attention], trained[attention:]
        return _forward(layer, x, info, chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            stream = ctx.layer.attention_half(x, ctx.info)
        # Its values are read chunk by chunk, and replaced by their gradients, which takes no memory. Attention's
        # backward does not read them; autograd would notice.
        gradient = stream.detach()
        mlp = _mlp_backward(ctx.layer, gradient.view(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1]), ctx.chunks, ctx.mlp)
        dx, *attention = _gradients(stream, (x, *ctx.attention), gradient)
        return dx, None, None, None, None, *attention, *mlp


def _mlp_backward(
    layer: TwoHalves, stream: Tensor, dy: Tensor, chunks: int, trained: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of `trained`. stream, dy [T, C]; stream is replaced by its gradient."""
    rows, linears = mlp_chunk_rows(len(stream), chunks), rounding_linears(layer.mlp)

    def one_chunk(number: int, chunk: Tensor, dy: Tensor) -> list[Tensor | None]:  # what it allocates is freed with it
        with chunk_keys(linears, number), torch.enable_grad():
            x = chunk.detach().requires_grad_()
            dx, *found = _gradients(layer.mlp_half(x), (x, *trained), dy)
        chunk.copy_(dx)
        return found

    parts = enumerate(zip(stream.split(rows), dy.split(rows), strict=True))
    # One chunk: nothing is added up, so its gradients need no fp32 sums.
    if len(stream) <= rows:
        return [gradient for number, part in parts for gradient in one_chunk(number, *part)]
    totals = [torch.zeros(p.shape, dtype=torch.float32, device=p.device) for p in trained]
    for number, part in parts:
        for total, term in zip(totals, one_chunk(number, *part), strict=True):
            if term is not None:
                add_in_order(total.view(-1), term.reshape(1, -1))
    return [total.to(p.dtype) for total, p in zip(totals, trained, strict=True)]


def _gradients(y: Tensor, inputs: Iterable[Tensor], dy: Tensor) -> list[Tensor | MaybeNone]:
    """Of those inputs that require one; None for the others."""
    inputs = list(inputs)
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, dy, allow_unused=True) if wanted else ())
    return [next(found) if t.requires_grad else None for t in inputs]
