"""A frozen low-bit linear with adapters in one function: what the linear and its adapters compute one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.quant import SCHEMES
from qtrain.quant.adapted_linear import adapted_linear
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.schemes.frozen_base import BASES, base_scheme

M, N, K, RANK = 48, 96, 128, 8
CASES = {
    **{f"base {name}": base_scheme(name, "bf16") for name in BASES},
    "base nf4, fp8 products": base_scheme("nf4", "fp8_rowwise"),
    "int8": SCHEMES.make("int8", {}, "--quantize"),
    "fp8_tensorwise delayed": SCHEMES.make("fp8_tensorwise", {"scaling": "delayed"}, "--quantize"),
    "fp8_blockwise": SCHEMES.make("fp8_blockwise", {}, "--quantize"),
    "mxfp8": SCHEMES.make("mxfp8", {}, "--quantize"),
}


def frozen(case: str, dtype: torch.dtype, bias: bool, device: str) -> LowBitLinear:
    torch.manual_seed(0)
    linear = nn.Linear(K, N, bias=bias, dtype=dtype, device=device).requires_grad_(False)
    return LowBitLinear(linear, CASES[case], torch.tensor([1, 2, 3], device=device))


def inputs(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, M // 3, K), (RANK, K), (N, RANK), (3, M // 3, N)]
    x, a, b, dy = (torch.randn(shape, generator=generator).mul(0.3) for shape in shapes)
    x[0, 0, 0] = 50.0
    return [t.to(device, dtype) for t in (x, a, b, dy)]


def run(function, base: LowBitLinear, x: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    y = function(base, *leaves)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def one_by_one(base: LowBitLinear, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return base(x) + F.linear(F.linear(x, a), b)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients(case, bias):
    """In fp32: only the order of additions differs."""
    base, tensors = frozen(case, torch.float32, bias, "cpu"), inputs(torch.float32, "cpu")
    for found, expected in zip(run(adapted_linear, base, *tensors), run(one_by_one, base, *tensors), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_a_weight_that_trains_is_refused():
    """Its gradient would be missing."""
    base, (x, a, b, _) = frozen("int8", torch.float32, False, "cpu"), inputs(torch.float32, "cpu")
    base.weight.requires_grad_()
    with pytest.raises(AssertionError, match="frozen"):
        adapted_linear(base, x, a, b)


def test_no_gradient_of_an_input_that_needs_none():
    """The first layer's input: one product less."""
    base, (x, a, b, dy) = frozen("int8", torch.float32, False, "cpu"), inputs(torch.float32, "cpu")
    a.requires_grad_()
    y = adapted_linear(base, x, a, b)
    y.backward(dy)
    assert x.grad is None and b.grad is None
    torch.testing.assert_close(a.grad, (dy.flatten(0, 1) @ b).t() @ x.flatten(0, 1), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(case, compiled):
    """bf16: the sum is rounded once where one by one it is rounded twice, by at most 2^-8 each."""
    base, tensors = frozen(case, torch.bfloat16, True, "cuda"), inputs(torch.bfloat16, "cuda")
    function = torch.compile(adapted_linear) if compiled else adapted_linear
    for found, expected in zip(run(function, base, *tensors), run(one_by_one, base, *tensors), strict=True):
        assert ((found - expected).norm() / expected.norm()).item() < 2**-7
