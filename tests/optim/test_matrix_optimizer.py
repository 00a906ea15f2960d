"""Fused projections with equally many rows share a batch."""

from qtrain.optim.matrix_optimizer import equal_projections


def test_equal_projections():
    assert equal_projections([8, 4, 8]) == {8: [(0, 0), (2, 12)], 4: [(1, 8)]}
