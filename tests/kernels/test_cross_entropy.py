"""Cross-entropy over rows: loss, z-loss and gradient against fp64 autograd; ignored rows; non-finite values."""

import pytest
import torch

from qtrain.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_ref,
    cross_entropy_statistics,
    cross_entropy_statistics_ref,
    launch_cross_entropy,
    launch_cross_entropy_statistics,
)


def truth(logits, labels, z_loss):
    leaf = logits.double().requires_grad_()
    trained = labels != -100
    log_total = leaf.logsumexp(dim=-1)
    nll = torch.where(trained, log_total - leaf.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    loss = nll + torch.where(trained, z_loss * log_total.square(), 0.0)
    loss.sum().backward()
    return torch.stack([loss, nll]).detach(), leaf.grad


def check(function, device, dtype):
    generator = torch.Generator().manual_seed(0)
    for rows, width, z_loss in [(1, 1, 0.0), (1, 5, 0.1), (7, 130, 0.0), (33, 1000, 1e-3), (4, 20001, 1e-4)]:
        logits = torch.randn(rows, width, generator=generator) * 4
        logits[0, width // 2] += 80  # a logit far above the rest
        labels = torch.randint(0, width, (rows,), generator=generator)
        labels[rows // 2 :: 3] = -100
        logits, labels = logits.to(device, dtype), labels.to(device)
        true_out, true_grad = truth(logits, labels, z_loss)
        kept = logits.clone()
        out = function(kept, labels, z_loss, False)
        assert torch.equal(kept, logits), "without gradient the logits stay"
        assert torch.allclose(out.double(), true_out, rtol=1e-5, atol=1e-5)
        function(kept, labels, z_loss, True)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(kept.double(), true_grad, rtol=eps, atol=max(eps / 64, 3e-5))
        assert (kept[labels == -100] == 0).all()


def check_nonfinite(function, device):
    """A NaN or +Inf logit makes its own row's loss and gradient non-finite, and no other's."""
    for nonfinite in (float("nan"), float("inf")):
        logits = torch.randn(3, 70).to(device)
        logits[1, 40] = nonfinite
        out = function(logits, torch.tensor([1, 2, 3]).to(device), 0.0, True)
        assert not out[:, 1].isfinite().any() and out[:, [0, 2]].isfinite().all()
        assert logits[1].isnan().any() and logits[[0, 2]].isfinite().all()


def check_statistics(function, device, dtype):
    """Loss and nll as with the gradient, and L; the logits stay. Groups of neighbors without a finite logit count 0."""
    generator = torch.Generator().manual_seed(1)
    for rows, width, z_loss in [(1, 1, 0.0), (3, 5, 0.1), (7, 130, 0.0), (33, 1000, 1e-3), (4, 20001, 1e-4)]:
        logits = torch.randn(rows, width, generator=generator) * 4
        logits[0, width // 2] += 80
        logits[-1, : width // 2] = float("-inf")
        labels = torch.full((rows,), width - 1)
        labels[1::3] = -100
        logits, labels = logits.to(device, dtype), labels.to(device)
        kept = logits.clone()
        loss, nll, log_total = function(logits, labels, z_loss)
        true_out, _ = truth(logits, labels, z_loss)
        assert torch.equal(logits, kept)
        assert torch.allclose(torch.stack([loss, nll]).double(), true_out, rtol=1e-5, atol=1e-5)
        assert torch.allclose(log_total.double(), logits.double().logsumexp(dim=-1), rtol=3e-7, atol=1e-6)
    for nonfinite in (float("nan"), float("inf")):
        logits = torch.randn(3, 70).to(device)
        logits[1, 40] = nonfinite
        out = function(logits, torch.tensor([1, 2, 3]).to(device), 0.0)
        assert out.isfinite().tolist() == [[True, False, True]] * 3


def test_reference():
    for dtype in (torch.float32, torch.bfloat16):
        check(cross_entropy_ref, "cpu", dtype)
        check_statistics(cross_entropy_statistics_ref, "cpu", dtype)
    check_nonfinite(cross_entropy_ref, "cpu")
    assert cross_entropy_ref(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64), 0.0, True).shape == (2, 0)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launch_cross_entropy, "cpu", torch.float32)
    check_nonfinite(launch_cross_entropy, "cpu")
    check_statistics(launch_cross_entropy_statistics, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    check(launch_cross_entropy, "cuda", dtype)
    check_nonfinite(launch_cross_entropy, "cuda")
    check_statistics(launch_cross_entropy_statistics, "cuda", dtype)


def test_operator():
    logits, labels = torch.randn(4, 9), torch.tensor([0, 1, -100, 8])
    torch.library.opcheck(cross_entropy, (logits, labels, 0.1, True))
    torch.library.opcheck(cross_entropy_statistics, (logits, labels, 0.1))
