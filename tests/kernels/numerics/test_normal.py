"""Random projections' numbers: their distribution, and that each key has its own."""

import torch

from qtrain.kernels.numerics.normal import normal


def test_is_standard_normal():
    x = normal(torch.tensor([[3, 0, 0], [3, 0, 1]]), 50_000).double().flatten()
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 3) < 0.1 and abs((x**3).mean()) < 0.05
    levels = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.5], dtype=torch.float64)
    expected = torch.special.ndtr(levels)
    assert ((x[:, None] < levels).double().mean(0) - expected).abs().max() < 0.006


def test_a_key_is_a_vector_and_a_count_a_prefix():
    keys = torch.tensor([[3, 0, 0], [3, 0, 1], [3, 1, 0], [4, 0, 0]])
    x = normal(keys, 1001)
    assert torch.equal(normal(keys[2:3], 1001)[0], x[2])
    correlation = torch.corrcoef(x) - torch.eye(4)
    assert correlation.abs().max() < 0.15
    assert torch.equal(normal(keys, 10), x[:, :10])
