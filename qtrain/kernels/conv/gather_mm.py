"""`output` and `grad_input` of a convolution of 8-bit codes: one implicit GEMM for both (`geometry.py`).

    out [rows, O] = patches of a [rows, taps * I] · b [O, taps * I]ᵀ * scale_a * scale_b (+ bias)

Rows are pixels of the output, summed over are taps and input channels I. A tile's rows are gathered as it is
multiplied: patches are never in memory. Channels are contiguous in both operands, so both are K-major, as Hopper's
8-bit tensor cores require, and each thread loads 16 bytes. Pixels outside of the image are loads that are masked out.

`grad_input` of a stride is one launch for each phase, whose pixels read the same taps.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_fp8
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.conv.geometry import ConvShape, Taps, gather_patches, kernel_taps
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, by_name, imprecise, tile_of
from qtrain.kernels.gemm.scaled_mm import check_kinds, scaled_mm_ref

# ---- definition ------------------------------------------------------------------------------------------------------


def gather_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, passes: tuple[Taps, Taps], bias: Tensor | None
) -> None:
    """Write the pixels of one pass into out [N, OH, OW, O]; a [N, IH, IW, I], b [O, R, S, I] codes."""
    height, width = passes
    patches, taps = gather_patches(a, height, width), kernel_taps(b, height, width)
    row_scale = scale_a if scale_a.numel() == 1 else scale_a.repeat_interleave(height.count * width.count)
    value = scaled_mm_ref(patches, taps, row_scale, scale_b, out.dtype, bias)
    out[:, height.first :: height.step, width.first :: width.step] = value.view(
        out.shape[0], height.count, width.count, out.shape[3]
    )


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def _pixel_of_row(row, count_h, count_w):
    """Row of the implicit GEMM -> image, and number of its row and column among those that the pass computes."""
    image, pixel = row // (count_h * count_w), row % (count_h * count_w)
    return image, pixel // count_w, pixel % count_w


@triton.jit(
    do_not_specialize=[
        *("rows", "in_h", "in_w", "out_h", "out_w", "count_h", "count_w", "first_h", "first_w", "step_h", "step_w"),
        *("multiply_h", "multiply_w", "offset_h", "offset_w", "move_h", "move_w", "tap_first_h", "tap_first_w"),
        *("tap_step_h", "tap_step_w", "taps_h", "taps_w", "kernel_h", "kernel_w"),
    ]
)
def _conv_gather_kernel(
    # Codes a [n, in_h, in_w, c], b [channels, kernel_h, kernel_w, c]; out [n, out_h, out_w, channels].
    a_ptr, b_ptr, out_ptr,
    # fp32 [n] (PER_IMAGE) or [1]; fp32 [channels] (PER_CHANNEL) or [1]; of any float dtype [channels], or None.
    scale_a_ptr, scale_b_ptr, bias_ptr,
    # Pixels that this pass computes, over all images; c is a multiple of 16.
    rows, c, channels, in_h, in_w, out_h, out_w, kernel_h, kernel_w,
    # A `Taps` in each dimension.
    count_h, count_w, first_h, first_w, step_h, step_w, multiply_h, multiply_w, offset_h, offset_w, move_h, move_w,
    tap_first_h, tap_first_w, tap_step_h, tap_step_w, taps_h, taps_w,
    PER_IMAGE: tl.constexpr, PER_CHANNEL: tl.constexpr, IMPRECISE: tl.constexpr, TILING: tl.constexpr,
):  # fmt: skip
    """One tile of pixels and channels of the output."""
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    BLOCK_K: tl.constexpr = TILING.block_k
    ACCUMULATOR: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(channels, BLOCK_N), TILING.group_m)
    row, channel = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    span, present = tl.arange(0, BLOCK_K), row < rows
    image, i, j = _pixel_of_row(row, count_h, count_w)
    top, left = i * multiply_h + offset_h, j * multiply_w + offset_w
    # int64 once a row; what a tap and a span of channels add to it is a scalar that fits in int32.
    a_row_ptrs = a_ptr + ((image.to(tl.int64) * in_h + top) * in_w + left) * c
    b_row_ptrs = b_ptr + channel.to(tl.int64) * (kernel_h * kernel_w) * c
    blocks = tl.cdiv(c, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for step in range(0, taps_h * taps_w * blocks):
        tap, start = step // blocks, step % blocks * BLOCK_K
        down, right = tap // taps_w, tap % taps_w
        y, x = top + down * move_h, left + right * move_w
        inside = present & (y >= 0) & (y < in_h) & (x >= 0) & (x < in_w)
        a_offset = (down * move_h * in_w + right * move_w) * c + start
        b_offset = ((tap_first_h + down * tap_step_h) * kernel_w + tap_first_w + right * tap_step_w) * c + start
        in_span = (start + span < c)[None, :]
        a = tl.load(a_row_ptrs[:, None] + (a_offset + span)[None, :], inside[:, None] & in_span, 0.0)
        b = tl.load(b_row_ptrs[:, None] + (b_offset + span)[None, :], (channel < channels)[:, None] & in_span, 0.0)
        total = tl.dot(a, b.T, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=IMPRECISE)
    out = total.to(tl.float32)
    if PER_IMAGE:
        out *= tl.load(scale_a_ptr + image, present, 0.0)[:, None]
    else:
        out *= tl.load(scale_a_ptr)
    if PER_CHANNEL:
        out *= tl.load(scale_b_ptr + channel, channel < channels, 0.0)[None, :]
    else:
        out *= tl.load(scale_b_ptr)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, channel < channels, 0.0).to(tl.float32)[None, :]
    pixel = (image.to(tl.int64) * out_h + first_h + i * step_h) * out_w + first_w + j * step_w
    ptrs = out_ptr + pixel[:, None] * channels + channel[None, :]
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), present[:, None] & (channel < channels)[None, :])


def launch_gather_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    passes: tuple[Taps, Taps],
    tiling: Tiling,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> None:
    """The kernel for `gather_mm_ref`. All contiguous; channels of the input in multiples of 16; for INT8 no more
    products a sum than LONGEST_EXACT_K."""
    (_, in_h, in_w, c), (n, out_h, out_w, channels) = a.shape, out.shape
    height, width = passes
    rows = n * height.count * width.count
    grid = (triton.cdiv(rows, tiling.block_m) * triton.cdiv(channels, tiling.block_n),)
    # Pairs of both dimensions, in the order of the fields.
    pairs = zip(height, width, strict=True)
    first, step, count, multiply, offset, move, tap_first, tap_step, taps = pairs
    _conv_gather_kernel[grid](
        a, b, out, scale_a, scale_b, bias, rows, c, channels, in_h, in_w, out_h, out_w, b.shape[1], b.shape[2],
        *count, *first, *step, *multiply, *offset, *move, *tap_first, *tap_step, *taps,
        PER_IMAGE=scale_a.numel() > 1, PER_CHANNEL=scale_b.numel() > 1, IMPRECISE=imprecise(a, tiling, fast_accum),
        TILING=tiling, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


# ---- dispatch --------------------------------------------------------------------------------------------------------

# Few channels want a narrow tile, and a span of K no longer than the channels of a tap.
TILINGS = by_name(
    Tiling(128, 128, 128, 8, 3),
    Tiling(128, 256, 128, 8, 3),
    Tiling(128, 128, 64, 4, 4),
    Tiling(128, 64, 128, 4, 4),
    Tiling(128, 64, 64, 4, 4),
    Tiling(64, 128, 64, 4, 4),
    Tiling(128, 64, 32, 4, 4),
    Tiling(128, 128, 32, 8, 4),
)


def tiling_names(channels: int, c: int, summed: int, a: Tensor) -> list[str]:
    """The tilings for a sum of `summed` products into `channels` output channels, with spans that divide the c input
    channels best; the best in general first. None: no kernel takes it."""
    supported = summed <= LONGEST_EXACT_K if a.dtype == torch.int8 else has_fp8(a.device)
    if not supported or c % 16:
        return []
    span = next((span for span in (128, 64, 32) if c % span == 0), 32)
    spans = [t for t in TILINGS.values() if t.block_k == span or (span == 128 and t.block_k == 64)]
    narrow = [t.name for t in spans if t.block_n == 64]
    wide = [t.name for t in spans if t.block_n > 64]
    return [*narrow, *wide] if channels <= 64 else [*wide, *narrow]


def _product(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    out: Tensor,
    passes: list[tuple[Taps, Taps]],
    bias: Tensor | None,
    fast_accum: bool,
) -> Tensor:
    """All passes over a [N, IH, IW, I] and b [O, R, S, I] into out [N, OH, OW, O]."""
    check_kinds(a, b)
    a, b = a.contiguous(), b.contiguous()
    reached = [(height, width) for height, width in passes if height.taps and width.taps]
    if len(reached) < len(passes):
        out.zero_()
    names = [] if forced() == "ref" or not a.is_cuda else tiling_names(len(b), a.shape[3], b[0].numel(), a)
    if not names or not out.numel():
        for taps in reached:
            gather_mm_ref(a, b, *scales, out, taps, bias)
        return out

    def run(name: str) -> None:
        for taps in reached:
            launch_gather_mm(a, b, *scales, out, taps, TILINGS[name], bias=bias, fast_accum=fast_accum)

    sizes = (*a.shape, *out.shape[1:], *b.shape[1:3], len(passes), a.dtype)
    run(choose("conv_gather", sizes, names, run))
    return out


def _empty_output(x, shape, out_dtype):
    s = ConvShape(*shape)
    return x.new_empty(s.n, s.p, s.q, s.k, dtype=out_dtype)


@operator("conv_output", fake=_empty_output)
def conv_output(
    x: Tensor,
    w: Tensor,
    scale_x: Tensor,
    scale_w: Tensor,
    shape: list[int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """y [N, P, Q, K] in out_dtype, of codes x [N, H, W, C] and w [K, R, S, C], both int8 or both FP8, in any shape that
    has these elements in this order. scale_x fp32 [1] or [N]; scale_w fp32 [1] or [K]; bias [K]; shape: a
    `ConvShape`."""
    s = ConvShape(*shape)
    x, w, out = x.reshape(s.n, s.h, s.w, s.c), w.reshape(s.k, s.r, s.s, s.c), _empty_output(x, shape, out_dtype)
    passes = [(s.height.forward(), s.width.forward())]
    return _product(x, w, (scale_x, scale_w), out, passes, bias, fast_accum)


def _empty_grad_input(dy, shape, out_dtype):
    s = ConvShape(*shape)
    return dy.new_empty(s.n, s.h, s.w, s.c, dtype=out_dtype)


@operator("conv_grad_input", fake=_empty_grad_input)
def conv_grad_input(
    dy: Tensor,
    w: Tensor,
    scale_dy: Tensor,
    scale_w: Tensor,
    shape: list[int],
    out_dtype: torch.dtype,
    fast_accum: bool = True,
) -> Tensor:
    """dx [N, H, W, C] in out_dtype, of codes dy [N, P, Q, K] and w [C, R, S, K], as `conv_output` takes them. scale_dy
    fp32 [1] or [N]; scale_w fp32 [1] or [C]."""
    s = ConvShape(*shape)
    dy, w, out = dy.reshape(s.n, s.p, s.q, s.k), w.reshape(s.c, s.r, s.s, s.k), _empty_grad_input(dy, shape, out_dtype)
    passes = [(height, width) for height in s.height.backward() for width in s.width.backward()]
    return _product(dy, w, (scale_dy, scale_w), out, passes, None, fast_accum)
