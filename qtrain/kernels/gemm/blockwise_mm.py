"""GEMM of 8-bit codes with blockwise scales: each block of K is scaled on its own.

A [M, K] and B [N, K] are INT8 or FP8 codes. A block is 1x128 (128 neighbors of a row), 128x128 or 32x32; scales are
fp32 [rows / block rows, K / block columns], any strides. DeepSeek-V3 multiplies 1x128 activations with 128x128 weights,
and for the weight's gradient 1x128 with 1x128 (arXiv:2412.19437); Jetfire has 32x32 INT8 blocks (arXiv:2403.12422).

A block's partial product comes from the tensor cores with a fresh accumulator and is added, times both scales, to an
fp32 total: FP8's short accumulator never sums more than a block. The cost is registers, one set for the total and one
for the partial product: tiles are small, and two CTAs share an SM, so that one multiplies while the other adds. On
Hopper `blockwise_wgmma.py` has the warps of one CTA do that, with tiles twice as wide. cuBLAS is one more candidate
(e4m3 with 1x128 blocks of A, bf16 out): the dispatch times them all. On an H200 the Hopper kernel is the fastest with
128x128 blocks of B, and cuBLAS for most shapes with 1x128.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.hardware.capabilities import has_fp8, sm_count
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import TensorDescriptor, operator, tl, triton
from qtrain.kernels.gemm.blockwise_wgmma import WGMMA_TILINGS, WgmmaTiling, launch_blockwise_wgmma, supports_wgmma
from qtrain.kernels.gemm.persistent import k_major, padded_k, tile_of
from qtrain.kernels.numerics.formats import GRANULARITIES, expand_scale

BLOCKS: dict[str, tuple[int, int]] = {name: GRANULARITIES[name] for name in ("1x128", "128x128", "32x32")}
"""Rows and K of the blocks that share a scale."""


# ---- definition ------------------------------------------------------------------------------------------------------


def blockwise_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """A [M, K], B [N, K], both int8 or both fp8, with a scale for each of their blocks -> [M, N]."""
    if torch.are_deterministic_algorithms_enabled():
        total = _sum_blocks(a, b, scale_a, scale_b, block_a, block_b)
        return (total if bias is None else total + bias.float()).to(out_dtype)
    # Every product is scaled, which the kernel does once per block: sums differ by fp32 rounding only.
    values_a = a.float() * expand_scale(scale_a, block_a, a.shape)  # fp32 [M, K]
    values_b = b.float() * expand_scale(scale_b, block_b, b.shape)  # fp32 [N, K]
    total = values_a @ values_b.t()  # fp32 [M, N]
    return (total if bias is None else total + bias.float()).to(out_dtype)


def _sum_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, block_a: str, block_b: str) -> Tensor:
    """The sum over blocks of K as the kernel adds it, [M, N] in fp32; exact within a block, so that no row depends on
    how many there are (`fp8_mm_ref`)."""
    (rows_a, width), (rows_b, _) = BLOCKS[block_a], BLOCKS[block_b]
    total = torch.zeros(len(a), len(b), device=a.device)
    for i, (x, y) in enumerate(zip(a.split(width, dim=1), b.split(width, dim=1), strict=True)):
        scales = [
            scale[:, i].repeat_interleave(rows)[:size]
            for scale, rows, size in ((scale_a, rows_a, len(a)), (scale_b, rows_b, len(b)))
        ]
        total += (x.double() @ y.double().t()).float() * (scales[0][:, None] * scales[1][None])
    return total


# ---- kernel ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockwiseTiling:
    """A configuration of the kernel; a step along K is a block of the scales."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    per_sm: int = 1
    group_m: int = 8

    @property
    def name(self) -> str:
        two = f" x{self.per_sm}" if self.per_sm > 1 else ""
        return f"triton {self.block_m}x{self.block_n} w{self.warps} s{self.stages} g{self.group_m}{two}"


