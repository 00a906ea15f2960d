"""RMSNorm and quantization of a few rows in one launch: what a step of generation multiplies with a weight's codes.

It gives the codes of `quantize(rms_norm(x))`: the norm is rounded to x's dtype before, as the layer's is in training. A
CTA holds a row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.core.hardware.capabilities import has_dependent_launch
from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.decode.dependent_launch import start_next, wait_for_previous
from qtrain.kernels.numerics.encode import (
    abs_bits,
    encode,
    encoding,
    inv_scale_of,
    scale_from_amax,
    zero_nonfinite,
)
from qtrain.kernels.numerics.formats import empty_codes
from qtrain.kernels.quantize.reference import quantize_ref

LONGEST = 65536
"""The longest row, in elements, that a CTA holds."""


def quantize_normed_ref(
    x: Tensor, norm: Tensor | None, eps: float, fmt: str, granularity: str
) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16, norm [K] or None: not normed -> codes [M, K] and their scale, rowwise or 1x128."""
    if norm is not None:
        x = F.rms_norm(x.float(), x.shape[-1:], norm.float(), eps).to(x.dtype)
    return quantize_ref(x, fmt, granularity)


def quantize_normed(x: Tensor, norm: Tensor | None, eps: float, fmt: str, granularity: str) -> tuple[Tensor, Tensor]:
    """`quantize_normed_ref` of contiguous rows."""
    if not x.is_cuda or x.shape[1] > LONGEST or forced() == "ref":
        return quantize_normed_ref(x, norm, eps, fmt, granularity)
    return launch_quantize_normed(x, norm, eps, fmt, granularity)


@triton.jit
def _quantize_normed_kernel(
    # x fp32 or bf16 [m, k], norm [k], contiguous; out [m, k]: codes, or x's dtype where CODE is None. Scales fp32, one
    # a group, with their strides.
    x_ptr, norm_ptr, out_ptr, scale_ptr, k, eps, row_stride, group_stride,
    NORM: tl.constexpr, CODE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row, as GROUPS groups of WIDTH elements that share a scale."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    place = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None]
    inside = place < k
    start_next(EARLY)
    norm = tl.zeros((GROUPS, WIDTH), tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + place, inside, 0.0).to(tl.float32)
    wait_for_previous(EARLY)
    x = tl.load(x_ptr + row * k + place, inside, 0.0)
    if NORM:
        value = x.to(tl.float32)
        value *= tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / k + eps)
        x = (value * norm).to(x_ptr.dtype.element_ty)
    if CODE is None:
        tl.store(out_ptr + row * k + place, x, inside)
    else:
        amax = tl.max(abs_bits(x), 1)
        nonfinite = tl.max(amax, 0) >= 0x7F800000
        scale = scale_from_amax(amax, CODE)
        tl.store(scale_ptr + row * row_stride + group * group_stride, scale, group * WIDTH < k)
        codes = encode(zero_nonfinite(x, nonfinite), inv_scale_of(scale, nonfinite)[:, None], 0, False, False, CODE)
        tl.store(out_ptr + row * k + place, codes, inside)


def launch_quantize_normed(
    x: Tensor, norm: Tensor | None, eps: float, fmt: str, granularity: str
) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_normed_ref`."""
    codes, scale = empty_codes(x, fmt, granularity)
    strides = (scale.stride(0), scale.stride(1) if scale.ndim == 2 else 0)
    width = 128 if granularity == "1x128" else None
    _launch(x, norm, eps, codes.view(torch.int8), scale, strides, encoding(fmt, x.device), width)
    return codes, scale


def normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm of contiguous rows x [M, K] with weight norm [K]: fp32, rounded once to x's dtype."""
    if not x.is_cuda or x.shape[1] > LONGEST or forced() == "ref":
        return F.rms_norm(x, x.shape[-1:], norm, eps)
    return launch_normed(x, norm, eps)


def launch_normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """The kernel for `normed`."""
    out = torch.empty_like(x)
    _launch(x, norm, eps, out, out, (0, 0), None, None)
    return out


def _launch(
    x: Tensor, norm: Tensor | None, eps: float, out: Tensor, scale: Tensor, scale_strides: tuple[int, int],
    code: Any, width: int | None,
) -> None:  # fmt: skip
    """width: of a group that shares a scale; None: a row."""
    m, k = x.shape
    block = max(triton.next_power_of_2(k), 256)
    width, early = width or block, has_dependent_launch(x.device)
    _quantize_normed_kernel[(m,)](
        x, x if norm is None else norm, out, scale, k, eps, *scale_strides,
        NORM=norm is not None, CODE=code, GROUPS=block // width, WIDTH=width, EARLY=early,
        num_warps=min(max(block // 1024, 4), 16), enable_fp_fusion=False, launch_pdl=early,
    )  # fmt: skip
