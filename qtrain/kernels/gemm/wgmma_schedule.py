"""What the partitions of a warp-specialized kernel on Hopper agree upon: the order of tiles, stages and barriers.

Each partition, the warp that loads and the warpgroups that multiply, walks through the same tiles and steps by itself.
Stages are a ring in shared memory that goes on from one tile to the next.
"""

from qtrain.kernels.compiler import gl, gluon
from qtrain.kernels.gemm.persistent import tile_of as _tile_of_triton

FIRST_BARRIER = 8
"""Of the named barriers that a kernel may take for itself, 8 to 15."""

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