@triton.jit
def to_float(partial, INT8: tl.constexpr):
    if INT8:  # |partial| <= 127 * 127 * 128 < 2**22: added to the bits of 1.5 * 2**23, cheaper than a conversion
        return (partial + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    else:
        return partial


@triton.jit
def load_scale_b(ptr, first, n, stride, BLOCK_N: tl.constexpr, ROWS_B: tl.constexpr):
    """Scales of BLOCK_N rows of B at one step of K: [1] if they share one, otherwise [BLOCK_N]."""
    if ROWS_B % BLOCK_N == 0:  # a tile's rows are within one block: one load for the tile
        index = first + tl.arange(0, 1)
    else:
        index = first + tl.arange(0, BLOCK_N)
    return tl.load(ptr + index // ROWS_B * stride, index < n, 0.0)


@triton.jit
def add_block(total, a, b, scale_a, scale_b, INT8: tl.constexpr):
    """total + A · Bᵀ of one block of K, times both scales."""
    # A fresh accumulator per block: FP8's own accumulator, of about 14 bits of mantissa, never sums more than one.
    partial = to_float(tl.dot(a, b.T, out_dtype=tl.int32 if INT8 else tl.float32), INT8)
    # scale_b is [1] or [BLOCK_N]: either broadcasts over the tile [BLOCK_M, BLOCK_N].
    return total + partial * (scale_a[:, None] * scale_b[None, :])


_SIZES = ["m", "n", "k", "a_row_stride", "a_k_stride", "b_row_stride", "b_k_stride"]


@triton.jit(do_not_specialize=_SIZES)  # one binary for all shapes: descriptors do the addressing
def _blockwise_mm_kernel(
    # TMA descriptors of A [m, k] and B [n, k], 8-bit codes, K-major, in blocks [BLOCK_M or BLOCK_N, BLOCK_K]; and of
    # the output [m, n].
    a_desc, b_desc, c_desc,
    # fp32 [m / ROWS_A, k / BLOCK_K] and [n / ROWS_B, k / BLOCK_K], of any strides; bias [n], or None.
    scale_a_ptr, scale_b_ptr, bias_ptr, m, n, k,
    a_row_stride, a_k_stride, b_row_stride, b_k_stride,
    PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    # Rows that share a scale: 1, 32 or 128. A step along K is a block of both operands' scales.
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        scale_a_row = scale_a_ptr + rows // ROWS_A * a_row_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, steps):
            # Loaded before the codes: both arrive while the tensor cores multiply.
            scale_a = tl.load(scale_a_row + step * a_k_stride, rows < m, 0.0)  # [BLOCK_M] fp32
            scale_b = load_scale_b(scale_b_ptr + step * b_k_stride, column, n, b_row_stride, BLOCK_N, ROWS_B)
            a, b = a_desc.load([row, step * BLOCK_K]), b_desc.load([column, step * BLOCK_K])
            total = add_block(total, a, b, scale_a, scale_b, INT8)
        if bias_ptr is not None:
            columns = column + tl.arange(0, BLOCK_N)
            total += tl.load(bias_ptr + columns, columns < n, 0.0).to(tl.float32)[None, :]
        c_desc.store([row, column], total.to(c_desc.dtype))


def launch_blockwise_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    out: Tensor,
    tiling: BlockwiseTiling | WgmmaTiling,
    bias: Tensor | None = None,
) -> Tensor:
    """The kernel for `blockwise_mm_ref` into `out`. K in multiples of 16, rows of `out` in multiples of 16 bytes; for a
    WgmmaTiling as `supports_wgmma` says."""
    (m, k), n = a.shape, b.shape[0]
    if isinstance(tiling, WgmmaTiling):
        vector_b = block_b == "1x128"
        return launch_blockwise_wgmma(a, b, scale_a, scale_b, out, tiling, (m, n, k, 1), vector_b, bias=bias)
    t = tiling
    (rows_a, block_k), (rows_b, _) = BLOCKS[block_a], BLOCKS[block_b]
    tiles = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n)
    programs = min(t.per_sm * sm_count(a.device), tiles)  # where two fit on an SM, one multiplies while one adds
    _blockwise_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n]),
        scale_a, scale_b, bias, m, n, k, *scale_a.stride(), *scale_b.stride(),
        PROGRAMS=programs, GROUP_M=t.group_m, BLOCK_M=t.block_m, BLOCK_N=t.block_n, BLOCK_K=block_k,
        ROWS_A=rows_a, ROWS_B=rows_b, INT8=a.dtype == torch.int8,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


# ---- dispatch --------------------------------------------------------------------------------------------------------

_TILINGS = [BlockwiseTiling(128, 64, 4, 3, 2), BlockwiseTiling(64, 128, 4, 3, 2), BlockwiseTiling(128, 128, 8, 3)]
Tilings = dict[str, BlockwiseTiling | WgmmaTiling]
TILINGS: Tilings = {tiling.name: tiling for tiling in _TILINGS}
ALL_TILINGS: Tilings = {**WGMMA_TILINGS, **TILINGS}


