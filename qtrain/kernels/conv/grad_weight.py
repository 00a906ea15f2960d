"""`grad_weight` of a convolution of 8-bit codes: dw [K, RSC] = dy [NPQ, K]ᵀ · patches of x [NPQ, RSC] (`geometry.py`).

Hopper's 8-bit tensor cores sum along contiguous dimensions only. Here the sum runs over pixels and images, and a patch
of an image in any layout of pixels starts at any byte. So images are the innermost dimension: x as [H, W, C, N] and dy
as [P, Q, K, N], which is what a quantizer writes as transposed codes of x as a matrix [N, HWC]. For a pixel of the
output and a tap of the kernel the images are contiguous in both, whatever stride, padding and dilation are. N is padded
to a multiple of 16 with zeros, which add nothing.

The output is small and the sum long: each CTA sums a slice of the pixels into its own tile of fp32 (split-K), and the
slices are added in a fixed order. An INT8 slice is no longer than an exact int32 sum.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_fp8, sm_count
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.conv.geometry import ConvShape, gather_patches
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, by_name, imprecise, padded_k
from qtrain.kernels.gemm.scaled_mm import check_kinds, scaled_mm_ref

WAVES = 2
"""CTAs for each SM that slices are made for: a slice is long enough to fill the pipeline, and no SM waits long."""


def conv_grad_weight_ref(
    dy: Tensor, x: Tensor, scale_dy: Tensor, scale_x: Tensor, shape: list[int], out_dtype: torch.dtype
) -> Tensor:
    """dw [K, R, S, C] of codes dy [P, Q, K, N] and x [H, W, C, N]; scales fp32 [1]."""
    s = ConvShape(*shape)
    images = x.reshape(s.h, s.w, s.c, s.n).view(torch.uint8).permute(3, 0, 1, 2).contiguous().view(x.dtype)
    patches = gather_patches(images, s.height.forward(), s.width.forward())  # [NPQ, RSC]
    a = dy.reshape(s.p * s.q, s.k, s.n).view(torch.uint8).permute(1, 2, 0).reshape(s.k, -1).view(dy.dtype)
    b = patches.view(torch.uint8).t().contiguous().view(x.dtype)
    return scaled_mm_ref(a, b, scale_dy, scale_x, out_dtype).view(s.k, s.r, s.s, s.c)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        *("h", "w", "p", "q", "kernel_w", "columns", "pixels_each"),
        *("stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w"),
    ]
)
def _conv_grad_weight_kernel(
    # Codes dy [p, q, k, n] and x [h, w, c, n]; fp32 [slices, k, columns], columns = kernel_h * kernel_w * c.
    dy_ptr, x_ptr, out_ptr,
    # n is a multiple of 16. Pixels of the output in a slice.
    n, c, k, h, w, p, q, kernel_w, columns, pixels_each,
    stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w,
    IMPRECISE: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """A tile of output channels and of (tap, input channel), over one slice of the pixels."""
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    ACCUMULATOR: tl.constexpr = tl.int32 if dy_ptr.dtype.element_ty == tl.int8 else tl.float32
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile, part = tl.program_id(0), tl.program_id(1)
    row = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    column, images = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # A column's tap and input channel; its image rows relative to those of the output pixel.
    tap = column // c
    down, right = tap // kernel_w * dilation_h - padding_h, tap % kernel_w * dilation_w - padding_w
    x_ptrs = x_ptr + ((down.to(tl.int64) * w + right) * c + column % c) * n
    dy_ptrs = dy_ptr + row.to(tl.int64) * n
    first, last = part * pixels_each, min((part + 1) * pixels_each, p * q)
    blocks = tl.cdiv(n, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for step in range(first * blocks, last * blocks):
        pixel, start = step // blocks, step % blocks * BLOCK_K
        top, left = pixel // q * stride_h, pixel % q * stride_w
        y, z = top + down, left + right
        inside = (column < columns) & (y >= 0) & (y < h) & (z >= 0) & (z < w)
        present = (start + images < n)[None, :]
        # int64 scalars: a slice may start beyond 2**31 bytes.
        dy_start = pixel.to(tl.int64) * k * n + start
        x_start = (top.to(tl.int64) * w + left) * c * n + start
        a = tl.load(dy_ptrs[:, None] + (dy_start + images)[None, :], (row < k)[:, None] & present, 0.0)
        b = tl.load(x_ptrs[:, None] + (x_start + images)[None, :], inside[:, None] & present, 0.0)
        total = tl.dot(a, b.T, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=IMPRECISE)
    ptrs = out_ptr + (part.to(tl.int64) * k + row[:, None]) * columns + column[None, :]
    tl.store(ptrs, total.to(tl.float32), (row < k)[:, None] & (column < columns)[None, :])


def pixels_each(s: ConvShape, images: int, tiling: Tiling, sms: int) -> int:
    """Pixels of a slice: enough slices for all SMs, none of an inexact sum. images: N with its padding."""
    tiles = triton.cdiv(s.k, tiling.block_m) * triton.cdiv(s.r * s.s * s.c, tiling.block_n)
    slices = max(WAVES * sms // tiles, 1)
    return max(min(triton.cdiv(s.p * s.q, slices), LONGEST_EXACT_K // images), 1)


def launch_conv_grad_weight(
    dy: Tensor,
    x: Tensor,
    scale_dy: Tensor,
    scale_x: Tensor,
    shape: list[int],
    out_dtype: torch.dtype,
    tiling: Tiling,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """The kernel for `conv_grad_weight_ref`; codes contiguous, with N padded to a multiple of 16."""
    s, images = ConvShape(*shape), x.shape[-1]
    columns, each = s.r * s.s * s.c, pixels_each(s, images, tiling, sm_count(x.device))
    slices = triton.cdiv(s.p * s.q, each)
    parts = torch.empty(slices, s.k, columns, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(s.k, tiling.block_m) * triton.cdiv(columns, tiling.block_n), slices)
    _conv_grad_weight_kernel[grid](
        dy, x, parts, images, s.c, s.k, s.h, s.w, s.p, s.q, s.s, columns, each,
        s.stride_h, s.stride_w, s.padding_h, s.padding_w, s.dilation_h, s.dilation_w,
        IMPRECISE=imprecise(x, tiling, fast_accum), TILING=tiling, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return (parts.sum(0) * scale_dy * scale_x).to(out_dtype).view(s.k, s.r, s.s, s.c)


# ---- dispatch --------------------------------------------------------------------------------------------------------

TILINGS = by_name(
    Tiling(128, 128, 128, 8, 3),
    Tiling(64, 128, 128, 4, 4),
    Tiling(128, 256, 128, 8, 3),
    Tiling(128, 128, 64, 4, 4),
    Tiling(64, 128, 64, 4, 4),
    Tiling(64, 128, 32, 4, 4),
)


def grad_weight_names(s: ConvShape, x: Tensor) -> list[str]:
    """The tilings whose spans do not exceed the images; the best in general first. None: no kernel takes it."""
    images = x.shape[-1]
    if images > LONGEST_EXACT_K or not (x.dtype == torch.int8 or has_fp8(x.device)):
        return []
    span = min(max(triton.next_power_of_2(images), 32), 128)
    names = [t.name for t in TILINGS.values() if t.block_k == span]
    # The first is what runs where nothing may be timed.
    return sorted(names, key=lambda name: (TILINGS[name].block_m == 64) != (s.k <= 64))


def _empty_grad_weight(x, shape, out_dtype):
    s = ConvShape(*shape)
    return x.new_empty(s.k, s.r, s.s, s.c, dtype=out_dtype)


@operator("conv_grad_weight", fake=_empty_grad_weight)
def conv_grad_weight(
    dy: Tensor,
    x: Tensor,
    scale_dy: Tensor,
    scale_x: Tensor,
    shape: list[int],
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """dw [K, R, S, C] in out_dtype, of codes dy [PQK, N] and x [HWC, N], both int8 or both FP8; scales fp32 [1];
    shape: a `ConvShape`."""
    check_kinds(dy, x)
    s = ConvShape(*shape)
    if not (x.is_cuda and x.numel() and dy.numel()) or forced() == "ref":
        return conv_grad_weight_ref(dy, x, scale_dy, scale_x, shape, out_dtype)
    dy, x = padded_k(dy.contiguous()), padded_k(x.contiguous())
    names = grad_weight_names(s, x)
    if not names:
        return conv_grad_weight_ref(dy[:, : s.n], x[:, : s.n], scale_dy, scale_x, shape, out_dtype)

    def run(name: str) -> Tensor:
        return launch_conv_grad_weight(dy, x, scale_dy, scale_x, shape, out_dtype, TILINGS[name], fast_accum=fast_accum)

    return run(choose("conv_grad_weight", (*shape, x.dtype), names, run))
