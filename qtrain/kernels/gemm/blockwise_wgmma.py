"""Blockwise FP8 products on Hopper: a warp that only loads, and two warpgroups that multiply in turns.

The products of `blockwise_mm.py` whose A has 1x128 blocks, dense or in groups of rows; with one scale for all, at
strides of 0, also sums of `grouped_mm.py` that are accumulated in fp32. The partial product of a block is scaled and
added outside of the tensor cores, which are idle then unless another warpgroup multiplies. In a kernel of `tl.dot` all
warps wait for each other. Gluon gives them code of their own, as in DeepGEMM (github.com/deepseek-ai/DeepGEMM):

    one warp            loads the tile's rows of A and B by TMA, as many steps of K ahead as shared memory holds
    two warpgroups      64 rows of the tile each: multiply 128 columns of one step, then scale and add them

Left alone, both warpgroups would issue their products at the same time, and then scale and add at the same time, while
the tensor cores are idle. Named barriers make them alternate (the ping-pong schedule of CUTLASS): one issues its
product while the other scales and adds. Adding and issuing take about as long as the other's product, so all other
work is done while the own one runs. With 1x128 blocks of B adding is twice the instructions, and this was slower.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_wgmma, sm_count
from qtrain.kernels.compiler import gl, gluon, hopper
from qtrain.kernels.gemm.wgmma_schedule import (
    BOTH,
    FIRST_BARRIER,
    FIRST_FREE,
    FREE,
    REGISTERS,
    REGISTERS_AT_LAUNCH,
    REGISTERS_OF_LOADS,
    count_tiles,
    descriptor,
    find_tile,
    free_stages,
    loaded_barriers,
    named_barrier,
    next_stage,
)

FIRST_TURN = gl.constexpr(FIRST_BARRIER)
"""The named barriers of two warpgroups that take turns: the first's, and the next one."""
OUT_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WgmmaTiling:
    """A configuration of the kernel: output tiles of 128 rows and block_n columns; stages of 128 columns of K in shared
    memory; rows of tiles that are computed before the next columns (group_m)."""

    block_n: int
    stages: int
    group_m: int = 8

    @property
    def name(self) -> str:
        return f"triton wgmma 128x{self.block_n} s{self.stages} g{self.group_m}"


WGMMA_TILINGS = {tiling.name: tiling for tiling in (WgmmaTiling(256, 3), WgmmaTiling(256, 3, 16), WgmmaTiling(128, 5))}


class WgmmaGroups(NamedTuple):
    """How the rows of A, or what is summed over, are in groups."""

    mode: str
    """"rows" multiplies each block of 128 rows of A with the matrix of its group and sets rows after the last group to
    zero; "sums" multiplies each group's columns of A and B, M a multiple of 64, out [E * M, N]."""
    blocks: Tensor | None
    """int32: for rows the group of each block of 128 rows, for sums the groups in the order in which they are taken."""
    starts: Tensor | None
    """int32 [E + 1], the first row of each group, and the end of the last one."""
    b_steps: tuple[int, int] = (0, 0)
    """Rows and columns of B from one group's matrix to the next."""
    b_group_stride: int = 0
    """Scales of B from one group's to the next's."""


def supports_wgmma(a: Tensor, b: Tensor, scale_b: Tensor, block_a: str, block_b: str, out_dtype: torch.dtype) -> bool:
    """Whether the kernel takes these operands, K-major with rows in multiples of 16 bytes, and their device.

    Scales of 1x128 blocks of B must be column-major, as the quantizers write them: TMA loads them.
    """
    if not has_wgmma(a.device):
        return False
    row_stride, k_stride = scale_b.stride()[-2:]
    loadable = block_b == "128x128" or (block_b == "1x128" and row_stride == 1 and k_stride % 4 == 0)
    fp8 = all(t.dtype.itemsize == 1 and t.dtype.is_floating_point for t in (a, b))
    return fp8 and block_a == "1x128" and loadable and out_dtype in OUT_DTYPES


