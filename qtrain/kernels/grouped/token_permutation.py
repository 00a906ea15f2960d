"""Which row of a permuted matrix holds which token: rows sorted by group, every group padded to whole blocks of rows.

A router sends each of T tokens to k experts: T * k routes. Sorted by expert, the tokens of an expert are neighbors, and
one product over all groups reads them. Each group begins at a multiple of ALIGNMENT rows, so a tile of a GEMM and a
block of scales never contain two groups. The number of rows is the upper bound over all routings: shapes are static,
nothing is read back by the host, and a step can be recorded. Rows that hold no token are zero. Of a rank that has some
of the groups that bound is many times its share: where a step is not recorded, the host may read the rows that a
routing needs (`group_rows_of`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS

ALIGNMENT = BLOCK_ROWS
"""Rows that a group is padded to a multiple of: the tile of the GEMMs, the block of blockwise scales, and what
quantizers count to one group."""


EVEN_LOADS = 2
"""Rows that `group_rows_of` takes at least where it knows the routing: as many times those of an even one."""


class TokenPermutation(NamedTuple):
    """The rows of a permuted matrix [R, *], in groups. All tensors are on the device of the routing."""

    token_of_row: Tensor
    """int32 [R], the token that a row holds; -1: none, the row is zero."""
    row_of_topk: Tensor
    """int32 [T, k], the row of a token's k-th route; -1: none, its group is not among these."""
    group_of_block: Tensor
    """int32 [R / ALIGNMENT], the group of each block of ALIGNMENT rows; -1 past the last group."""
    starts: Tensor
    """int32 [groups + 1], the first row of each group; the last one is where the last group ends."""

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.starts.shape[0] - 1

    @property
    def rows(self) -> int:
        return self.token_of_row.shape[0]

    def part(self, first: int, count: int) -> "TokenPermutation":
        """`count` groups from number `first` on, where they are; the rows of all others are zero."""
        group, nobody = self.group_of_block, torch.full_like(self.group_of_block, -1)
        held = (group >= first) & (group < first + count)
        # Blocks before the first group, of zeros, count to it: only those past the last group may have none.
        group_of_block = torch.where(held, group - first, torch.where((group >= 0) & (group < first), 0, nobody))
        row_held = held[:, None].expand(-1, ALIGNMENT).reshape(-1)
        token_of_row = torch.where(row_held, self.token_of_row, torch.full_like(self.token_of_row, -1))
        row, starts = self.row_of_topk, self.starts[first : first + count + 1]
        row_of_topk = torch.where((row >= starts[0]) & (row < starts[-1]), row, torch.full_like(row, -1))
        return TokenPermutation(token_of_row, row_of_topk, group_of_block, starts)


