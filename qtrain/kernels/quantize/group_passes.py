"""Two passes over every group of rows in one launch: absmaxes, then codes, read again while the group is in L2.

Scales of whole rows and of a group's columns are known once the group has been read. A kernel for each pass would read
a matrix twice from memory: the end of the first pass evicts what the second begins with. A group, one expert's weights
or the rows of its tokens, is a few MiB. So the CTAs of one launch take the blocks of 128 rows in a schedule: absmaxes
run `lead` blocks ahead of codes, far enough that CTAs of the second pass need not wait, near enough that what they read
is in L2.

The schedule is a table: two steps for each block, its absmax and its codes. Steps of a group's codes come after those
of its absmaxes and wait for them, on a count per group. CTAs start in the order of their numbers, so that a CTA waits
only for others that run or have ended.
"""

import torch
from torch import Tensor

from qtrain.hardware import sm_count
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.quantize.column_groups import BlockGroups

FIELDS = 2
"""Of a step: 2 * block for its absmaxes or 2 * block + 1 for its codes, and the blocks that the codes wait for."""
TILES_AHEAD = 2
"""Tiles per SM between the two passes. Absmaxes of three tiles per SM are taken at once."""


def schedule_ref(of_block: Tensor, lead: int) -> Tensor:
    """of_block int32 [B], ascending, with -1 in the last blocks, of no group -> the steps, int32 [2 * B, FIELDS].

    Blocks of no group are zero; their codes are those under the scales of group 0.
    """
    blocks, device = of_block.shape[0], of_block.device
    block = torch.arange(blocks, device=device)
    group = torch.where(of_block < 0, torch.iinfo(torch.int32).max, of_block)
    end = (group[None, :] <= group[:, None]).sum(1)  # of the block's group
    before = (group[None, :] < group[(block - lead).clamp(min=0)][:, None]).sum(1)  # groups that end by block - lead
    same = (of_block[None, :] == of_block.clamp(min=0)[:, None]).sum(1)
    steps = torch.empty(2 * blocks, FIELDS, dtype=torch.int32, device=device)
    steps[block + before * (block >= lead)] = torch.stack((2 * block, same), 1).int()
    steps[block + (end + lead).clamp(max=blocks)] = torch.stack((2 * block + 1, same), 1).int()
    return steps


@triton.jit
def _schedule_kernel(group_ptr, steps_ptr, blocks, lead, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = block < blocks
    of_block = tl.load(group_ptr + block, inside, -1)
    behind = tl.load(group_ptr + tl.maximum(block - lead, 0), inside, -1)
    group = tl.where(of_block < 0, 0x7FFFFFFF, of_block)
    behind = tl.where(behind < 0, 0x7FFFFFFF, behind)
    end = tl.zeros((BLOCK, CHUNK), tl.int32)
    before, same = end, end
    for first in range(0, blocks, CHUNK):
        other = first + tl.arange(0, CHUNK)
        present = (other < blocks)[None, :]
        other = tl.load(group_ptr + other, other < blocks, -1)[None, :]
        same += ((other == tl.maximum(of_block, 0)[:, None]) & present).to(tl.int32)
        other = tl.where(other < 0, 0x7FFFFFFF, other)
        end += ((other <= group[:, None]) & present).to(tl.int32)
        before += ((other < behind[:, None]) & present).to(tl.int32)
    end, before, same = tl.sum(end, 1), tl.sum(before, 1), tl.sum(same, 1)
    absmax = 2 * (block + tl.where(block >= lead, before, 0))
    tl.store(steps_ptr + absmax, 2 * block, inside)
    tl.store(steps_ptr + absmax + 1, same, inside)
    codes = 2 * (block + tl.minimum(end + lead, blocks))
    tl.store(steps_ptr + codes, 2 * block + 1, inside)
    tl.store(steps_ptr + codes + 1, same, inside)


def launch_schedule(groups: BlockGroups, tiles: int) -> Tensor:
    """The steps of `schedule_ref` for blocks of `tiles` tiles each."""
    of_block = groups.of_block
    lead = triton.cdiv(TILES_AHEAD * sm_count(of_block.device), tiles)
    (blocks,), size = of_block.shape, 16
    steps = torch.empty(2 * blocks, FIELDS, dtype=torch.int32, device=of_block.device)
    _schedule_kernel[(triton.cdiv(blocks, size),)](of_block, steps, blocks, lead, size, 256, num_warps=8)
    return steps


@triton.jit
def step_of_program(steps_ptr, group_ptr, tiles):
    """This CTA's step, of `tiles` CTAs each -> its block of rows and their group, -1 for none; whether it stores codes;
    the blocks to wait for; and the CTA's tile."""
    step = steps_ptr + tl.program_id(0) // tiles * 2
    action, awaited = tl.load(step), tl.load(step + 1)
    block = action >> 1
    return block, tl.load(group_ptr + block), action & 1 == 1, awaited, tl.program_id(0) % tiles


@triton.jit
def signal_tile(done_ptr, group):
    """One more tile of the group has its absmaxes in memory, all atomic. done_ptr: int32 [groups + 1], zeros; the first
    count is that of blocks without group, for which nobody waits."""
    tl.debug_barrier()  # those of all warps
    tl.atomic_add(done_ptr + 1 + group, 1, sem="release")


@triton.jit
def wait_for_tiles(done_ptr, group, count):
    """Until `signal_tile` was called `count` times for the group. Loads after this see the absmaxes."""
    done_ptr += 1 + tl.maximum(group, 0)
    done = tl.atomic_add(done_ptr, 0, sem="acquire")
    while done < count:
        done = tl.atomic_add(done_ptr, 0, sem="acquire")
    tl.debug_barrier()
