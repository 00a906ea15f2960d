"""The frame of the GEMMs of codes, and the persistent kernel that INT8, FP8 and FP16 share: out = A · Bᵀ.

Operands: Hopper's 8-bit tensor cores read both K-major only. An operand that is stored the other way is transposed by
a kernel first (`k_major`), at 2 bytes per element: coalesced accesses of 16 bytes per thread on both sides, the
transposition in shared memory.

Tiles: each CTA of a persistent kernel loops over output tiles, in groups of rows of tiles so that operands stay in the
L2 cache; the loads (TMA descriptors) of its next tile overlap with the epilogue of this one. INT8 accumulates in int32,
exactly; FP8 in fp32, or in what the tensor cores keep of it (fast accumulation); FP16 in FP16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.compiler import TensorDescriptor, operator, tl, triton


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


def by_name(*tilings: Tiling) -> dict[str, Tiling]:
    """A dispatch's candidates, in this order."""
    return {tiling.name: tiling for tiling in tilings}


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Index of a tile -> its row and column, down groups of GROUP_M rows."""
    # Down GROUP_M rows before the next column: the CTAs of a wave read few rows of A and few of B, which stay in L2.
    group_size = GROUP_M * tiles_n
    first_m = tile // group_size * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)  # the last group may have fewer
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def scale_tile(total, row, column, epilogue_ptrs, sizes, ROWS: tl.constexpr):
    """The epilogue: sums of products of codes, a tile at (row, column) -> fp32, times the scales, plus the bias [n] if
    there is one. epilogue_ptrs: scales of A and of B, and the bias or None; sizes: (m, n). ROWS: whether A, and whether
    B, has a scale per row, or one for all."""
    scale_a_ptr, scale_b_ptr, bias_ptr = epilogue_ptrs
    m, n = sizes
    rows, columns = row + tl.arange(0, total.shape[0]), column + tl.arange(0, total.shape[1])
    out = total.to(tl.float32)  # exact for int32 sums below 2**24, else rounded once
    if ROWS[0]:
        out *= tl.load(scale_a_ptr + rows, rows < m, 0.0)[:, None]
    else:
        out *= tl.load(scale_a_ptr)
    if ROWS[1]:
        out *= tl.load(scale_b_ptr + columns, columns < n, 0.0)[None, :]
    else:
        out *= tl.load(scale_b_ptr)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, columns < n, 0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def store_tile(c_desc, out, row, column, SUBTILES: tl.constexpr, group=None, ADD: tl.constexpr = False):
    """Stores a tile [BLOCK_M, BLOCK_N] in SUBTILES (1, 2 or 4) slices of its columns. group: of a descriptor of many
    matrices, in blocks [1, BLOCK_M, BLOCK_N / SUBTILES]. ADD: adds an fp32 tile to what is there; of one matrix."""
    BLOCK_M: tl.constexpr = out.shape[0]
    BLOCK_N: tl.constexpr = out.shape[1]
    if SUBTILES == 1:
        if group is None:
            if ADD:
                out += c_desc.load([row, column]).to(tl.float32)
            c_desc.store([row, column], out.to(c_desc.dtype))
        else:
            c_desc.store([group, row, column], tl.reshape(out.to(c_desc.dtype), (1, BLOCK_M, BLOCK_N)))
    else:
        # split halves the last axis: [BLOCK_M, 2, BLOCK_N / 2] -> [BLOCK_M, BLOCK_N / 2, 2].
        left, right = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store_tile(c_desc, left, row, column, SUBTILES // 2, group, ADD)
        store_tile(c_desc, right, row, column + BLOCK_N // 2, SUBTILES // 2, group, ADD)


@triton.jit
def scale_and_store(
    c_desc, total, row, column, epilogue_ptrs, sizes, ROWS: tl.constexpr, SUBTILES: tl.constexpr, group=None
):
    """`store_tile` of a tile of accumulators, after `scale_tile` where there are scales."""
    if epilogue_ptrs[0] is not None:
        out = scale_tile(total, row, column, epilogue_ptrs, sizes, ROWS)
        store_tile(c_desc, out, row, column, SUBTILES, group)
    else:
        store_tile(c_desc, total, row, column, SUBTILES, group)


@triton.jit
def add_low_rank(out, row, column, low_rank_ptrs, sizes, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_N] at (row, column), fp32, plus its part of L · Rᵀ. low_rank_ptrs: L [m, RANK] and
    R [n, RANK], contiguous; sizes: (m, n). BLOCK_R: the next power of two, at least 16 as `tl.dot` wants."""
    left_ptr, right_ptr = low_rank_ptrs
    m, n = sizes
    rows, columns = row + tl.arange(0, out.shape[0]), column + tl.arange(0, out.shape[1])
    ranks = tl.arange(0, BLOCK_R)
    inside = (ranks < RANK)[None, :]
    left = tl.load(left_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :], (rows < m)[:, None] & inside, 0.0)
    right = tl.load(right_ptr + columns[:, None] * RANK + ranks[None, :], (columns < n)[:, None] & inside, 0.0)
    return tl.dot(left, right.T, out)