def padded_rows(routes: int, groups: int) -> int:
    """Rows of a permuted matrix under any routing: a group that has a route is padded by less than ALIGNMENT rows."""
    # Worst case: every group that has a route has one more than a multiple of ALIGNMENT.
    most = routes + min(routes, groups) * (ALIGNMENT - 1)
    return -(-most // ALIGNMENT) * ALIGNMENT


def tokens_per_expert(topk_ids: Tensor, groups: int) -> Tensor:
    """topk_ids int64 [T, k] -> how many routes each group has, int64 [groups]."""
    # A comparison with each group fuses into one reduction; additions to few addresses would wait for each other.
    return (topk_ids.reshape(-1, 1) == torch.arange(groups, device=topk_ids.device)).sum(0)


# ---- sorting routes by group -----------------------------------------------------------------------------------------


def group_rows_ref(topk_ids: Tensor, groups: int) -> TokenPermutation:
    """topk_ids int64 [T, k] -> the rows of routes in the order of (group, token, k)."""
    tokens, per_token = topk_ids.shape
    flat, device = topk_ids.reshape(-1), topk_ids.device  # [T * k], token by token
    counts = tokens_per_expert(topk_ids, groups)
    # Each group begins at a block of its own; one without routes takes no rows.
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts = torch.zeros(groups + 1, dtype=torch.int64, device=device)
    starts[1:] = padded.cumsum(0)
    order = flat.argsort(stable=True)  # by (group, token, k): flat is in the order of (token, k)
    before = counts.cumsum(0) - counts  # routes of the groups before this one
    group = flat[order]
    row = torch.arange(flat.numel(), device=device) - before[group] + starts[group]
    rows = padded_rows(flat.numel(), groups)
    token_of_row = torch.full((rows,), -1, dtype=torch.int32, device=device)
    token_of_row.scatter_(0, row, (order // max(per_token, 1)).int())
    row_of_topk = torch.empty(flat.numel(), dtype=torch.int32, device=device).scatter_(0, order, row.int())
    first_rows = torch.arange(0, rows, ALIGNMENT, device=device)
    # The last group that begins at a block or before it.
    group_of_block = torch.searchsorted(starts, first_rows, right=True) - 1
    group_of_block = torch.where(first_rows < starts[-1], group_of_block, -1)
    return TokenPermutation(token_of_row, row_of_topk.view(tokens, per_token), group_of_block.int(), starts.int())


CHUNK = 128
"""Routes that a CTA counts, and places."""
CHUNKS = 1024
"""Chunks whose counts a CTA adds up at once."""


@triton.jit
def _count_kernel(group_ptr, counts_ptr, routes, groups, chunks, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """counts int32 [groups, chunks]: the routes of each chunk to each group. BINS: more than groups."""
    chunk = tl.program_id(0)
    route = chunk * CHUNK + tl.arange(0, CHUNK)
    # Routes past the end count to bin number `groups`, which is not stored.
    counts = tl.histogram(tl.load(group_ptr + route, route < routes, groups).to(tl.int32), BINS)
    group = tl.arange(0, BINS)
    tl.store(counts_ptr + group * chunks + chunk, counts, group < groups)


@triton.jit
def _offsets_kernel(counts_ptr, total_ptr, chunks, CHUNKS: tl.constexpr):
    """Replaces counts by those of all chunks before; total int32 [groups]: of all chunks."""
    counts_ptr += tl.program_id(0) * chunks
    total = tl.program_id(0) * 0  # an int32 value, not a constant: the loop changes it
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        counts = tl.load(counts_ptr + chunk, chunk < chunks, 0)
        tl.store(counts_ptr + chunk, total + tl.cumsum(counts, 0) - counts, chunk < chunks)
        total += tl.sum(counts, 0)
    tl.store(total_ptr + tl.program_id(0), total)


@triton.jit
def _starts_kernel(total_ptr, starts_ptr, groups, BINS: tl.constexpr, ALIGNMENT: tl.constexpr):
    group = tl.arange(0, BINS)
    total = tl.load(total_ptr + group, group < groups, 0)
    padded = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    # Number `groups` has no routes: its entry is where the last group ends.
    tl.store(starts_ptr + group, tl.cumsum(padded, 0) - padded, group <= groups)


@triton.jit
def _place_kernel(
    # int64 [routes]: the group of each; int32 [groups, chunks], [groups], [groups + 1] of the kernels above.
    group_ptr, count_ptrs,
    # int32, of `TokenPermutation`: token_of_row [rows], row_of_topk [routes], group_of_block [blocks].
    out_ptrs,
    # (routes, routes of a token, groups, chunks, blocks).
    sizes, BINS: tl.constexpr, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The rows of a chunk of routes; the group of a block of rows, and -1 in those of its rows that hold no token."""
    offset_ptr, total_ptr, starts_ptr = count_ptrs
    token_ptr, row_ptr, block_ptr = out_ptrs
    routes, per_token, groups, chunks, blocks = sizes
    pid, lane = tl.program_id(0), tl.arange(0, CHUNK)
    route = pid * CHUNK + lane
    inside = route < routes
    group = tl.load(group_ptr + route, inside, 0).to(tl.int32)
    # [CHUNK, CHUNK]: routes of this chunk to the same group that come first. Its sum is a route's place in the chunk.
    before = (group[:, None] == group[None, :]) & (lane[:, None] > lane[None, :])
    row = tl.load(starts_ptr + group) + tl.load(offset_ptr + group * chunks + pid, inside, 0)
    row += tl.sum(before.to(tl.int32), 1)
    tl.store(row_ptr + route, row, inside)
    tl.store(token_ptr + row, route // per_token, inside)
    if pid < blocks:  # the same launch fills in what the routes leave: each CTA a block of rows too
        first, bins = pid * ALIGNMENT, tl.arange(0, BINS)
        # The last group that begins at or before this block: groups without rows share its start, and are before it.
        owner = tl.sum((tl.load(starts_ptr + bins, bins <= groups, 0x7FFFFFFF) <= first).to(tl.int32), 0) - 1
        held = owner < groups
        end = tl.load(starts_ptr + owner, held, 0) + tl.load(total_ptr + owner, held, 0)
        tl.store(block_ptr + pid, tl.where(held, owner, -1))
        rows = first + tl.arange(0, ALIGNMENT)
        tl.store(token_ptr + rows, tl.full((ALIGNMENT,), -1, tl.int32), rows >= end)


def launch_group_rows(topk_ids: Tensor, groups: int) -> TokenPermutation:
    """The kernels for `group_rows_ref`, a counting sort; contiguous, not empty."""
    (tokens, per_token), device = topk_ids.shape, topk_ids.device
    routes, rows = topk_ids.numel(), padded_rows(topk_ids.numel(), groups)
    chunks, blocks, bins = triton.cdiv(routes, CHUNK), rows // ALIGNMENT, triton.next_power_of_2(groups + 1)
    sizes = (groups * chunks, groups, groups + 1, rows, routes, blocks)
    offsets, total, starts, token_of_row, row_of_topk, group_of_block = (
        torch.empty(size, dtype=torch.int32, device=device) for size in sizes
    )
    # A counting sort in four launches; the order within a group is that of the routes, so it is deterministic.
    _count_kernel[(chunks,)](topk_ids, offsets, routes, groups, chunks, BINS=bins, CHUNK=CHUNK)
    _offsets_kernel[(groups,)](offsets, total, chunks, CHUNKS=CHUNKS)
    _starts_kernel[(1,)](total, starts, groups, BINS=bins, ALIGNMENT=ALIGNMENT)
    _place_kernel[(max(chunks, blocks),)](
        topk_ids, (offsets, total, starts), (token_of_row, row_of_topk, group_of_block),
        (routes, per_token, groups, chunks, blocks), BINS=bins, CHUNK=CHUNK, ALIGNMENT=ALIGNMENT, num_warps=8,
    )  # fmt: skip
    return TokenPermutation(token_of_row, row_of_topk.view(tokens, per_token), group_of_block, starts)


def _empty_group_rows(topk_ids, groups):
    rows = padded_rows(topk_ids.numel(), groups)
    sizes = (rows,), tuple(topk_ids.shape), (rows // ALIGNMENT,), (groups + 1,)
    return tuple(topk_ids.new_empty(size, dtype=torch.int32) for size in sizes)


@operator("group_rows", fake=_empty_group_rows)
def _group_rows(topk_ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if topk_ids.is_cuda and topk_ids.numel():
        return tuple(launch_group_rows(topk_ids.contiguous(), groups))
    return tuple(group_rows_ref(topk_ids, groups))


@torch.no_grad()
def group_rows(topk_ids: Tensor, groups: int) -> TokenPermutation:
    """The rows of routes int64 [T, k], each to one of `groups`, in the order of (group, token, k)."""
    return TokenPermutation(*_group_rows(topk_ids, groups))


@torch.no_grad()
def group_rows_of(
    topk_ids: Tensor, groups: int, first: int, count: int, every_routing: bool = True
) -> TokenPermutation:
    """The rows of `count` of the groups, from number `first` on, which come first and are numbered from 0. Routes to
    other groups have no row. A token has at most one route to a group.

    every_routing: as many rows as any routing needs. Without, those of EVEN_LOADS times an even load, doubled until
    this routing fits: few sizes, for kernels that are timed for each, and one number that the host waits for."""
    # Renumbered: the wanted groups come first, those that were before them last.
    found = group_rows((topk_ids - first) % groups, groups).part(0, count)
    tokens, per_token = topk_ids.shape
    routes = most = tokens * min(per_token, count)
    if not every_routing:
        needed, routes = int(found.starts[-1]), EVEN_LOADS * -(-tokens * per_token * count // groups)
        while routes < most and padded_rows(routes, count) < needed:
            routes *= 2
    rows = padded_rows(min(routes, most), count)
    if found.rows <= rows:
        return found
    return TokenPermutation(
        found.token_of_row[:rows].clone(),  # kept for backward: not the memory of all rows
        found.row_of_topk,
        found.group_of_block[: rows // ALIGNMENT].clone(),
        found.starts,
    )