def tilings_for(a: Tensor, b: Tensor, scale_b: Tensor, block_a: str, block_b: str, out_dtype: torch.dtype) -> Tilings:
    """The kernels that take these operands, the best in general first, by name."""
    return ALL_TILINGS if supports_wgmma(a, b, scale_b, block_a, block_b, out_dtype) else TILINGS


def blockwise_mm_names(
    a: Tensor, b: Tensor, scale_b: Tensor, block_a: str, block_b: str, out_dtype: torch.dtype
) -> list[str]:
    """The implementations that can take these operands, K-major on a GPU, the best in general first."""
    k, n = a.shape[1], b.shape[0]
    aligned = k % 16 == 0 and n * out_dtype.itemsize % 16 == 0  # TMA descriptors take strides in multiples of 16 bytes
    if not aligned or (a.dtype != torch.int8 and a.is_cuda and not has_fp8(a.device)):
        return []
    names = list(tilings_for(a, b, scale_b, block_a, block_b, out_dtype))
    if a.dtype == b.dtype == torch.float8_e4m3fn and out_dtype == torch.bfloat16 and block_a == "1x128":
        names += ["cublas"] if k % 128 == 0 and n % 128 == 0 and block_b != "32x32" else []
    return names


def _blockwise_mm_cublas(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, block_b: str, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """cuBLAS reads the scales of 1x128 blocks column-major, and those of 128x128 blocks with K / 128 padded to 4."""
    from torch.nn.functional import ScalingType, scaled_mm

    # A is always 1x128 here; its scales column-major, strides (1, M).
    recipe_b = ScalingType.BlockWise128x128 if block_b == "128x128" else ScalingType.BlockWise1x128
    if block_b == "128x128":
        scale_b = _padded_to_4(scale_b).t()
    else:
        scale_b = _column_major(scale_b)
    scale_a = _column_major(scale_a)
    return scaled_mm(
        a, b.t(), scale_a, ScalingType.BlockWise1x128, scale_b, recipe_b, bias=bias, output_dtype=out_dtype
    )


def _padded_to_4(scale: Tensor) -> Tensor:
    """[rows, blocks] with blocks padded to a multiple of 4; scales of our quantizers are, and are not copied."""
    (rows, blocks), width = scale.shape, -(-scale.shape[1] // 4) * 4
    if scale.stride() == (width, 1):
        # The quantizers allocate rows of `width`: the view only makes the padding visible.
        return scale.as_strided((rows, width), (width, 1))
    return F.pad(scale, (0, width - blocks))


def _column_major(scale: Tensor) -> Tensor:
    """[rows, blocks] in column-major order; scales of our quantizers are, and are not copied."""
    return scale if scale.stride() == (1, scale.shape[0]) else scale.t().contiguous().t()


def check_blocks(block_a: str, block_b: str) -> None:
    if BLOCKS[block_a][1] != BLOCKS[block_b][1]:
        raise ValueError(f"blocks {block_a} and {block_b} cut K differently")


@operator("blockwise_mm", fake=lambda a, b, out_dtype: a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype))
def blockwise_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    block_a: str,
    block_b: str,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """A [M, K] · B [N, K]ᵀ, each block of each operand times its scale, + bias -> [M, N] in out_dtype.

    block_a, block_b: "1x128" or "128x128" in any combination, or both "32x32".
    """
    check_blocks(block_a, block_b)
    a, b = k_major(a), k_major(b)
    m, n = a.shape[0], b.shape[0]
    if not (a.is_cuda and a.numel() and n) or forced() == "ref":
        return blockwise_mm_ref(a, b, scale_a, scale_b, block_a, block_b, out_dtype, bias)
    a, b = padded_k(a), padded_k(b)
    names = blockwise_mm_names(a, b, scale_b, block_a, block_b, out_dtype)
    if not names:
        return blockwise_mm_ref(a, b, scale_a, scale_b, block_a, block_b, out_dtype, bias)

    def run(name: str) -> Tensor:
        if name == "cublas":
            return _blockwise_mm_cublas(a, b, scale_a, scale_b, block_b, out_dtype, bias)
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
        return launch_blockwise_mm(a, b, scale_a, scale_b, block_a, block_b, out, ALL_TILINGS[name], bias)

    key = (m, n, a.shape[1], a.dtype, b.dtype, block_a, block_b, out_dtype)
    return run(choose("blockwise_mm", key, names, run))