@triton.jit(do_not_specialize=["tiles"])  # one binary for all shapes: descriptors do the addressing
def _persistent_mm_kernel(
    # TMA descriptors of A [m, k] and B [n, k], int8, fp8 or fp16, K-major, in blocks [BLOCK_M or BLOCK_N, BLOCK_K]; and
    # of the output [m, n], in blocks [BLOCK_M, BLOCK_N / SUBTILES]. Reads outside give zeros, writes are dropped.
    a_desc, b_desc, c_desc,
    # Scales fp32 [m] or [1], [n] or [1]; None: stores the accumulators. Bias of any float dtype [n], or None.
    epilogue_ptrs,
    # L [m, RANK] and R [n, RANK] of a 16-bit float dtype, whose product is added to what is scaled; or None.
    low_rank_ptrs,
    # Only the first so many tiles are computed: the rest is left to split-K. TILING: a `Tiling`.
    tiles, PROGRAMS: tl.constexpr, TILING: tl.constexpr,
    # max_num_imprecise_acc of FP8: block_k adds every step to an fp32 total outside the tensor cores.
    IMPRECISE: tl.constexpr,
    # As for `scale_tile`, and for `add_low_rank`.
    ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    # Whether what is scaled is added to the output.
    ADD: tl.constexpr,
):  # fmt: skip
    """PROGRAMS CTAs stay resident and take every PROGRAMS-th tile. flatten: tiles and steps of K become one loop, so
    that the loads of the next tile's first stages overlap with this tile's epilogue."""
    m, n, k = a_desc.shape[0], b_desc.shape[0], a_desc.shape[1]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    dtype: tl.constexpr = a_desc.dtype
    DTYPE: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float16 if dtype == tl.float16 else tl.float32
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, TILING.group_m)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        for start in range(0, k, TILING.block_k):
            a = a_desc.load([row, start])
            b = b_desc.load([column, start])
            total = tl.dot(a, b.T, total, out_dtype=DTYPE, max_num_imprecise_acc=IMPRECISE)
        # None is a constexpr: one of the three epilogues is compiled.
        if ADD:
            out = scale_tile(total, row, column, epilogue_ptrs, (m, n), ROWS)
            store_tile(c_desc, out, row, column, TILING.subtiles, None, True)
        elif low_rank_ptrs is None:
            scale_and_store(c_desc, total, row, column, epilogue_ptrs, (m, n), ROWS, TILING.subtiles)
        else:
            out = scale_tile(total, row, column, epilogue_ptrs, (m, n), ROWS)
            out = add_low_rank(out, row, column, low_rank_ptrs, (m, n), RANK, BLOCK_R)
            store_tile(c_desc, out, row, column, TILING.subtiles)


