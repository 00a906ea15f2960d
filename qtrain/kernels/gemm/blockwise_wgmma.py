"""Blockwise FP8 products on Hopper: a warp that only loads, and two warpgroups that multiply in turns.

The products of `blockwise_mm.py` whose A has 1x128 blocks, dense or in groups of rows. The partial product of a block
is scaled and added outside of the tensor cores, which are idle then unless another warpgroup multiplies. In a kernel of
`tl.dot` all warps wait for each other. Gluon gives them code of their own, as in DeepGEMM
(github.com/deepseek-ai/DeepGEMM):

    one warp            loads the tile's rows of A and B by TMA, as many steps of K ahead as shared memory holds
    two warpgroups      64 rows of the tile each: multiply 128 columns of one step, then scale and add them

Both would find a step loaded at the same time, share the tensor cores, and then add at the same time. So they take
turns: a warpgroup issues its product after the other's, and adds while the other's runs. With 1x128 blocks of B adding
is twice the instructions, and turns were slower.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.hardware import has_wgmma, sm_count
from qtrain.kernels.compiler import gl, gluon, hopper
from qtrain.kernels.gemm.tiling import tile_of as _tile_of_triton

REGISTERS, REGISTERS_OF_LOADS, REGISTERS_AT_LAUNCH = 240, 24, 168
"""Per thread of a warpgroup that multiplies, of the warp that loads, and of both before they are told apart. Of the
240, 128 hold the sums of a tile of 256 columns and 64 a partial product."""
OUT_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WgmmaTiling:
    """A configuration of the kernel: tiles of 128 rows and block_n columns, and how many steps of K (128) are loaded at
    a time."""

    block_n: int
    stages: int
    group_m: int = 8

    @property
    def name(self) -> str:
        return f"triton wgmma 128x{self.block_n} s{self.stages} g{self.group_m}"


WGMMA_TILINGS = {tiling.name: tiling for tiling in (WgmmaTiling(256, 3), WgmmaTiling(256, 3, 16), WgmmaTiling(128, 5))}


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

_tile_of = gluon.jit(getattr(_tile_of_triton, "fn", _tile_of_triton))


@gluon.jit
def _tiles(sizes, starts_ptr, GROUPED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tiles of all groups, and of one: along its rows, along its columns. GROUPED: "" none, "rows", "sums"."""
    m, n, _, groups = sizes
    tiles_m, tiles_n = gl.cdiv(m, 128), gl.cdiv(n, BLOCK_N)
    if GROUPED == "rows":
        tiles_m = gl.load(starts_ptr + groups) // 128
    tiles = tiles_m * tiles_n
    if GROUPED == "sums":
        tiles *= groups
    return tiles, tiles_m, tiles_n


@gluon.jit
def _find(tile, tiles_m, tiles_n, sizes, groups_ptr, starts_ptr, GROUPED: gl.constexpr, GROUP_M: gl.constexpr):
    """-> the tile's group, row and column of tiles, first step of K, and the step after the last one.

    groups_ptr: the group of each row of tiles, or for sums the order in which groups are taken.
    """
    group, first, end = 0, 0, gl.cdiv(sizes[2], 128)
    if GROUPED == "sums":
        group = gl.load(groups_ptr + tile // (tiles_m * tiles_n))
        first, end = gl.load(starts_ptr + group) // 128, gl.load(starts_ptr + group + 1) // 128
        tile = tile % (tiles_m * tiles_n)
    tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP_M)
    if GROUPED == "rows":
        group = gl.load(groups_ptr + tile_m)
    return group, tile_m, tile_n, first, end


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The stage of the next step; a barrier's phase changes when all stages have been used."""
    stage += 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)


