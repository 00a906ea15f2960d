"""Rows sorted by group: every route has its row, groups are whole blocks, the rest is marked empty."""

import pytest
import torch

from qtrain.kernels.grouped.row_groups import ALIGNMENT, group_rows, padded_rows


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
    rows = g.row_of_route.flatten().long()
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
