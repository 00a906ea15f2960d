"""The products of `scaled_mm.py`, `low_rank_mm.py` and `add_scaled_mm.py`, warp-specialized for Hopper
(`wgmma_product.py`): out = (A · Bᵀ) * scale_a * scale_b (+ bias) (+ L · Rᵀ), or out += the same.

In the epilogue of a tile a warpgroup scales its sums in registers. The tensor cores add L · Rᵀ to them: L [64, r] from
registers, R [256, r] from shared memory, which each warpgroup fills for itself, loaded before the last step's products
have ended. Then 64 columns at a time are exchanged through shared memory and stored 16 bytes a thread. What is added
to takes the same way in.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_wgmma, sm_count
from qtrain.kernels.compiler import gl, gluon, hopper, triton
from qtrain.kernels.gemm.persistent import TMA_BYTES, scales_rows
from qtrain.kernels.gemm.wgmma_product import (
    ProductTiling,
    allocate_stages,
    await_start,
    last_sums,
    load_steps,
    multiply_tile,
)
from qtrain.kernels.gemm.wgmma_schedule import (
    REGISTERS,
    REGISTERS_AT_LAUNCH,
    REGISTERS_OF_LOADS,
    count_tiles,
    descriptor,
    find_tile,
    free_stages,
)

SCALED_TILINGS = {t.name: t for t in (ProductTiling(4, 16), ProductTiling(4, staggered=False))}
LOW_RANK_TILINGS = {t.name: t for t in (ProductTiling(4), ProductTiling(3))}
"""Three stages leave room for R of a rank above 16."""
LEAST_M, LEAST_N = 128, 256
"""M and N are multiples of these."""


def supports_scaled_wgmma(a: Tensor, b: Tensor, out_dtype: torch.dtype, fast_accum: bool = True) -> bool:
    """Whether the kernel takes these operands, contiguous, of 8 bits; it does not promote FP8's sums."""
    if not fast_accum and a.dtype != torch.int8:
        return False
    sizes = a.shape[0] % LEAST_M == b.shape[0] % LEAST_N == a.shape[1] % TMA_BYTES == 0
    return sizes and a.numel() > 0 and out_dtype.itemsize == 2 and has_wgmma(a.device)


@gluon.jit
def _scaled(sums, row, column, epilogue_ptrs, ROWS: gl.constexpr):
    """Sums [64, 128] at (row, column) -> fp32, times the scales, plus the bias; as `persistent.scale_tile`."""
    scale_a_ptr, scale_b_ptr, bias_ptr = epilogue_ptrs
    LAYOUT: gl.constexpr = sums.type.layout
    columns = column + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    out = sums.to(gl.float32)
    if ROWS[0]:
        out *= gl.expand_dims(gl.load(scale_a_ptr + row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))), 1)
    else:
        out *= gl.load(scale_a_ptr)
    if ROWS[1]:
        out *= gl.expand_dims(gl.load(scale_b_ptr + columns), 0)
    else:
        out *= gl.load(scale_b_ptr)
    if bias_ptr is not None:
        out += gl.expand_dims(gl.load(bias_ptr + columns).to(gl.float32), 0)
    return out