@gluon.jit
def _load(
    common, b_row_step, b_k_step,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
):  # fmt: skip
    """The warp that loads. b_row_step, b_k_step: from one group's matrix in B to the next."""
    descriptors, buffers, barriers, sizes, group_pointers = common
    a_desc, b_desc, scale_b_desc, _ = descriptors
    a_buffers, b_buffers, scale_b_buffers, _ = buffers
    loaded, free, _ = barriers
    groups_ptr, starts_ptr = group_pointers
    STAGES: gl.constexpr = a_buffers.shape[0]
    BYTES: gl.constexpr = 128 * 128 + BLOCK_N * 128 + (BLOCK_N * 4 if VECTOR_B else 0)
    tiles, tiles_m, tiles_n = _tiles(sizes, starts_ptr, GROUPED, BLOCK_N)
    stage, phase = 0, 1  # all are free
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, tile_m, tile_n, first, end = _find(
            tile, tiles_m, tiles_n, sizes, groups_ptr, starts_ptr, GROUPED, GROUP_M
        )
        row, column = tile_m * 128, tile_n * BLOCK_N
        for step in range(first, end):
            hopper.mbarrier.wait(free.index(stage), phase)
            barrier = loaded.index(stage)
            hopper.mbarrier.expect(barrier, BYTES)
            hopper.tma.async_copy_global_to_shared(a_desc, [row, step * 128], barrier, a_buffers.index(stage))
            hopper.tma.async_copy_global_to_shared(
                b_desc, [column + group * b_row_step, step * 128 + group * b_k_step], barrier, b_buffers.index(stage)
            )
            if VECTOR_B:
                hopper.tma.async_copy_global_to_shared(
                    scale_b_desc, [step, column], barrier, scale_b_buffers.index(stage)
                )
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply_part(
    a, b, total, partial, scale_a, scale_b, scale_b_buffer, turns, turn, never,
    HALF: gl.constexpr, PART: gl.constexpr, VECTOR_B: gl.constexpr,
):  # fmt: skip
    """total + 64 rows of A times 128 columns of one step, scaled; and the partial product.

    The product overwrites the registers of the previous one. `never` is false, but the compiler does not know, and must
    keep that order: with registers of its own the product would be issued before the previous one is added, and spill.
    """
    if not VECTOR_B:
        hopper.mbarrier.wait(turns.index(HALF), turn)
    b = b.slice(128 * PART, 128, dim=0).permute((1, 0))
    token = hopper.warpgroup_mma(a, b, partial, use_acc=never, is_async=True)
    if not VECTOR_B:
        hopper.mbarrier.arrive(turns.index(1 - HALF), count=1)
    partial = hopper.warpgroup_mma_wait(0, deps=[token])
    if VECTOR_B:
        along_n = scale_b_buffer.slice(128 * PART, 128, dim=1).load(partial.type.layout)
        return total + partial * along_n * gl.expand_dims(scale_a, 1), partial
    else:
        return total + partial * gl.expand_dims(scale_a * scale_b, 1), partial


@gluon.jit
def _store_part(c_desc, buffer, total, bias_ptr, row, column, n, inside):
    """A tile's 64 rows and 128 columns, plus bias, through shared memory."""
    if bias_ptr is not None:
        columns = column + gl.arange(0, 128, gl.SliceLayout(0, total.type.layout))
        total += gl.expand_dims(gl.load(bias_ptr + columns, columns < n, 0.0).to(gl.float32), 0)
    hopper.tma.store_wait(0)  # of the part before, whose memory this is
    buffer.store(total.to(c_desc.dtype))
    hopper.fence_async_shared()
    if inside:
        hopper.tma.async_copy_shared_to_global(c_desc, [row, column], buffer)