def launch_persistent_mm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tiling: Tiling,
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
    tiles: int | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    add: bool = False,
) -> Tensor:
    """A [M, K] · B [N, K]ᵀ into `out` [M, N]; none empty, rows contiguous, at multiples of 16 bytes.

    scales: fp32 [M] or [1] and [N] or [1]; None: `out` has the accumulators' dtype. bias [N] is added to what is
    scaled, and the product L · Rᵀ of low_rank, L [M, r] and R [N, r]. tiles: computes only the first ones; None: all.
    add: adds what is scaled to `out`; without low_rank.
    """
    assert not add or (scales is not None and low_rank is None)
    m, n, t = a.shape[0], b.shape[0], tiling
    rank = low_rank[0].shape[1] if low_rank else 0
    if tiles is None:
        tiles = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n)
    programs = min(t.per_sm * sm_count(a.device), tiles)  # all resident at once
    _persistent_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // t.subtiles]),
        (*(scales or (None, None)), bias), low_rank, tiles, PROGRAMS=programs,
        TILING=t, IMPRECISE=imprecise(a, t, fast_accum), ROWS=scales_rows(scales),
        RANK=rank, BLOCK_R=max(16, triton.next_power_of_2(rank)), ADD=add, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


def imprecise(a: Tensor, t: Tiling, fast_accum: bool) -> int | None:
    """max_num_imprecise_acc: of FP8 alone."""
    return t.block_k if a.dtype.itemsize == 1 and a.dtype != torch.int8 and not fast_accum else None


def scales_rows(scales: tuple[Tensor, Tensor] | None) -> tuple[bool, bool]:
    """ROWS of `scale_tile`: one scale of a tensor is a scalar load; one per row a vector."""
    return (scales[0].numel() > 1, scales[1].numel() > 1) if scales else (False, False)


BLOCK = 128


def transpose_8bit_ref(x: Tensor) -> Tensor:
    """x [R, C] of any one-byte dtype -> [C, R] contiguous, the same bits."""
    return x.t().clone(memory_format=torch.contiguous_format)


@triton.jit
def _transpose_8bit_kernel(x_ptr, out_ptr, rows, columns, stride, BLOCK: tl.constexpr):
    # A tile's row is 128 bytes, one cache line, on both sides.
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    # int64: codes of logits may have more than 2**31 elements.
    column = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x_ptr + row[:, None] * stride + column[None, :], inside)
    tl.store(out_ptr + column[:, None] * rows + row[None, :], tile.T, inside.T)


def launch_transpose_8bit(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The kernel for `transpose_8bit_ref`; rows of x are contiguous. out: memory for the result, contiguous."""
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel():
        grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK))
        bits = x.view(torch.uint8)
        _transpose_8bit_kernel[grid](bits, out.view(torch.uint8), rows, columns, x.stride(0), BLOCK, num_warps=8)
    return out


@operator("transpose_8bit", fake=lambda x: x.new_empty(x.shape[1], x.shape[0]))
def transpose_8bit(x: Tensor, after: Tensor | None = None) -> Tensor:
    """x [R, C] of int8, uint8 or an 8-bit float -> contiguous [C, R]. TypeError for wider elements. after: not read,
    see `gemm_table._other_layout`."""
    if x.dtype.itemsize != 1:
        raise TypeError(f"transpose_8bit takes elements of one byte, not {x.dtype}")
    if not x.is_cuda or x.t().is_contiguous():  # the latter is a plain copy
        return transpose_8bit_ref(x)
    return launch_transpose_8bit(x.contiguous())


def transpose_8bit_into(out: Tensor, x: Tensor) -> None:
    """`transpose_8bit` of x [R, C] into out [C, R], both contiguous. Not for compiled code."""
    if x.is_cuda:
        launch_transpose_8bit(x, out)
    else:
        out.copy_(x.t())


TMA_BYTES = 16
"""A TMA descriptor takes strides in multiples of it."""


def padded_k(x: Tensor) -> Tensor:
    """An operand [R, K] of one-byte codes whose rows are at multiples of TMA_BYTES: x itself, or a copy with zeros at
    the end of each row, which add nothing to a product. Else the token counts that are no multiples of 16 would keep a
    weight's gradient from every kernel."""
    missing = -x.shape[1] % TMA_BYTES
    return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) if missing else x


def k_major(x: Tensor) -> Tensor:
    """An operand [R, K] of one-byte elements with contiguous rows: x itself, or a copy."""
    if x.is_contiguous():
        return x
    return transpose_8bit(x.t()) if x.t().is_contiguous() else x.contiguous()