# ---- kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _load(
    common, b_row_step, b_k_step,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
):  # fmt: skip
    """The warp that loads. b_row_step, b_k_step: from one group's matrix in B to the next."""
    descriptors, buffers, loaded, sizes, group_pointers = common
    a_desc, b_desc, scale_b_desc, _ = descriptors
    a_buffers, b_buffers, scale_b_buffers, _ = buffers
    STAGES: gl.constexpr = a_buffers.shape[0]
    BYTES: gl.constexpr = 128 * 128 + BLOCK_N * 128 + (BLOCK_N * 4 if VECTOR_B else 0)
    tiles, tiles_m, tiles_n = count_tiles(sizes, group_pointers, GROUPED, BLOCK_N)
    stage, phase = 0, 0  # named barriers have no phase
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, row, column, first, end = find_tile(
            tile, tiles_m, tiles_n, sizes, group_pointers, GROUPED, BLOCK_N, GROUP_M
        )
        for step in range(first, end):
            named_barrier("bar.sync", FIRST_FREE + stage, FREE, 32)
            barrier = loaded.index(stage)  # expects one arrival, this one, and BYTES of copies
            hopper.mbarrier.expect(barrier, BYTES)
            hopper.tma.async_copy_global_to_shared(a_desc, [row, step * 128], barrier, a_buffers.index(stage))
            hopper.tma.async_copy_global_to_shared(
                b_desc, [column + group * b_row_step, step * 128 + group * b_k_step], barrier, b_buffers.index(stage)
            )
            if VECTOR_B:
                hopper.tma.async_copy_global_to_shared(
                    scale_b_desc, [step, column], barrier, scale_b_buffers.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _issue(a, b, partial, false_pred, HALF: gl.constexpr, PART: gl.constexpr, VECTOR_B: gl.constexpr):
    """The product of 64 rows of A and 128 columns of one step, in its turn.

    It overwrites the registers of the previous one. `false_pred` is false, but the compiler does not know, and must
    keep that order: with registers of its own the product would be issued before the previous one is added, and spill.
    """
    # b fp8 [BLOCK_N, 128] in shared memory, 128-byte swizzled -> 128 of its rows, as the K x N operand of wgmma.
    b = b.slice(128 * PART, 128, dim=0).permute((1, 0))
    if not VECTOR_B:
        named_barrier("bar.sync", FIRST_TURN + HALF, BOTH, 128)
    # Use_acc false: a fresh sum for each block.
    token = hopper.warpgroup_mma(a, b, partial, use_acc=false_pred, is_async=True)
    if not VECTOR_B:
        named_barrier("bar.arrive", FIRST_TURN + 1 - HALF, BOTH, 128)
    return token


@gluon.jit
def _add(total, token, scale_a, scale_b, scale_b_buffer, PART: gl.constexpr, VECTOR_B: gl.constexpr):
    """total + the product, scaled; and the product, whose registers the next one takes."""
    partial = hopper.warpgroup_mma_wait(0, deps=[token])
    if VECTOR_B:
        along_n = scale_b_buffer.slice(128 * PART, 128, dim=1).load(partial.type.layout)
        return total + partial * along_n * gl.expand_dims(scale_a, 1), partial
    else:
        return total + partial * gl.expand_dims(scale_a * scale_b, 1), partial


@gluon.jit
def _scale_pointers(scales, strides, group, row, column, m, n, LAYOUT: gl.constexpr):
    """Scales at step 0 of a tile's 64 rows of A, which of them there are, of its left and right 128 columns of B."""
    scale_a_ptr, scale_b_ptr = scales
    a_row_stride, _, b_group_stride, b_row_stride, _ = strides
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    # 128x128 blocks: one scale for 128 columns, two for a tile of 256; the second one exists unless n ends before it.
    left = scale_b_ptr + group * b_group_stride + column // 128 * b_row_stride
    return scale_a_ptr + rows * a_row_stride, rows < m, left, left + b_row_stride * (column + 128 < n).to(gl.int32)


@gluon.jit
def _load_scales(pointers, strides, step, present, EACH: gl.constexpr, VECTOR_B: gl.constexpr):
    """Of a step, if it is `present`, for each of 64 rows: of A, of the left and of the right 128 columns of B. With
    VECTOR_B those of B come with its codes.

    EACH: each thread loads those of B for its rows, and waits when it uses them. One load for all threads is shorter,
    but goes to a uniform register, and the compiler waits for it at once.
    """
    rows_ptr, inside, left_ptr, right_ptr = pointers
    _, a_k_stride, _, _, b_k_stride = strides
    scale_a = gl.load(rows_ptr + step * a_k_stride, inside & present, 0.0)
    layout: gl.constexpr = scale_a.type.layout
    if VECTOR_B:
        return scale_a, scale_a, scale_a
    elif EACH:
        for_rows = gl.full((64,), 0, gl.int32, layout) + step * b_k_stride
        left = gl.load(left_ptr + for_rows, inside & present, 0.0)
        return scale_a, left, gl.load(right_ptr + for_rows, inside & present, 0.0)
    else:
        left, right = gl.load(left_ptr + step * b_k_stride), gl.load(right_ptr + step * b_k_stride)
        return scale_a, gl.full((64,), left, gl.float32, layout), gl.full((64,), right, gl.float32, layout)


@gluon.jit
def _begin(
    tile, counts, common, scales, HALF: gl.constexpr,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """-> what `find_tile` says of a tile, pointers to the scales of this half of it, and those of its first step.

    counts: as of `count_tiles`; scales: pointers of A's and B's, and their strides.
    """
    _, tiles_m, tiles_n = counts
    scale_a_ptr, scale_b_ptr, strides = scales
    _, _, _, sizes, group_pointers = common
    m, n, _, _ = sizes
    group, row, column, first, end = find_tile(tile, tiles_m, tiles_n, sizes, group_pointers, GROUPED, BLOCK_N, GROUP_M)
    scale_ptrs = scale_a_ptr, scale_b_ptr
    pointers = _scale_pointers(scale_ptrs, strides, group, row + 64 * HALF, column, m, n, LAYOUT)
    return group, row, column, first, end, pointers, _load_scales(pointers, strides, first, first < end, True, VECTOR_B)


@gluon.jit
def _first_sums(bias_ptr, column, n, LAYOUT: gl.constexpr):
    """fp32 [64, 128]: the bias of 128 columns from `column` on, or zeros."""
    sums = gl.zeros((64, 128), gl.float32, LAYOUT)
    if bias_ptr is not None:
        columns = column + gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
        sums += gl.expand_dims(gl.load(bias_ptr + columns, columns < n, 0.0).to(gl.float32), 0)
    return sums


@gluon.jit
def _zero_tail(common, tiles, tiles_n, HALF: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zeros in rows that belong to no group, as tiles after the last: programs that have computed one less begin."""
    descriptors, buffers, _, sizes, _ = common
    c_desc, buffer, programs = descriptors[3], buffers[3].index(HALF * (BLOCK_N // 128)), gl.num_programs(0)
    end = gl.cdiv(sizes[0], 128) * tiles_n
    first = tiles + (gl.program_id(0) + programs - tiles % programs) % programs
    if first < end:
        # TMA may still be reading this buffer, for the last tile.
        hopper.tma.store_wait(0)
        # Once: every tile of zeros is copied from it.
        buffer.store(gl.zeros((64, 128), c_desc.dtype, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
        hopper.fence_async_shared()
        for tile in range(first, end, programs):
            row, column = tile // tiles_n * 128 + 64 * HALF, tile % tiles_n * BLOCK_N
            for part in gl.static_range(BLOCK_N // 128):
                hopper.tma.async_copy_shared_to_global(c_desc, [row, column + 128 * part], buffer)


@gluon.jit
def _multiply_tiles(
    common, pointers, strides, counts, HALF: gl.constexpr,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
):  # fmt: skip
    """The upper (HALF = 0) or the lower 64 rows of each tile of this CTA, which has one at least.

    Between the end of a product and the issue of the next it only adds: what else a step needs is done while one runs.
    The next tile's first scales are loaded before this tile is stored.
    """
    # The accumulator's layout: each of four warps has 16 of the 64 rows. instr_shape: m a warp, n, k of 8-bit codes.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    descriptors, buffers, loaded, sizes, _ = common
    c_desc = descriptors[3]
    a_buffers, b_buffers, scale_b_buffers, c_buffers = buffers
    scale_a_ptr, scale_b_ptr, bias_ptr = pointers
    STAGES: gl.constexpr = a_buffers.shape[0]
    LEFT: gl.constexpr = HALF * (BLOCK_N // 128)  # the first of its buffers for the output
    m, n, _, _ = sizes
    scales = scale_a_ptr, scale_b_ptr, strides
    tiles = counts[0]  # of all CTAs
    # One partial product at a time, fp32 [64, 128]: 64 registers per thread, and 128 more for the sums of 256 columns.
    partial, false_pred = gl.zeros((64, 128), gl.float32, LAYOUT), m < 0
    stage, phase = 0, 0
    free_stages(STAGES)
    if HALF == 1 and not VECTOR_B:
        named_barrier("bar.arrive", FIRST_TURN, BOTH, 128)  # the upper half begins
    group, row, column, first, end, tile_pointers, next_scales = _begin(
        gl.program_id(0), counts, common, scales, HALF, GROUPED, BLOCK_N, GROUP_M, VECTOR_B, LAYOUT
    )
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        left = _first_sums(bias_ptr, column, n, LAYOUT)
        right = _first_sums(bias_ptr, column + 128, n, LAYOUT)
        hopper.mbarrier.wait(loaded.index(stage), phase, pred=first < end)  # a group without rows has no step
        for step in range(first, end):
            scale_a, scale_left, scale_right = next_scales
            a, b = a_buffers.index(stage).slice(64 * HALF, 64, dim=0), b_buffers.index(stage)
            scale_b = scale_b_buffers.index(stage)
            token = _issue(a, b, partial, false_pred, HALF, 0, VECTOR_B)
            # While the product runs: the next step's scales, of the last step again at the end.
            next_scales = _load_scales(tile_pointers, strides, gl.minimum(step + 1, end - 1), True, False, VECTOR_B)
            if BLOCK_N == 256:
                left, partial = _add(left, token, scale_a, scale_left, scale_b, 0, VECTOR_B)
                token = _issue(a, b, partial, false_pred, HALF, 1, VECTOR_B)
            # While the last product of this step runs: wait for the next stage, so that nothing is left to do between.
            following_stage, phase = next_stage(stage, phase, STAGES)
            hopper.mbarrier.wait(loaded.index(following_stage), phase, pred=step + 1 < end)
            if BLOCK_N == 256:
                right, partial = _add(right, token, scale_a, scale_right, scale_b, 1, VECTOR_B)
            else:
                left, partial = _add(left, token, scale_a, scale_left, scale_b, 0, VECTOR_B)
            # Both products of this stage have been waited for: its memory may be overwritten.
            named_barrier("bar.arrive", FIRST_FREE + stage, FREE, 128)
            stage = following_stage
        out_group, out_row, out_column = group, row + 64 * HALF, column
        # Clamped: the last tile loads scales that nobody uses.
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        group, row, column, first, end, tile_pointers, next_scales = _begin(
            following, counts, common, scales, HALF, GROUPED, BLOCK_N, GROUP_M, VECTOR_B, LAYOUT
        )
        if out_row < m:  # the lower half of the last tile may be outside
            if GROUPED == "sums":
                out_row += out_group * m
            hopper.tma.store_wait(0)  # of the tile before, from the same memory
            c_buffers.index(LEFT).store(left.to(c_desc.dtype))
            if BLOCK_N == 256:
                c_buffers.index(LEFT + 1).store(right.to(c_desc.dtype))
            hopper.fence_async_shared()  # the stores above, before TMA's asynchronous proxy reads them
            hopper.tma.async_copy_shared_to_global(c_desc, [out_row, out_column], c_buffers.index(LEFT))
            if BLOCK_N == 256:
                hopper.tma.async_copy_shared_to_global(c_desc, [out_row, out_column + 128], c_buffers.index(LEFT + 1))


@gluon.jit
def _multiply(
    common, pointers, strides, HALF: gl.constexpr,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its part of every tile, and of the rows after the last group."""
    _, _, _, sizes, group_pointers = common
    counts = count_tiles(sizes, group_pointers, GROUPED, BLOCK_N)
    tiles, _, tiles_n = counts
    if gl.program_id(0) < tiles:
        _multiply_tiles(common, pointers, strides, counts, HALF, GROUPED, BLOCK_N, GROUP_M, VECTOR_B)
    if GROUPED == "rows":
        _zero_tail(common, tiles, tiles_n, HALF, BLOCK_N)
    hopper.tma.store_wait(0)


_SIZES = ["m", "n", "k", "groups", "b_row_step", "b_k_step", "a_row_stride", "a_k_stride", "b_group_stride"]


@gluon.jit(do_not_specialize=[*_SIZES, "b_row_stride", "b_k_stride"])
def _blockwise_wgmma_kernel(
    # A [*, k] in blocks [128, 128], B [*, k] in blocks [BLOCK_N, 128], fp8, 128-byte swizzled; scales of 1x128 blocks
    # of B fp32 [k / 128, *] in blocks [1, BLOCK_N]; the output, 16 bits, in blocks [64, 128].
    a_desc, b_desc, scale_b_desc, c_desc,
    # fp32 scales of A, one per row and 128 of k; of B, one per 128 rows and 128 of k. Bias [n], or None.
    scale_a_ptr, scale_b_ptr, bias_ptr,
    # int32: groups of blocks of rows, or the order of groups; [groups + 1] first rows; or None without groups.
    groups_ptr, starts_ptr, m, n, k, groups,
    # Elements of B from one group's matrix to the next; strides of the scales.
    b_row_step, b_k_step, a_row_stride, a_k_stride, b_group_stride, b_row_stride, b_k_stride,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_OF_LOADS: gl.constexpr,
):  # fmt: skip
    """VECTOR_B: B has 1x128 blocks, otherwise 128x128."""
    SCALES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    # Shared memory of a CTA: STAGES of A, B (and scales of B), and the output tile, 64 rows of each warpgroup's
    # columns.
    buffers = (
        gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, 128], b_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N if VECTOR_B else 1], SCALES),
        gl.allocate_shared_memory(c_desc.dtype, [2 * BLOCK_N // 128, 64, 128], c_desc.layout),
    )
    loaded = loaded_barriers(STAGES)
    descriptors, sizes = (a_desc, b_desc, scale_b_desc, c_desc), (m, n, k, groups)
    grouped, pointers = (groups_ptr, starts_ptr), (scale_a_ptr, scale_b_ptr, bias_ptr)
    strides = (a_row_stride, a_k_stride, b_group_stride, b_row_stride, b_k_stride)
    common = descriptors, buffers, loaded, sizes, grouped
    # The first partition runs on the kernel's own four warps; the others on 4 and 1 more, with registers moved from the
    # warp that loads to those that multiply (setmaxnreg).
    gl.warp_specialize(
        [
            (_multiply, (common, pointers, strides, 0, GROUPED, BLOCK_N, GROUP_M, VECTOR_B)),
            (_multiply, (common, pointers, strides, 1, GROUPED, BLOCK_N, GROUP_M, VECTOR_B)),
            (_load, (common, b_row_step, b_k_step, GROUPED, BLOCK_N, GROUP_M, VECTOR_B)),
        ],
        [4, 1],
        [REGISTERS, REGISTERS_OF_LOADS],
    )


# ---- launchers -------------------------------------------------------------------------------------------------------


def launch_blockwise_wgmma(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    tiling: WgmmaTiling,
    sizes: tuple[int, int, int, int],
    vector_b: bool,
    *,
    grouped: WgmmaGroups | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """out [*, N] from A [*, K] and B [*, K]; operands as `supports_wgmma` says, rows of `out` in multiples of 16 bytes.

    vector_b: B has 1x128 blocks, otherwise 128x128. sizes: M, N and K of a product and the number of groups.
    """
    mode, blocks, starts, b_steps, b_group_stride = grouped or WgmmaGroups("", None, None)
    (m, n, _, groups), block_n = sizes, tiling.block_n
    # A descriptor that is not used if the scales are not loaded with B: any tensor will do.
    scale_b_desc = descriptor(scale_b.t(), [1, block_n], swizzled=False) if vector_b else descriptor(a, [8, 128])
    tiles = -(-m // 128) * -(-n // block_n) * (groups if mode == "sums" else 1)
    _blockwise_wgmma_kernel[(min(sm_count(a.device), tiles),)](
        descriptor(a, [128, 128]), descriptor(b, [block_n, 128]), scale_b_desc, descriptor(out, [64, 128]),
        scale_a, scale_b, bias, blocks, starts, *sizes, *b_steps, *scale_a.stride(), b_group_stride, *scale_b.stride(),
        GROUPED=mode, BLOCK_N=block_n, STAGES=tiling.stages, GROUP_M=tiling.group_m, VECTOR_B=vector_b,
        REGISTERS=REGISTERS, REGISTERS_OF_LOADS=REGISTERS_OF_LOADS,
        num_warps=4, maxnreg=REGISTERS_AT_LAUNCH,
    )  # fmt: skip
    return out
