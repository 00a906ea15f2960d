"""Frozen low-bit linears with adapters in one function: what linears and adapters compute one by one."""

import pytest
import torch
from torch import Tensor, nn

from qtrain.kernels.swiglu.swiglu import swiglu
from qtrain.quant import SCHEMES
from qtrain.quant.adapted_linear import (
    Adapted,
    AdapterModule,
    adapted_linear,
    adapted_mlp,
    adapted_pair,
    adapters_read_codes,
)
from qtrain.quant.execute import quantize_operands
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.schemes.frozen_base import BASES, base_scheme
from qtrain.quant.tensor_roles import NeedsOperand

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
    """y, dx, da, db."""
    leaves = [t.clone().requires_grad_() for t in (x, a, b)]
    y = function(base, *leaves)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def one_by_one(base: LowBitLinear, x: Tensor, a: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """The same from the linear's own function, and the products of adapters with what its GEMMs read."""
    leaf = x.clone().requires_grad_()
    y = base(leaf)
    y.backward(dy)
    read, dy_read = (read_by_adapters(base, name, t.flatten(0, -2)) for name, t in (("x", x), ("dy", dy)))
    z, dz = read @ a.t(), dy_read @ b
    return [y.detach() + (z @ b.t()).view(y.shape), leaf.grad + (dz @ a).view(x.shape), dz.t() @ read, dy_read.t() @ z]


def read_by_adapters(base: LowBitLinear, name: str, t: Tensor) -> Tensor:
    if not adapters_read_codes(base.scheme, name):
        return t
    return quantize_operands(t, base.arguments().request(name, NeedsOperand(True, False))).rows.values(t.dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients(case, bias):
    """In fp32: only the order of additions differs."""
    base, tensors = frozen(case, torch.float32, bias, "cpu"), inputs(torch.float32, "cpu")
    for found, expected in zip(run(adapted_linear, base, *tensors), one_by_one(base, *tensors), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_who_reads_codes():
    """Scales of blocks, and no codes at all, leave the adapters the tensor itself."""
    reading = {case for case, scheme in CASES.items() if adapters_read_codes(scheme, "x")}
    assert reading == {"base int8", "base fp8", "base nf4, fp8 products", "int8", "fp8_tensorwise delayed"}


def test_what_is_kept_is_codes():
    """x [M, K] is not: one byte an element, and its scales."""
    base, (x, a, b, _) = frozen("base fp8", torch.float32, False, "cpu"), inputs(torch.float32, "cpu")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        adapted_linear(base, x.requires_grad_(), a.requires_grad_(), b.requires_grad_())
    assert [t.element_size() for t in saved if t.numel() == M * K] == [1]


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
    read, dy_read = (read_by_adapters(base, name, t.flatten(0, 1)) for name, t in (("x", x), ("dy", dy)))
    torch.testing.assert_close(a.grad, (dy_read @ b.detach()).t() @ read, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(case, compiled):
    """bf16: the sum is rounded once where one by one it is rounded twice, by at most 2^-8 each."""
    base, tensors = frozen(case, torch.bfloat16, True, "cuda"), inputs(torch.bfloat16, "cuda")
    function = torch.compile(adapted_linear) if compiled else adapted_linear
    for found, expected in zip(run(function, base, *tensors), one_by_one(base, *tensors), strict=True):
        assert ((found - expected).norm() / expected.norm()).item() < 2**-7


# ---- an MLP ----------------------------------------------------------------------------------------------------------

INNER = 96


class Plain(AdapterModule):
    """A linear with adapters and nothing else."""

    def __init__(self, base: LowBitLinear, a: Tensor, b: Tensor):
        super().__init__()
        self.base, self.a, self.b = base, a, b

    def base_and_adapters(self, dtype: torch.dtype) -> Adapted:
        return Adapted(self.base, self.a, self.b)


def pair(case: str, dtype: torch.dtype, device: str, inner: int = INNER) -> tuple[list[LowBitLinear], list[Tensor]]:
    """gate_up and down of K features; x, their adapters, and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)
    key, bases = torch.tensor([1, 2, 3], device=device), []
    for n, k in ((2 * inner, K), (K, inner)):
        linear = nn.Linear(k, n, bias=False)
        linear.weight.data = torch.randn(n, k, generator=generator) * k**-0.5
        bases.append(LowBitLinear(linear.to(device, dtype).requires_grad_(False), CASES[case], key))
    shapes = [(M, K), (RANK, K), (2 * inner, RANK), (RANK, inner), (K, RANK), (M, K)]
    tensors = [torch.randn(shape, generator=generator).mul(0.3).to(device, dtype) for shape in shapes]
    tensors[0][0, 0], tensors[5][1] = 50.0, 0.0  # an outlier; a row of zeros
    return bases, tensors


def run_mlp(function, bases: list[LowBitLinear], tensors: list[Tensor]) -> list[Tensor]:
    *leaves, dy = (t.clone().requires_grad_() for t in tensors)
    x, a_up, b_up, a_down, b_down = leaves
    y = function(Adapted(bases[0], a_up, b_up), Adapted(bases[1], a_down, b_down), x)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def two_linears(gate_up: Adapted, down: Adapted, x: Tensor) -> Tensor:
    return adapted_linear(down.base, swiglu(adapted_linear(gate_up.base, x, *gate_up[1:])), *down[1:])


@pytest.mark.parametrize("case", ["base fp8", "base int8", "base nf4, fp8 products"])
def test_an_mlp_is_its_two_linears(case):
    """What is between them is quantized as it is computed: the same codes."""
    bases, tensors = pair(case, torch.float32, "cpu")
    for found, expected in zip(run_mlp(adapted_mlp, bases, tensors), run_mlp(two_linears, bases, tensors), strict=True):
        assert torch.equal(found, expected)


def test_which_pairs_are_one_function():
    def taken(case: str, inner: int = INNER, **changes) -> bool:
        bases, (_, a_up, b_up, a_down, b_down, _) = pair(case, torch.float32, "cpu", inner)
        for name, value in changes.items():
            setattr(bases[1], name, value)
        return adapted_pair(Plain(bases[0], a_up, b_up), Plain(bases[1], a_down, b_down), torch.float32) is not None

    assert taken("base fp8") and taken("base int8") and taken("base nf4, fp8 products")
    assert not taken("base nf4") and not taken("fp8_blockwise") and not taken("fp8_tensorwise delayed")
    assert not taken("base fp8", inner=40)  # no whole words
    assert not taken("base fp8", probe=lambda arguments: arguments)
    assert not taken("base fp8", bias=nn.Parameter(torch.zeros(K)))
    assert adapted_pair(nn.Linear(K, 2 * INNER), nn.Linear(INNER, K), torch.float32) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["base fp8", "base int8"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inner", [INNER, 4864])
def test_an_mlp_on_a_gpu(case, compiled, inner):
    bases, tensors = pair(case, torch.bfloat16, "cuda", inner)
    function = torch.compile(adapted_mlp) if compiled else adapted_mlp
    for found, expected in zip(run_mlp(function, bases, tensors), run_mlp(two_linears, bases, tensors), strict=True):
        assert ((found - expected).norm() / expected.norm()).item() < 2**-7
