"""Cross-entropy with a teacher: loss, divergence and gradient against fp64 autograd on full logits; ignored rows."""

import pytest
import torch

from qtrain.kernels.cross_entropy import cross_entropy_ref
from qtrain.kernels.distillation import (
    distilled_cross_entropy,
    distilled_cross_entropy_ref,
    launch_distilled_cross_entropy,
)

CASES = [
    # rows, width, z_loss, weight, temperature
    (1, 1, 0.0, 0.5, 1.0),
    (1, 5, 0.1, 0.25, 2.0),
    (7, 130, 0.0, 1.0, 0.5),
    (33, 1000, 1e-3, 0.9, 4.0),
    (4, 9001, 0.0, 0.5, 1.0),
]


def truth(logits, teacher, labels, z_loss, weight, temperature):
    leaf, trained = logits.double().requires_grad_(), labels != -100
    log_total = leaf.logsumexp(dim=-1)
    nll = torch.where(trained, log_total - leaf.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    log_p = (teacher.double() / temperature).log_softmax(-1)
    log_q = (leaf / temperature).log_softmax(-1)
    kl = torch.where(trained, torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1), 0.0)
    with_z = nll + torch.where(trained, z_loss * log_total.square(), 0.0)
    loss = (1 - weight) * with_z + weight * temperature**2 * kl
    loss.sum().backward()
    return torch.stack([loss, nll, kl]).detach(), leaf.grad


def random_case(rows, width, device, dtype):
    generator = torch.Generator().manual_seed(width)
    logits, teacher = (torch.randn(rows, width, generator=generator) * 4 for _ in range(2))
    logits[0, width // 2] += 80  # a logit far above the rest
    teacher[-1, 0] += 60
    labels = torch.randint(0, width, (rows,), generator=generator)
    labels[rows // 2 :: 3] = -100
    return logits.to(device, dtype), teacher.to(device, dtype), labels.to(device)


def check(function, device, dtype):
    for rows, width, *options in CASES:
        logits, teacher, labels = random_case(rows, width, device, dtype)
        true_out, true_grad = truth(logits, teacher, labels, *options)
        kept, given = logits.clone(), teacher.clone()
        out = function(kept, teacher, labels, *options, False)
        assert torch.equal(kept, logits), "without gradient the logits stay"
        assert torch.allclose(out.double(), true_out, rtol=1e-5, atol=5e-5)
        function(kept, teacher, labels, *options, True)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(kept.double(), true_grad, rtol=eps, atol=max(eps / 64, 3e-5))
        assert (kept[labels == -100] == 0).all() and torch.equal(teacher, given)


def check_nonfinite(function, device):
    """A NaN of the student or the teacher makes its own row's loss and gradient NaN, and no other's."""
    for of_teacher in (False, True):
        logits, teacher = torch.randn(3, 70).to(device), torch.randn(3, 70).to(device)
        (teacher if of_teacher else logits)[1, 40] = float("nan")
        out = function(logits, teacher, torch.tensor([1, 2, 3]).to(device), 0.0, 0.5, 2.0, True)
        assert not out[0, 1].isfinite() and out[:, [0, 2]].isfinite().all()
        assert logits[1].isnan().any() and logits[[0, 2]].isfinite().all()


def check_weight_0(function, plain, device, dtype):
    logits, teacher, labels = random_case(33, 1000, device, dtype)
    other = logits.clone()
    out, expected = function(logits, teacher, labels, 0.01, 0.0, 2.0, True), plain(other, labels, 0.01, True)
    assert torch.equal(out[:2], expected) and torch.equal(logits, other)


def test_reference():
    for dtype in (torch.float32, torch.bfloat16):
        check(distilled_cross_entropy_ref, "cpu", dtype)
        check_weight_0(distilled_cross_entropy_ref, cross_entropy_ref, "cpu", dtype)
    check_nonfinite(distilled_cross_entropy_ref, "cpu")
    empty, labels = torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64)
    assert distilled_cross_entropy_ref(empty, empty, labels, 0.0, 0.5, 1.0, True).shape == (3, 0)


def test_a_student_that_is_its_teacher_has_no_divergence():
    logits, _, labels = random_case(7, 130, "cpu", torch.float32)
    out = distilled_cross_entropy_ref(logits.clone(), logits, labels, 0.0, 1.0, 2.0, False)
    assert out[2].abs().max() < 1e-6 and out[1].sum() > 0


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launch_distilled_cross_entropy, "cpu", torch.float32)
    check_nonfinite(launch_distilled_cross_entropy, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    from qtrain.kernels.cross_entropy import launch_cross_entropy

    check(launch_distilled_cross_entropy, "cuda", dtype)
    check_nonfinite(launch_distilled_cross_entropy, "cuda")
    check_weight_0(launch_distilled_cross_entropy, launch_cross_entropy, "cuda", dtype)


def test_operator():
    logits, teacher, labels = torch.randn(4, 9), torch.randn(4, 9), torch.tensor([0, 1, -100, 8])
    torch.library.opcheck(distilled_cross_entropy, (logits, teacher, labels, 0.1, 0.5, 2.0, True))
