"""The residual's norm: gradients no further from fp64 than PyTorch's norm and sum, in any shape."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.kernels.norm.residual_norm import (
    launch_residual_norm_backward,
    residual_norm,
    residual_norm_backward_ref,
)
from tests.kernels.norm.errors import worst_error
from tests.kernels.norm.modes import check_modes

EPS = 1e-6

CASES = [((7, 64), "normal"), ((1, 128), "normal"), ((5, 96), "outlier"), ((6, 33), "zero row"), ((4, 1), "normal")]
CASES += [((3, 256), "nan row"), ((3, 48), "inf"), ((0, 64), "normal"), ((23, 1000), "normal")]
LARGE = [((4097, 896), "normal"), ((1000, 3584), "outlier"), ((333, 8192), "zero row"), ((200, 16384), "normal")]


def draw(shape: tuple[int, int], kind: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """dy, the residual's gradient, x and weight."""
    generator = torch.Generator().manual_seed(sum(shape))
    dy, dresidual, x = (torch.randn(shape, generator=generator) for _ in range(3))
    weight = 1 + 0.3 * torch.randn(shape[1], generator=generator)
    x *= torch.logspace(-3, 2, shape[0])[:, None] if shape[0] else 1
    if kind == "outlier":
        x[:, 1] *= 1000
    elif kind == "zero row":
        x[shape[0] // 2] = 0
    elif kind != "normal":
        x[1, 3] = float(kind.split()[0])
    return [t.to(device, dtype) for t in (dy, dresidual, x, weight)]


def in_pytorch(inputs: list[Tensor], centered: bool) -> tuple[Tensor, ...]:
    """Gradients of x, weight and, of a LayerNorm, bias."""
    dy, dresidual, x, weight = inputs
    leaves = [t.detach().requires_grad_() for t in (x, weight, *([weight * 0] if centered else []))]
    norm = F.layer_norm if centered else F.rms_norm
    y = norm(leaves[0], weight.shape, *leaves[1:], eps=EPS)
    return torch.autograd.grad([leaves[0] * 1, y], leaves, [dresidual, dy])


def check(backward, device: str, dtype: torch.dtype, cases, centered: bool) -> None:
    eps = torch.finfo(dtype).eps
    rounding = eps / 2 if dtype == torch.bfloat16 else 16 * eps  # of the result alone; of each of its operations
    for case in cases:
        inputs = draw(*case, dtype, device)
        # On the CPU: PyTorch's CUDA norm makes a whole row of weight gradients NaN where x has one Inf.
        dx, parameters = (t.cpu() for t in backward(*inputs, EPS, centered))
        truths = in_pytorch([t.cpu().double() for t in inputs], centered)
        assert dx.dtype == dtype and parameters.dtype == torch.float32
        in_dtype = in_pytorch([t.cpu() for t in inputs], centered)
        names, found = ("dx", "dweight", "dbias")[: len(truths)], (dx, *parameters.to(dtype))
        for name, ours, truth, theirs in zip(names, found, truths, in_dtype, strict=True):
            assert torch.equal(ours.isfinite(), truth.isfinite()), (case, name)
            ours, truth, theirs = (t.nan_to_num(0, 0, 0) for t in (ours, truth, theirs))
            # A row of dx is the sum of two terms, each of which is computed with the rounding of its size.
            # A LayerNorm of one column is 0; its gradient, too, but for dy * weight's rounding, divided by sqrt(EPS).
            one_column = eps / 2 / EPS**0.5 if centered and case[0][1] == 1 and dtype == torch.float32 else 0
            allowed = max(1.01 * worst_error(theirs, truth), rounding, one_column)
            assert worst_error(ours, truth) <= allowed, (case, name)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(dtype, centered):
    check(residual_norm_backward_ref, "cpu", dtype, CASES, centered)


@pytest.mark.interpreter
@pytest.mark.parametrize("centered", [False, True])
def test_kernel_in_the_interpreter(centered):
    check(launch_residual_norm_backward, "cpu", torch.float32, CASES, centered)


@pytest.mark.interpreter
def test_a_mean_far_above_the_deviations_in_the_interpreter():
    dy, dresidual, x, weight = draw((5, 96), "normal", torch.float32, "cpu")
    x = x.sign() + 1e4  # deviations that fp32 holds exactly
    dx, parameters = launch_residual_norm_backward(dy, dresidual, x, weight, EPS, True)
    true_dx, true_dweight, _ = in_pytorch([t.double() for t in (dy, dresidual, x, weight)], True)
    assert (dx - true_dx).abs().max() < 2e-3 and (parameters[0] - true_dweight).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype, centered):
    check(launch_residual_norm_backward, "cuda", dtype, CASES + LARGE, centered)


def check_operator(device: str, backend: str) -> None:
    """Autograd and compiled code, with and without recomputation."""
    inputs = draw((7, 64), "normal", torch.float32, device)
    for centered in (False, True):
        torch.library.opcheck(torch.ops.qtrain.residual_norm_backward.default, (*inputs, EPS, centered))

    def layer(x, weight, projection, bias=None):
        x, y = residual_norm(x, weight, EPS, bias)
        return x + y @ projection

    def rms_norm(x, weight, projection):
        return x + F.rms_norm(x, weight.shape, weight, EPS) @ projection

    def layer_norm(x, weight, projection, bias):
        return x + F.layer_norm(x, weight.shape, weight, bias, EPS) @ projection

    shapes = (2, 16, 24), (24,), (24, 24), (24,)
    values = [torch.randn(shape, device=device) for shape in shapes]
    check_modes(layer, values[:3], backend, rms_norm)
    check_modes(layer, values, backend, layer_norm)


def test_operator():
    check_operator("cpu", "aot_eager")


@pytest.mark.gpu
def test_operator_on_gpu():
    check_operator("cuda", "inductor")