@gluon.jit
def _multiply(
    common, pointers, strides, HALF: gl.constexpr,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the upper (HALF = 0) or the lower 64 rows of each tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    descriptors, buffers, barriers, sizes, group_pointers = common
    _, _, _, c_desc = descriptors
    a_buffers, b_buffers, scale_b_buffers, c_buffers = buffers
    loaded, free, turns = barriers
    groups_ptr, starts_ptr = group_pointers
    scale_a_ptr, scale_b_ptr, bias_ptr = pointers
    STAGES: gl.constexpr = a_buffers.shape[0]
    m, n, _, _ = sizes
    a_row_stride, a_k_stride, b_group_stride, b_row_stride, b_k_stride = strides
    tiles, tiles_m, tiles_n = _tiles(sizes, starts_ptr, GROUPED, BLOCK_N)
    zero = gl.zeros((64, 128), gl.float32, LAYOUT)
    partial, never = zero, m < 0
    stage, phase, turn = 0, 0, 1 - HALF  # the upper half begins
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, tile_m, tile_n, first, end = _find(
            tile, tiles_m, tiles_n, sizes, groups_ptr, starts_ptr, GROUPED, GROUP_M
        )
        row, column = tile_m * 128 + 64 * HALF, tile_n * BLOCK_N
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        scale_a_row = scale_a_ptr + rows * a_row_stride
        scale_b_left = scale_b_ptr + group * b_group_stride + column // 128 * b_row_stride
        scale_b_right = scale_b_left + b_row_stride * (column + 128 < n).to(gl.int32)
        left, right = zero, zero
        next_a = gl.load(scale_a_row + first * a_k_stride, (rows < m) & (first < end), 0.0)
        next_left, next_right = 1.0, 1.0
        if not VECTOR_B:
            next_left = gl.load(scale_b_left + first * b_k_stride, first < end, 0.0)
            next_right = gl.load(scale_b_right + first * b_k_stride, first < end, 0.0)
        for step in range(first, end):
            scale_a, scale_left, scale_right = next_a, next_left, next_right
            following = gl.minimum(step + 1, end - 1)  # loads that are needed a step later
            next_a = gl.load(scale_a_row + following * a_k_stride, rows < m, 0.0)
            if not VECTOR_B:
                next_left = gl.load(scale_b_left + following * b_k_stride)
                next_right = gl.load(scale_b_right + following * b_k_stride)
            hopper.mbarrier.wait(loaded.index(stage), phase)
            a, b = a_buffers.index(stage).slice(64 * HALF, 64, dim=0), b_buffers.index(stage)
            scale_b = scale_b_buffers.index(stage)
            left, partial = _multiply_part(
                a, b, left, partial, scale_a, scale_left, scale_b, turns, turn, never, HALF, 0, VECTOR_B
            )
            turn ^= 1
            if BLOCK_N == 256:
                right, partial = _multiply_part(
                    a, b, right, partial, scale_a, scale_right, scale_b, turns, turn, never, HALF, 1, VECTOR_B
                )
                turn ^= 1
            hopper.mbarrier.arrive(free.index(stage), count=1)
            stage, phase = _next(stage, phase, STAGES)
        out_row = row
        if GROUPED == "sums":
            out_row += group * m
        _store_part(c_desc, c_buffers.index(HALF), left, bias_ptr, out_row, column, n, row < m)
        if BLOCK_N == 256:
            _store_part(c_desc, c_buffers.index(HALF), right, bias_ptr, out_row, column + 128, n, row < m)
    hopper.tma.store_wait(0)


_SIZES = ["m", "n", "k", "groups", "b_row_step", "b_k_step", "a_row_stride", "a_k_stride", "b_group_stride"]


@gluon.jit(do_not_specialize=[*_SIZES, "b_row_stride", "b_k_stride"])
def _blockwise_wgmma_kernel(
    a_desc, b_desc, scale_b_desc, c_desc, scale_a_ptr, scale_b_ptr, bias_ptr, groups_ptr, starts_ptr, m, n, k, groups,
    b_row_step, b_k_step, a_row_stride, a_k_stride, b_group_stride, b_row_stride, b_k_stride,
    GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, VECTOR_B: gl.constexpr,
    REGISTERS: gl.constexpr, REGISTERS_OF_LOADS: gl.constexpr,
):  # fmt: skip
    """VECTOR_B: B has 1x128 blocks, otherwise 128x128."""
    SCALES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    buffers = (
        gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, 128], b_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N if VECTOR_B else 1], SCALES),
        gl.allocate_shared_memory(c_desc.dtype, [2, 64, 128], c_desc.layout),
    )
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(loaded.index(stage), count=1)
        hopper.mbarrier.init(free.index(stage), count=2)
    for half in gl.static_range(2):
        hopper.mbarrier.init(turns.index(half), count=1)
    hopper.fence_async_shared()
    descriptors, barriers, sizes = (a_desc, b_desc, scale_b_desc, c_desc), (loaded, free, turns), (m, n, k, groups)
    grouped, pointers = (groups_ptr, starts_ptr), (scale_a_ptr, scale_b_ptr, bias_ptr)
    strides = (a_row_stride, a_k_stride, b_group_stride, b_row_stride, b_k_stride)
    common = descriptors, buffers, barriers, sizes, grouped
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


def _descriptor(t: Tensor, block: list[int], *, swizzled: bool = True) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width = 128 if swizzled else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * t.element_size(), rank=2)
    return TensorDescriptor.from_tensor(t, block, layout)


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
    grouped: str = "",
    group_pointers: tuple[Tensor | None, Tensor | None] = (None, None),
    b_steps: tuple[int, int] = (0, 0),
    b_group_stride: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """out [*, N] from A [*, K] and B [*, K]; operands as `supports_wgmma` says, rows of `out` in multiples of 16 bytes.

    vector_b: B has 1x128 blocks, otherwise 128x128. sizes: M, N and K of a product and the number of groups.
    grouped: "" is one product; "rows" multiplies each block of 128 rows of A with the matrix of its group, which is
    b_steps rows and columns further in B than the one before; "sums" multiplies each group's columns of A and B, M a
    multiple of 64, out [E * M, N]. group_pointers, for these two: the group of each block or the order of groups, and
    `RowGroups.starts`.
    """
    (m, n, _, groups), block_n = sizes, tiling.block_n
    # A descriptor that is not used if the scales are not loaded with B: any tensor will do.
    scale_b_desc = _descriptor(scale_b.t(), [1, block_n], swizzled=False) if vector_b else _descriptor(a, [8, 128])
    tiles = -(-m // 128) * -(-n // block_n) * (groups if grouped == "sums" else 1)
    _blockwise_wgmma_kernel[(min(sm_count(a.device), tiles),)](
        _descriptor(a, [128, 128]), _descriptor(b, [block_n, 128]), scale_b_desc, _descriptor(out, [64, 128]),
        scale_a, scale_b, bias, *group_pointers, *sizes, *b_steps, *scale_a.stride(), b_group_stride, *scale_b.stride(),
        grouped, block_n, tiling.stages, tiling.group_m, vector_b, REGISTERS, REGISTERS_OF_LOADS,
        num_warps=4, maxnreg=REGISTERS_AT_LAUNCH,
    )  # fmt: skip
    return out
