"""The frame of the persistent GEMMs: how the output is cut into tiles, in which order they are computed, and stored.

Each CTA of a persistent kernel loops over output tiles, in groups of rows of tiles so that operands stay in the L2
cache; the loads (TMA descriptors) of its next tile overlap with the epilogue of this one.
"""

from dataclasses import dataclass

from qtrain.kernels.compiler import tl, triton


@dataclass(frozen=True)
class Tiling:
    """A configuration of a GEMM kernel: the output tile, the K per pipeline stage, warps, stages."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    subtiles: int = 2
    """A tile is stored in this many slices of columns: the whole of it in shared memory would cost a pipeline stage."""
    per_sm: int = 1
    """CTAs per SM: with two, one multiplies while the other stores, which pays for short K."""
    split: bool = False
    """Whether the tiles of a partial last wave are split along K (`split_k.py`)."""

    @property
    def name(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        two = f" x{self.per_sm}" if self.per_sm > 1 else ""
        split = " split" if self.split else ""
        return f"triton {tile} w{self.warps} s{self.stages} g{self.group_m} e{self.subtiles}{two}{split}"


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Index of a tile -> its row and column, down groups of GROUP_M rows."""
    group_size = GROUP_M * tiles_n
    first_m = tile // group_size * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def scale_tile(
    total, row, column, scale_a_ptr, scale_b_ptr, bias_ptr, m, n, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr
):
    """The epilogue: sums of products of codes, a tile at (row, column) -> fp32, times the scales, plus the bias [n] if
    bias_ptr is not None. ROWS_A, ROWS_B: a scale per row of the operand, or one for all."""
    rows, columns = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    out = total.to(tl.float32)
    if ROWS_A:
        out *= tl.load(scale_a_ptr + rows, rows < m, 0.0)[:, None]
    else:
        out *= tl.load(scale_a_ptr)
    if ROWS_B:
        out *= tl.load(scale_b_ptr + columns, columns < n, 0.0)[None, :]
    else:
        out *= tl.load(scale_b_ptr)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, columns < n, 0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def store_tile(c_desc, out, row, column, SUBTILES: tl.constexpr):
    """Stores a tile [BLOCK_M, BLOCK_N] in SUBTILES (1, 2 or 4) slices of its columns."""
    BLOCK_M: tl.constexpr = out.shape[0]
    BLOCK_N: tl.constexpr = out.shape[1]
    if SUBTILES == 1:
        c_desc.store([row, column], out.to(c_desc.dtype))
    else:
        left, right = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store_tile(c_desc, left, row, column, SUBTILES // 2)
        store_tile(c_desc, right, row, column + BLOCK_N // 2, SUBTILES // 2)
