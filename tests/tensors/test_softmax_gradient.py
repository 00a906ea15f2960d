"""The gradient of logits that stands for its values until something reads them."""

import pytest
import torch

from qtrain.kernels.cross_entropy import cross_entropy
from qtrain.tensors.softmax_gradient import SoftmaxGradient, softmax_gradient

Z_LOSS = 0.01


def case(dtype=torch.float32):
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 9).to(dtype), torch.randint(0, 9, (6,))
    labels[2] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_operation_gets_the_values_of_cross_entropy(dtype):
    logits, labels = case(dtype)
    expected = logits.clone()
    losses = cross_entropy(expected, labels, Z_LOSS, True)
    found, gradient = softmax_gradient(logits, labels, Z_LOSS)
    assert torch.allclose(found, losses, rtol=1e-6)
    assert gradient.shape == logits.shape and gradient.dtype == dtype and "SoftmaxGradient" in repr(gradient)
    assert not torch.equal(logits, expected)  # nothing has read it yet
    for _ in range(2):
        assert torch.equal(gradient + 0, expected)
        assert torch.equal(gradient.sum(0), expected.sum(0))
    assert torch.equal(logits, expected)  # in their memory


def test_autograd_passes_it_through_views():
    logits, labels = case()
    _, gradient = softmax_gradient(logits, labels, Z_LOSS)
    seen = []

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            seen.append(dy)
            return dy * 2

    leaf = torch.zeros(6, 9, requires_grad=True)
    kept = logits.clone()
    Linear.apply(leaf).view(6, 9).backward(gradient)
    assert isinstance(seen[0], SoftmaxGradient) and seen[0].source is gradient.source
    expected = kept.clone()
    cross_entropy(expected, labels, Z_LOSS, True)
    assert torch.equal(leaf.grad, 2 * expected)
