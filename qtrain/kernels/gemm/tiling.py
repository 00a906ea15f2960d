"""The frame of the persistent matrix products: how the output is cut into tiles, walked over, and stored.

One program a multiprocessor walks over the output's tiles, in groups of rows of tiles so that operands stay in L2; the
loads (TMA descriptors) of its next tile start under the epilogue of this one.
"""

import functools
from dataclasses import dataclass

import torch

from qtrain.kernels.compiler import tl, triton


@dataclass(frozen=True)
class Tiling:
    """How a product is cut: a tile of the output, the slice of K that is loaded at once, and who works on it."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    subtiles: int = 2
    """Pieces that a tile is stored in: the whole of it in shared memory would cost a stage of the pipeline."""
    per_sm: int = 1
    """Programs a multiprocessor: with two, one multiplies while the other stores, which short sums want."""
    split: bool = False
    """Whether the tiles of a last wave that is not full are cut along K (`split_k.py`)."""

    @property
    def name(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        two = f" x{self.per_sm}" if self.per_sm > 1 else ""
        split = " split" if self.split else ""
        return f"triton {tile} w{self.warps} s{self.stages} g{self.group_m} e{self.subtiles}{two}{split}"


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Number of a tile -> its row and column, walking down groups of GROUP_M rows."""
    group_size = GROUP_M * tiles_n
    first_m = tile // group_size * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def scale_tile(
    total, row, column, scale_a_ptr, scale_b_ptr, bias_ptr, m, n,
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Sums of products of codes, a tile at (row, column) -> fp32: times the scales, one a row or one for all."""
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
    if BIAS:
        out += tl.load(bias_ptr + columns, columns < n, 0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def store_columns(c_desc, out, row, column, PIECES: tl.constexpr, ADD: tl.constexpr):
    """Store a tile [BLOCK_M, BLOCK_N] in PIECES (1, 2 or 4) of its columns, or add it to what is there."""
    BLOCK_M: tl.constexpr = out.shape[0]
    BLOCK_N: tl.constexpr = out.shape[1]
    if PIECES == 1:
        if ADD:
            out += c_desc.load([row, column]).to(tl.float32)
        c_desc.store([row, column], out.to(c_desc.dtype))
    else:
        left, right = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store_columns(c_desc, left, row, column, PIECES // 2, ADD)
        store_columns(c_desc, right, row, column + BLOCK_N // 2, PIECES // 2, ADD)


@functools.cache
def sm_count(device: torch.device) -> int:
    """How many programs a persistent kernel starts; 2 in the interpreter, so that each still walks several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
