"""Rows sorted by group: every route has its row, groups are whole blocks, the rest is marked empty."""

import pytest
import torch

from qtrain.kernels.grouped import token_permutation
from qtrain.kernels.grouped.token_permutation import (
    ALIGNMENT,
    group_rows,
    group_rows_of,
    group_rows_ref,
    launch_group_rows,
    padded_rows,
)


@pytest.mark.parametrize("tokens, per_token, groups", [(1, 1, 1), (1, 2, 4), (300, 2, 8), (1000, 8, 128), (5, 3, 3)])
@pytest.mark.parametrize("routing", ["random", "one", "empty_first"])
def test_every_route_has_a_row(tokens, per_token, groups, routing):
    if routing == "random":
        experts = torch.rand(tokens, groups).topk(per_token).indices
    else:
        experts = torch.full((tokens, per_token), 0 if routing == "one" else groups - 1)
    g = group_rows(experts, groups)
    assert g.rows == padded_rows(experts.numel(), groups) == len(g.token_of_row)
    assert g.count == groups
    assert (g.starts % ALIGNMENT == 0).all()
    assert g.starts[-1] <= g.rows
    rows = g.row_of_topk.flatten().long()
    assert rows.unique().numel() == rows.numel()
    tokens_of_routes = torch.arange(tokens).repeat_interleave(per_token)
    assert torch.equal(g.token_of_row[rows].long(), tokens_of_routes)
    assert (g.token_of_row >= 0).sum() == rows.numel()
    assert torch.equal(g.group_of_block[rows // ALIGNMENT].long(), experts.flatten())
    used = int(g.starts[-1]) // ALIGNMENT
    assert (g.group_of_block[used:] == -1).all() and (g.group_of_block[:used] >= 0).all()
    for group in range(groups):  # a group's tokens come first, in ascending order, then its padding
        held = g.token_of_row[g.starts[group] : g.starts[group + 1]]
        count = int((experts == group).sum())
        assert (held[:count] >= 0).all() and (held[count:] == -1).all()
        assert len(held) == -(-count // ALIGNMENT) * ALIGNMENT
        assert (held[:count].diff() >= 0).all()


SORTED = [(1, 1, 1), (1, 2, 4), (300, 2, 8), (200, 8, 128), (5, 3, 3), (400, 1, 130)]


def check_kernels(tokens, per_token, groups, device):
    random = torch.rand(tokens, groups, generator=torch.Generator().manual_seed(tokens)).topk(per_token).indices
    for experts in (random, random.clamp(max=groups // 2), torch.full_like(random, groups - 1)):
        found, expected = launch_group_rows(experts.to(device), groups), group_rows_ref(experts, groups)
        assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", SORTED)
def test_the_kernels_sort_as_the_definition(shape, monkeypatch):
    monkeypatch.setattr(token_permutation, "CHUNKS", 4)  # sums over several
    check_kernels(*shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SORTED, (16384, 8, 128), (20000, 8, 256), (150_000, 1, 8)])
def test_the_kernels_sort_as_the_definition_on_gpu(shape):
    check_kernels(*shape, "cuda")


def test_operator():
    torch.library.opcheck(torch.ops.qtrain.group_rows.default, (routed(20, 2, 4), 4))


ROUTED = [(300, 2, 8, 4), (200, 4, 16, 2), (5, 3, 6, 2), (40, 1, 4, 1)]


def routed(tokens: int, per_token: int, groups: int) -> torch.Tensor:
    return torch.rand(tokens, groups, generator=torch.Generator().manual_seed(0)).topk(per_token).indices


@pytest.mark.parametrize("tokens, per_token, groups, count", ROUTED)
def test_a_part_keeps_its_rows_where_they_are(tokens, per_token, groups, count):
    experts = routed(tokens, per_token, groups)
    whole = group_rows(experts, groups)
    for first in range(0, groups, count):
        part = whole.part(first, count)
        held = range(int(whole.starts[first]), int(whole.starts[first + count]))
        row = torch.arange(whole.rows)
        inside = (row >= held.start) & (row < held.stop)
        assert torch.equal(part.token_of_row, torch.where(inside, whole.token_of_row, -1))
        assert torch.equal(part.starts, whole.starts[first : first + count + 1]) and part.count == count
        of_row = part.group_of_block.repeat_interleave(ALIGNMENT)
        assert torch.equal(of_row[inside] + first, whole.group_of_block.repeat_interleave(ALIGNMENT)[inside])
        assert (of_row[: held.start] == 0).all() and (of_row[held.stop :] == -1).all()
        own = (experts >= first) & (experts < first + count)
        assert torch.equal(part.row_of_topk, torch.where(own, whole.row_of_topk, -1))


@pytest.mark.parametrize("every_routing", [True, False])
@pytest.mark.parametrize("tokens, per_token, groups, count", ROUTED)
def test_groups_of_a_rank_come_first_and_routes_to_others_have_no_row(tokens, per_token, groups, count, every_routing):
    experts = routed(tokens, per_token, groups)
    for first in range(0, groups, count):
        g = group_rows_of(experts, groups, first, count, every_routing)
        assert g.rows <= padded_rows(tokens * min(per_token, count), count) and g.count == count
        own = (experts >= first) & (experts < first + count)
        rows = g.row_of_topk.long()
        assert torch.equal(g.token_of_row[rows[own]].long(), own.nonzero()[:, 0])
        assert torch.equal(g.group_of_block[rows[own] // ALIGNMENT].long() + first, experts[own])
        assert (rows[~own] == -1).all()
        assert (g.token_of_row >= 0).sum() == own.sum()


@pytest.mark.parametrize(("busy", "loads"), [(0.0, 2), (0.2, 2), (0.3, 4), (0.6, 8), (1.0, 8)])
def test_a_rank_has_rows_for_twice_an_even_load_or_as_many_more_as_a_routing_needs(busy, loads):
    """Rank 0 of 8 has 4 of 32 experts; `busy` of the tokens have all of their routes to them."""
    tokens, per_token, groups, count = 4096, 4, 32, 4
    experts = torch.stack([torch.randperm(groups - count)[:per_token] + count for _ in range(tokens)])
    experts[: int(busy * tokens)] = torch.arange(count)
    g = group_rows_of(experts, groups, 0, count, every_routing=False)
    even = tokens * per_token * count // groups
    assert g.rows == padded_rows(min(loads * even, tokens * per_token), count)
    assert (g.token_of_row >= 0).sum() == (experts < count).sum(), "no route is dropped"
    assert g.token_of_row.untyped_storage().nbytes() == 4 * g.rows, "nothing else is kept"
    assert g.rows <= group_rows_of(experts, groups, 0, count).rows