@gluon.jit
def _load_rank(ptr, row, ROWS: gl.constexpr, RANK: gl.constexpr, BLOCK_R: gl.constexpr):
    """Rows of L or R [*, RANK] from `row` on, [ROWS, BLOCK_R], with zeros beyond RANK."""
    PER_ROW: gl.constexpr = BLOCK_R // 8  # threads, each of 16 bytes
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // PER_ROW, PER_ROW], [4, 1], [1, 0])
    rows = row + gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    ranks = gl.expand_dims(gl.arange(0, BLOCK_R, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(ptr + rows.to(gl.int64) * RANK + ranks, (rows >= 0) & (ranks < RANK), 0.0)


@gluon.jit
def _quarters(left, right):
    """[64, 128] twice -> four times [64, 64], in this order."""
    a, b = gl.split(gl.permute(gl.reshape(left, (64, 2, 64)), (0, 2, 1)))
    c, d = gl.split(gl.permute(gl.reshape(right, (64, 2, 64)), (0, 2, 1)))
    return a, b, c, d


@gluon.jit
def _store(out_ptr, sums, row, column, n, ADD: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 [64, 64] at (row, column) of the output [*, n]. ADD: to what is there."""
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    at = out_ptr + row.to(gl.int64) * n + column
    pointers = at + gl.expand_dims(rows, 1) * n + gl.expand_dims(columns, 0)
    if ADD:  # while this warpgroup waits for the load, the other one has the tensor cores
        sums += gl.convert_layout(gl.load(pointers), sums.type.layout).to(gl.float32)
    gl.store(pointers, gl.convert_layout(sums.to(out_ptr.dtype.element_ty), LAYOUT))


@gluon.jit
def _multiply(
    common, out_ptr, epilogue_ptrs, low_rank, HALF: gl.constexpr, ROWS: gl.constexpr, RANK: gl.constexpr,
    BLOCK_R: gl.constexpr, ADD: gl.constexpr, GROUP_M: gl.constexpr, STAGGERED: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the upper (HALF = 0) or the lower 64 rows of every tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    # The same places, of a product whose instruction takes 16 columns of K, not 32.
    SUMS_16: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    FACTORS: gl.constexpr = gl.DotOperandLayout(0, SUMS_16, 2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 8], [4, 8], [4, 1], [1, 0])
    buffers, sizes = common[1], common[3]
    n = sizes[1]
    left_ptr, right_ptr, right_buffer = low_rank
    DTYPE: gl.constexpr = gl.int32 if buffers[0].dtype == gl.int8 else gl.float32
    tiles, tiles_m, tiles_n = count_tiles(sizes, (None, None), "", 256)
    left, right = gl.zeros((64, 128), DTYPE, SUMS), gl.zeros((64, 128), DTYPE, SUMS)
    free_stages(buffers[0].shape[0])
    await_start(tiles, HALF, STAGGERED)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, row, column, first, end = find_tile(tile, tiles_m, tiles_n, sizes, (None, None), "", 256, GROUP_M)
        row += 64 * HALF
        sums, ring, steps = (left, right), (stage, phase), (first, end)
        is_first = tile == gl.program_id(0)
        left, right, stage, phase, before = multiply_tile(common, sums, ring, steps, is_first, HALF, STAGGERED)
        if RANK > 0:
            factors = _load_rank(left_ptr, row, 64, RANK, BLOCK_R)
            right_buffer.store(_load_rank(right_ptr, column, 256, RANK, BLOCK_R))
            factors = gl.convert_layout(factors, FACTORS)
        left, right = last_sums(left, right, before)
        out_left = _scaled(left, row, column, epilogue_ptrs, ROWS)
        out_right = _scaled(right, row, column + 128, epilogue_ptrs, ROWS)
        if RANK > 0:
            hopper.fence_async_shared()  # the stores to R's buffer, before the tensor cores read it
            right_left = right_buffer.slice(0, 128, dim=0).permute((1, 0))
            right_right = right_buffer.slice(128, 128, dim=0).permute((1, 0))
            out_left = hopper.warpgroup_mma(factors, right_left, gl.convert_layout(out_left, SUMS_16, True))
            out_right = hopper.warpgroup_mma(factors, right_right, gl.convert_layout(out_right, SUMS_16, True))
        a, b, c, d = _quarters(out_left, out_right)
        _store(out_ptr, a, row, column, n, ADD, LAYOUT)
        _store(out_ptr, b, row, column + 64, n, ADD, LAYOUT)
        _store(out_ptr, c, row, column + 128, n, ADD, LAYOUT)
        _store(out_ptr, d, row, column + 192, n, ADD, LAYOUT)


@gluon.jit
def _scaled_wgmma_kernel(
    # A [m, k] and B [n, k], fp8 or int8, in blocks of 128 and 256 rows, 128-byte swizzled; the output [m, n], 16 bits.
    a_desc, b_desc, out_ptr,
    # Scales fp32 [m] or [1], [n] or [1]; bias [n], or None. L [m, RANK] and R [n, RANK] of the output's dtype, or None.
    scale_a_ptr, scale_b_ptr, bias_ptr, left_ptr, right_ptr, m, n, k,
    # As for `scale_tile`; of R the next power of two, of 16 at least. ADD: to the output.
    ROWS: gl.constexpr, RANK: gl.constexpr, BLOCK_R: gl.constexpr, ADD: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, STAGGERED: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_OF_LOADS: gl.constexpr,
):  # fmt: skip
    buffers, loaded = allocate_stages(a_desc, b_desc, STAGES)
    # R of a tile, for each warpgroup.
    R: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_R, element_bitwidth=16, rank=2)
    rights = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2, 256 if RANK > 0 else 8, BLOCK_R], R)
    descriptors, sizes = (a_desc, b_desc), (m, n, k, 1)
    common = descriptors, buffers, loaded, sizes
    epilogue_ptrs = scale_a_ptr, scale_b_ptr, bias_ptr
    upper, lower = (left_ptr, right_ptr, rights.index(0)), (left_ptr, right_ptr, rights.index(1))
    gl.warp_specialize(
        [
            (_multiply, (common, out_ptr, epilogue_ptrs, upper, 0, ROWS, RANK, BLOCK_R, ADD, GROUP_M, STAGGERED)),
            (_multiply, (common, out_ptr, epilogue_ptrs, lower, 1, ROWS, RANK, BLOCK_R, ADD, GROUP_M, STAGGERED)),
            (load_steps, (common, GROUP_M)),
        ],
        [4, 1],
        [REGISTERS, REGISTERS_OF_LOADS],
    )


def launch_scaled_wgmma(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    tiling: ProductTiling,
    *,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    add: bool = False,
) -> Tensor:
    """out [M, N] from A [M, K] and B [N, K] as `supports_scaled_wgmma` says; scales fp32 [M] or [1], [N] or [1]; bias
    [N]; low_rank: L [M, r] and R [N, r] of out's dtype, contiguous, r a multiple of 8, 64 at most. add: to out."""
    (m, k), n = a.shape, b.shape[0]
    left, right = low_rank or (None, None)
    rank = 0 if left is None else left.shape[1]
    _scaled_wgmma_kernel[(min(sm_count(a.device), m // LEAST_M * (n // LEAST_N)),)](
        descriptor(a, [128, 128]), descriptor(b, [256, 128]), out, scale_a, scale_b, bias, left, right, m, n, k,
        ROWS=scales_rows((scale_a, scale_b)), RANK=rank, BLOCK_R=max(16, triton.next_power_of_2(rank)), ADD=add,
        STAGES=tiling.stages, GROUP_M=tiling.group_m, STAGGERED=tiling.staggered,
        REGISTERS=REGISTERS, REGISTERS_OF_LOADS=REGISTERS_OF_LOADS, num_warps=4, maxnreg=REGISTERS_AT_LAUNCH,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
