"""Matrices of one shape share a batch, as do fused projections with equally many rows."""

import torch

from qtrain.optim import batched_states
from qtrain.optim.matrix_optimizer import equal_projections


def test_batches_are_of_one_shape_and_bounded(monkeypatch):
    monkeypatch.setattr(batched_states, "BATCH_ELEMENTS", 100)
    tensors = [torch.zeros(5, 5) for _ in range(6)] + [torch.zeros(20, 20)] * 2 + [torch.zeros(5, 5).bfloat16()]
    assert list(batched_states.batches_by_shape(tensors)) == [[0, 1, 2, 3], [4, 5], [6], [7], [8]]


def test_equal_projections():
    assert equal_projections([8, 4, 8]) == {8: [(0, 0), (2, 12)], 4: [(1, 8)]}
