"""What the partitions of a warp-specialized kernel on Hopper agree upon: the order of tiles, stages and barriers.

Each partition, a warp that loads and two warpgroups that multiply, walks through the same tiles and steps by itself.
Stages are a ring in shared memory that goes on from one tile to the next. A stage's life: both warpgroups arrive at its
FREE barrier; the warp that loads, which waits there, starts the TMA copies into it; its mbarrier completes a phase when
all their bytes have arrived; both warpgroups wait for that phase.
"""

from torch import Tensor

from qtrain.kernels.compiler import gl, gluon, hopper
from qtrain.kernels.gemm.persistent import tile_of as _tile_of_triton

FIRST_BARRIER = 8
"""Of the named barriers that a kernel may take for itself, 8 to 15. Those of stages, six at most, are the last ones."""
FIRST_FREE = gl.constexpr(FIRST_BARRIER + 2)
BOTH, FREE = gl.constexpr("256"), gl.constexpr("288")
"""Threads at a barrier: of both warpgroups; and with them of the warp that loads."""
REGISTERS, REGISTERS_OF_LOADS, REGISTERS_AT_LAUNCH = 240, 24, 168
"""Per thread of a warpgroup that multiplies, of the warp that loads, and of both before they are told apart."""

_tile_of = gluon.jit(getattr(_tile_of_triton, "fn", _tile_of_triton))


@gluon.jit
def count_tiles(sizes, group_pointers, GROUPED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tiles of all groups, and of one: along its rows, along its columns. GROUPED: "" none, "rows", "sums"."""
    m, n, _, groups = sizes
    # sizes: M, N, K of a product, number of groups; group_pointers: int32, see `find_tile`, and [groups + 1] first
    # rows.
    tiles_m, tiles_n = gl.cdiv(m, 128), gl.cdiv(n, BLOCK_N)
    if GROUPED == "rows":
        tiles_m = gl.load(group_pointers[1] + groups) // 128  # where the last group ends: read on the device
    tiles = tiles_m * tiles_n
    if GROUPED == "sums":
        tiles *= groups
    return tiles, tiles_m, tiles_n


@gluon.jit
def find_tile(
    tile, tiles_m, tiles_n, sizes, group_pointers, GROUPED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):
    """-> the tile's group, first row and column, first step of K, and the step after the last one.

    The first of group_pointers: the group of each row of tiles, or for sums the order in which groups are taken.
    """
    groups_ptr, starts_ptr = group_pointers
    group, first, end = 0, 0, gl.cdiv(sizes[2], 128)
    if GROUPED == "sums":
        group = gl.load(groups_ptr + tile // (tiles_m * tiles_n))
        # Steps of K are blocks of 128 rows, and groups begin at such blocks; a group without rows has no step.
        first, end = gl.load(starts_ptr + group) // 128, gl.load(starts_ptr + group + 1) // 128
        tile = tile % (tiles_m * tiles_n)
    tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP_M)
    if GROUPED == "rows":
        group = gl.load(groups_ptr + tile_m)
    return group, tile_m * 128, tile_n * BLOCK_N, first, end


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage of the next step; a barrier's phase changes when all stages have been used."""
    # An mbarrier's wait names the parity of the phase it waits for: it flips each time round the ring.
    stage += 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)


@gluon.jit
def loaded_barriers(STAGES: gl.constexpr):
    """An mbarrier for each stage."""
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(loaded.index(stage), count=1)  # one arrival a phase: of the warp that loads
    hopper.fence_async_shared()
    return loaded


@gluon.jit
def free_stages(STAGES: gl.constexpr):
    """Before a warpgroup's first tile all stages are free."""
    for stage in gl.static_range(STAGES):
        named_barrier("bar.arrive", FIRST_FREE + stage, FREE, 128)


@gluon.jit
def named_barrier(OPERATION: gl.constexpr, number, THREADS: gl.constexpr, OWN: gl.constexpr):
    """bar.sync or bar.arrive (OPERATION) at barrier `number` for THREADS threads, by the OWN of this partition.

    One instruction, and nothing for the compiler to order: arriving at an mbarrier in shared memory costs two more
    barriers of all warps of the partition, and waiting for one a branch. Triton takes the first few of the 16 barriers
    of a CTA; the kernel's begin at FIRST_BARRIER.
    """
    # bar counts threads: each of the OWN threads of this partition executes it once, on a tensor of OWN elements.
    PTX: gl.constexpr = OPERATION + " $1, " + THREADS + "; mov.b32 $0, $1;"
    number = gl.full((OWN,), number, gl.int32, gl.BlockedLayout([1], [32], [OWN // 32], [0]))
    gl.inline_asm_elementwise(PTX, "=r,r", [number], gl.int32, is_pure=False, pack=1)


def descriptor(t: Tensor, block: list[int], *, swizzled: bool = True) -> object:
    """TMA descriptor of t [R, C], rows in multiples of 16 bytes, in blocks; 128-byte swizzled in shared memory, or not
    at all."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    width = 128 if swizzled else 0
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8 * t.element_size(), rank=2)
    return TensorDescriptor.from_tensor(t, block, layout)
