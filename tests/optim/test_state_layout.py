"""Matrices that share a launch are of one shape and kind, and of bounded size."""

import torch

from qtrain.optim import state_layout


def test_batches_are_of_one_shape_and_bounded(monkeypatch):
    monkeypatch.setattr(state_layout, "BATCH_ELEMENTS", 100)
    tensors = [torch.zeros(5, 5) for _ in range(6)] + [torch.zeros(20, 20)] * 2 + [torch.zeros(5, 5).bfloat16()]
    assert list(state_layout.batches_by_shape(tensors)) == [[0, 1, 2, 3], [4, 5], [6], [7], [8]]
