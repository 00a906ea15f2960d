"""The main loop of warp-specialized products of 8-bit codes on Hopper, A · Bᵀ in tiles of 128 x 256, whose sums stay in
the tensor cores' accumulators until a kernel's own epilogue takes them.

    one warp            loads rows of A and B by TMA, as many steps of K ahead as shared memory holds, also while
                        the others are in their epilogue
    two warpgroups      64 rows of the tile each, in two halves of 128 columns: Triton has no INT8 instruction for 256

Both warpgroups read a stage before it is loaded again. Left alone they would reach their epilogues together, while the
tensor cores are idle. So the second begins when the first has issued as many steps as there are stages, and stays
behind: as far as the stages reach one multiplies while the other is in its epilogue.

A kernel's partitions are `load_steps` and, for each warpgroup, `free_stages`, `await_start` and a loop over its tiles:
`multiply_tile`, `last_sums` and the epilogue.
"""

from dataclasses import dataclass

from qtrain.kernels.compiler import gl, gluon, hopper
from qtrain.kernels.gemm.wgmma_schedule import (
    BOTH,
    FIRST_BARRIER,
    FIRST_FREE,
    FREE,
    count_tiles,
    find_tile,
    loaded_barriers,
    named_barrier,
    next_stage,
)

START = gl.constexpr(FIRST_BARRIER)
"""The named barrier where the second warpgroup begins."""
STEP = gl.constexpr(128)
"""Columns of K a stage."""


@dataclass(frozen=True)
class ProductTiling:
    """Stages of shared memory, 48 KiB each; rows of tiles that are computed before the next columns (group_m); whether
    the second warpgroup begins later."""

    stages: int
    group_m: int = 8
    staggered: bool = True

    @property
    def name(self) -> str:
        return f"triton wgmma 128x256 s{self.stages} g{self.group_m}{' staggered' if self.staggered else ''}"


@gluon.jit
def allocate_stages(a_desc, b_desc, STAGES: gl.constexpr):
    """-> buffers of A [STAGES, 128, STEP] and B [STAGES, 256, STEP], and an mbarrier for each stage."""
    buffers = (
        gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, STEP], a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, STEP], b_desc.layout),
    )
    return buffers, loaded_barriers(STAGES)


@gluon.jit
def load_steps(common, GROUP_M: gl.constexpr):
    """The warp that loads. common: (A's and B's descriptors, buffers, mbarriers, sizes)."""
    descriptors, buffers, loaded, sizes = common
    a_desc, b_desc = descriptors
    a_buffers, b_buffers = buffers
    STAGES: gl.constexpr = a_buffers.shape[0]
    tiles, tiles_m, tiles_n = count_tiles(sizes, (None, None), "", 256)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, row, column, first, end = find_tile(tile, tiles_m, tiles_n, sizes, (None, None), "", 256, GROUP_M)
        for step in range(first, end):
            named_barrier("bar.sync", FIRST_FREE + stage, FREE, 32)
            barrier = loaded.index(stage)
            at = step * STEP
            hopper.mbarrier.expect(barrier, (128 + 256) * STEP)
            hopper.tma.async_copy_global_to_shared(a_desc, [row, at], barrier, a_buffers.index(stage))
            hopper.tma.async_copy_global_to_shared(b_desc, [column, at], barrier, b_buffers.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def await_start(tiles, HALF: gl.constexpr, STAGGERED: gl.constexpr):
    """The second warpgroup waits for the first, which arrives in `_let_begin`."""
    if STAGGERED and HALF == 1:  # noqa: SIM102  constants, unlike the other
        if gl.program_id(0) < tiles:
            named_barrier("bar.sync", START, BOTH, 128)


@gluon.jit
def _let_begin(now, HALF: gl.constexpr, STAGGERED: gl.constexpr):
    """The second warpgroup, if it is time to."""
    if STAGGERED and HALF == 0:  # noqa: SIM102  constants, unlike the other
        if now:
            named_barrier("bar.arrive", START, BOTH, 128)


@gluon.jit
def _issue(buffers, stage, left, right, use_acc, HALF: gl.constexpr):
    """The products of a stage: 64 rows of A with 128 and 128 of B."""
    a, b = buffers[0].index(stage).slice(64 * HALF, 64, dim=0), buffers[1].index(stage)
    first, second = b.slice(0, 128, dim=0).permute((1, 0)), b.slice(128, 128, dim=0).permute((1, 0))
    left = hopper.warpgroup_mma(a, first, left, use_acc=use_acc, is_async=True)
    return left, hopper.warpgroup_mma(a, second, right, use_acc=use_acc, is_async=True)


@gluon.jit
def multiply_tile(common, sums, ring, steps, is_first, HALF: gl.constexpr, STAGGERED: gl.constexpr):
    """-> the sums [64, 128] twice, of which the last step's products run; the ring's next stage and phase; the stage
    that they read. sums: any, overwritten; ring: (stage, phase); steps: the tile's (first, end), one at least."""
    _, buffers, loaded, _ = common
    left, right = sums
    stage, phase = ring
    first, end = steps
    STAGES: gl.constexpr = buffers[0].shape[0]
    # The step after whose issue the other begins: the last that needs no stage that the other has read.
    start = gl.where(is_first, gl.minimum(first + STAGES, end) - 1, -1)
    hopper.mbarrier.wait(loaded.index(stage), phase)
    left, right = _issue(buffers, stage, left, right, False, HALF)
    left, right = hopper.warpgroup_mma_wait(2, deps=[left, right])  # for nothing yet: of the type that it has below
    _let_begin(start == first, HALF, STAGGERED)
    before = stage
    stage, phase = next_stage(stage, phase, STAGES)
    for step in range(first + 1, end):
        hopper.mbarrier.wait(loaded.index(stage), phase)
        left, right = _issue(buffers, stage, left, right, True, HALF)
        left, right = hopper.warpgroup_mma_wait(2, deps=[left, right])  # of the step before: its memory is free
        named_barrier("bar.arrive", FIRST_FREE + before, FREE, 128)
        _let_begin(start == step, HALF, STAGGERED)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    return left, right, stage, phase, before


@gluon.jit
def last_sums(left, right, before):
    """The sums, when the last products have ended."""
    left, right = hopper.warpgroup_mma_wait(0, deps=[left, right])
    named_barrier("bar.arrive", FIRST_FREE + before, FREE, 128)
    return left, right
