"""The gated activation: values and gradients against fp64, kernel and reference alike, in eager and compiled code."""

import pytest
import torch

from qtrain.kernels.swiglu.swiglu import (
    launch_swiglu,
    launch_swiglu_backward,
    swiglu,
    swiglu_backward_ref,
    swiglu_ref,
)
from tests.cases import matrix

SHAPES = [(1, 2), (3, 66), (17, 2048), (5, 2 * 1025), (0, 64)]


def truth(x, dy):
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    y.backward(dy.double())
    return y.detach(), leaf.grad


def check(forward, backward, device, dtype):
    for seed, (rows, width) in enumerate(SHAPES):
        x = matrix(rows, width, seed, "outlier" if rows else "normal", dtype).to(device)
        dy = matrix(rows, width // 2, seed + 9, "normal", dtype).to(device)
        true_y, true_dx = truth(x, dy)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(forward(x).double(), true_y, rtol=2 * eps, atol=1e-6)
        assert torch.allclose(backward(dy, x).double(), true_dx, rtol=2 * eps, atol=1e-4 * eps / 1e-7 * 1e-2)


def test_reference():
    check(swiglu_ref, swiglu_backward_ref, "cpu", torch.float32)
    check(swiglu_ref, swiglu_backward_ref, "cpu", torch.bfloat16)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launch_swiglu, launch_swiglu_backward, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    check(launch_swiglu, launch_swiglu_backward, "cuda", dtype)


@pytest.mark.gpu
def test_more_rows_than_a_grid_has_in_its_second_dimension():
    """Routed tokens of a mixture: 70,000 rows."""
    x, dy = torch.randn(70_000, 64, device="cuda"), torch.randn(70_000, 32, device="cuda")
    assert torch.allclose(launch_swiglu(x), swiglu_ref(x), atol=1e-5)
    assert torch.allclose(launch_swiglu_backward(dy, x), swiglu_backward_ref(dy, x), atol=1e-5)


def check_operator(device):
    x = torch.randn(2, 3, 40, device=device, dtype=torch.float32, requires_grad=True)
    torch.library.opcheck(torch.ops.qtrain.swiglu.default, (x.detach().flatten(0, 1).requires_grad_(),))
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager")
    swiglu(x).square().sum().backward()
    eager, x.grad = x.grad, None
    compiled(x).square().sum().backward()
    assert torch.equal(x.grad, eager)


def test_operator():
    check_operator("cpu")


@pytest.mark.gpu
def test_operator_on_gpu():
    check_operator("cuda")
