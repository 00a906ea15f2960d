"""RMSNorm or LayerNorm of the residual stream, whose backward pass adds the residual's gradient in the same kernel.

    y  = x r weight                                      x: a token [C];  r = 1 / sqrt(mean(x²) + eps)
    dx = dresidual + r (g - x r² mean(g x)),   g = dy weight
    dweight = sum over tokens of dy x r

LayerNorm is the same of x and g less their means; it adds a bias, dbias = sum over tokens of dy.

Forward is PyTorch's, which a compiler fuses with what is around it. Backward is memory-bound: x, dy and the residual's
gradient are read, dx is written, 8 C bytes a token in bf16: 235 MB, 55 us at H200's 4.28 TB/s, of 32768 tokens of C =
896. Inductor takes 98 us for each of a layer's two norms there: it reads x and dy once more for the weight's gradient.

A CTA holds a token in registers, a few elements a thread, and computes r anew, which is cheaper than to read it. CTAs
stay and go through tokens that lie far apart, of which the next two are on their way to shared memory meanwhile; each
adds up gradients of weight and bias of its own, and a second launch adds up those of the CTAs, in a fixed order.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.core.hardware.capabilities import LEAST_SHARED_MEMORY, sm_count
from qtrain.kernels.autotune import forced
from qtrain.kernels.column_sums import launch_column_sums
from qtrain.kernels.compiler import operator, tl, triton

THREADS, EIGHT_WARPS_PER_SM = 1024, 3
"""That share an SM, each of up to 64 registers; CTAs of eight warps, of which three are faster than four."""
ELEMENTS = 8
"""Of a thread: a load of 16 bytes in bf16."""
STAGES = 3
"""Tokens of a CTA whose loads are under way, and the one that it computes, where shared memory holds them: 10 to 20%
faster than 1 on an H200."""


def residual_norm_backward_ref(
    dy: Tensor, dresidual: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """dy, dresidual, x [T, C], weight [C] -> dx [T, C] in x's dtype, and the gradients of weight and, of a LayerNorm
    (centered), bias, fp32 [1 or 2, C]; computed in fp32, rounded once."""
    values, dy = x.float(), dy.float()
    g = dy * weight.float()
    if centered:
        values, g = values - values.mean(-1, keepdim=True), g - g.mean(-1, keepdim=True)
    r = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    dx = r * (g - values * (r * r * (g * values).mean(-1, keepdim=True))) + dresidual.float()
    dweight = (dy * (values * r)).sum(0)
    return dx.to(x.dtype), torch.stack([dweight, dy.sum(0)] if centered else [dweight])


@triton.jit
def _add_pairs(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _residual_norm_backward_kernel(
    # bf16 or fp32 [T, C], contiguous; weight [C].
    dy_ptr, dresidual_ptr, x_ptr, weight_ptr,
    # Like x; fp32 [CTAs, 1 or 2, C], each CTA's term of the gradients of weight and bias.
    dx_ptr, parameters_ptr, tokens, eps,
    CENTERED: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < C
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    total, total_bias = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for token in tl.range(tl.program_id(0), tokens, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(token, tl.int64) * C + column
        x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, inside, 0.0).to(tl.float32)
        dresidual = tl.load(dresidual_ptr + at, inside, 0.0).to(tl.float32)
        g = dy * weight
        if CENTERED:  # before squares are added: of a large mean the difference of two sums would leave little
            x_sum, g_sum = tl.reduce((x, g), 0, _add_pairs)
            x, g = tl.where(inside, x - x_sum * (1.0 / C), 0.0), tl.where(inside, g - g_sum * (1.0 / C), 0.0)
            total_bias += dy
        # Both sums at once: one barrier. Masked lanes are 0; divided by C, not by the block.
        squares, products = tl.reduce((x * x, g * x), 0, _add_pairs)
        r = tl.rsqrt(squares * (1.0 / C) + eps)
        dx = r * (g - x * (r * r * (products * (1.0 / C)))) + dresidual
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), inside)
        total += dy * (x * r)
    parameters = 2 if CENTERED else 1
    tl.store(parameters_ptr + tl.program_id(0) * (parameters * C) + column, total, inside)
    if CENTERED:
        tl.store(parameters_ptr + tl.program_id(0) * (2 * C) + C + column, total_bias, inside)


def launch_residual_norm_backward(
    dy: Tensor, dresidual: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """The kernel for `residual_norm_backward_ref`; all contiguous."""
    (tokens, width), parameters = x.shape, 2 if centered else 1
    dx = torch.empty_like(x)
    if not tokens:
        return dx, x.new_zeros(parameters, width, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    warps = min(max(block // (32 * ELEMENTS), 1), 32)
    per_sm = EIGHT_WARPS_PER_SM if warps == 8 else max(THREADS // (32 * warps), 1)
    ctas = min(tokens, per_sm * sm_count(x.device))
    terms = x.new_empty(ctas, parameters * width, dtype=torch.float32)
    buffers = 3 * (STAGES - 1) * block * x.element_size()  # of x, dy and the residual's gradient
    stages = STAGES if buffers < LEAST_SHARED_MEMORY else 1
    _residual_norm_backward_kernel[(ctas,)](
        dy, dresidual, x, weight, dx, terms, tokens, eps,
        CENTERED=centered, C=width, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, launch_column_sums(terms).view(parameters, width)


def _empty_backward(x: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(2 if centered else 1, x.shape[-1], dtype=torch.float32)


@operator("residual_norm_backward", fake=_empty_backward)
def residual_norm_backward(
    dy: Tensor, dresidual: Tensor, x: Tensor, weight: Tensor, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    if not x.is_cuda or forced() == "ref":
        return residual_norm_backward_ref(dy, dresidual, x, weight, eps, centered)
    inputs = (t.contiguous() for t in (dy, dresidual, x, weight))
    return launch_residual_norm_backward(*inputs, eps=eps, centered=centered)


class ResidualNormFunction(torch.autograd.Function):
    """One function for the residual and its norm: so is the gradient of x one kernel's."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.centered = eps, bias is not None
        if bias is None:
            return x.view_as(x), F.rms_norm(x, weight.shape, weight, eps)
        return x.view_as(x), F.layer_norm(x, weight.shape, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dresidual, dy):
        x, weight = ctx.saved_tensors
        rows = (t.reshape(-1, len(weight)) for t in (dy, dresidual, x))
        dx, parameters = residual_norm_backward(*rows, weight, ctx.eps, ctx.centered)
        dweight, dbias, *_ = *parameters.to(weight.dtype).unbind(), None
        return dx.view(x.shape), dweight, dbias, None


def residual_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [..., C], weight [C] -> x, for the residual, and its RMSNorm, or with a bias [C] its LayerNorm, both [..., C].
    Differentiable in x, weight and bias."""
    residual, y = ResidualNormFunction.apply(x, weight, bias, eps)
    return residual, y
