"""A gated MLP that keeps gate_up's output in 8 bits: forward is exact, gradients are close, whatever computes it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtrain.kernels.swiglu.swiglu import swiglu, swiglu_8bit
from qtrain.quant import SCHEMES, MLPMemory, quantize_linears, supports_swiglu_mlp, swiglu_mlp
from qtrain.quant.adapted_experts import AdaptedExperts, adapted_experts_mlp
from qtrain.quant.experts import experts_mlp
from qtrain.quant.grouped_linear import GroupedLinear
from tests.cases import matrix, sampled
from tests.quant.test_swiglu_mlp import KWARGS, MLP

IN_8_BITS = MLPMemory(gate_up_8bit=True)
RECOMPUTING = MLPMemory(gate_up_8bit=True, recomputes_activation=True)


def run(model, x, dy, memory=MLPMemory()):  # noqa: B008
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    y = swiglu_mlp(model.gate_up, model.down, leaf, None, memory)
    y.backward(dy)
    return [y.detach(), *(p.grad for p in (leaf, model.gate_up.weight, model.down.weight) if p.grad is not None)]


def relative(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def truth(model, x, dy):
    exact = copy.deepcopy(model).double()
    leaf = x.double().requires_grad_()
    gate, up = exact.gate_up(leaf).chunk(2, -1)
    y = exact.down(F.silu(gate) * up)
    y.backward(dy.double())
    return [y, leaf.grad, exact.gate_up.weight.grad, exact.down.weight.grad]


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(("rows", "inner"), [(64, 256), (1, 256), (33, 200), (16, 1)])
def test_gradients_against_fp64(rows, inner, outliers):
    """Within 5% of the norm of each, also where every hundredth column of gate and up is 30 times as large. Odd shapes
    too: blocks that hold gate and up, one row."""
    torch.manual_seed(0)
    model = MLP(128, inner)
    if outliers:
        with torch.no_grad():
            model.gate_up.weight[::100] *= 30
    x, dy = matrix(rows, 128, 0), matrix(rows, 128, 1)
    expected = truth(model, x, dy)
    assert not supports_swiglu_mlp(model.gate_up, model.down)
    assert supports_swiglu_mlp(model.gate_up, model.down, plain=True)
    exact = run(model, x, dy)
    assert all(relative(found, true) < 1e-5 for found, true in zip(exact, expected, strict=True))
    kept, recomputing = run(model, x, dy, IN_8_BITS), run(model, x, dy, RECOMPUTING)
    assert torch.equal(kept[0], exact[0]) and torch.equal(kept[3], exact[3])  # the activation is kept as it was
    assert all(torch.equal(a, b) for a, b in zip(kept[:3], recomputing[:3], strict=True))
    for found, true in zip(recomputing[1:], expected[1:], strict=True):
        assert relative(found, true) < 0.05
    if inner > 1:
        assert relative(kept[1], expected[1]) > 1e-4 and relative(recomputing[3], expected[3]) > 1e-4


@pytest.mark.parametrize("name,kwargs", sampled(KWARGS, lambda _, kwargs: "grad_format" in kwargs))
def test_every_scheme(name, kwargs):
    """Forward is as without; gradients differ by what rounding gate_up does, and by codes that it moves."""
    torch.manual_seed(0)
    model = MLP(128, 256)
    quantized = quantize_linears(model, SCHEMES.make(name, kwargs, "--quantize_kwargs"), seed=3)
    for step in range(2):
        x, dy = matrix(96, 128, 2 * step), matrix(96, 128, 2 * step + 1)
        exact = run(model, x, dy)
        for memory in (IN_8_BITS, RECOMPUTING):
            found = run(model, x, dy, memory)
            assert torch.equal(found[0], exact[0]) and len(found) == len(exact)
            assert all(relative(a, b) < 0.08 for a, b in zip(found[1:], exact[1:], strict=True)), name
            assert relative(found[1], exact[1]) > 0
        quantized.refresh()


@pytest.mark.parametrize("memory", [IN_8_BITS, RECOMPUTING])
def test_zeros_and_what_is_not_finite(memory):
    """A token of zeros has a gradient of zeros; one that is not finite makes its own gradients NaN, and no other's."""
    model = MLP(128, 256)
    x, dy = matrix(6, 128, 0), matrix(6, 128, 1)
    x[1], x[3, 7], x[4, 9] = 0, float("nan"), float("inf")
    y, dx, dup, ddown = run(model, x, dy, memory)
    assert (dx[1] == 0).all() and y[[0, 1, 2, 5]].isfinite().all() and dx[[0, 1, 2, 5]].isfinite().all()
    assert dx[[3, 4]].isnan().all() and dup.isnan().any() and ddown.isnan().any()


@pytest.mark.parametrize("frozen", [("gate_up",), ("down",), ("gate_up", "down")])
def test_frozen_weights_and_evaluation(frozen):
    model, x, dy = MLP(128, 256), matrix(20, 128, 0), matrix(20, 128, 1)
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    for found, exact in zip(run(model, x, dy, RECOMPUTING), run(model, x, dy), strict=True):
        assert relative(found, exact) < 0.05
    with torch.no_grad():
        assert torch.equal(swiglu_mlp(model.gate_up, model.down, x, None, IN_8_BITS), model(x, True))


def test_the_activation_alone():
    """`swiglu_8bit`, where the linears around it have adapters or biases: gradients within 4%."""
    x, dy = matrix(40, 512, 0).view(4, 10, 512), matrix(40, 256, 1).view(4, 10, 256)
    grads, kept = [], []
    for function in (swiglu, swiglu_8bit):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = function(leaf)
        y.backward(dy)
        grads.append(leaf.grad)
        assert torch.equal(y, swiglu(x))
    assert [t.dtype for t in kept] == [torch.float32, torch.float8_e4m3fn, torch.float32]
    assert 0 < relative(grads[1], grads[0]) < 0.04


@pytest.mark.parametrize("adapted", [False, True])
def test_experts(adapted):
    torch.manual_seed(0)
    gate_up, down = GroupedLinear(4, 128, 512), GroupedLinear(4, 256, 128)
    for linear in (gate_up, down):
        nn.init.normal_(linear.weight, std=0.1)
    adapters = [nn.Parameter(0.1 * torch.randn(*shape)) for shape in ((16, 128), (2048, 4), (16, 256), (512, 4))]
    x, dy = matrix(40, 128, 0), matrix(40, 128, 1)
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    weights = torch.rand(40, 2).softmax(-1)
    found = []
    for memory in (MLPMemory(), IN_8_BITS, RECOMPUTING):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        if adapted:
            pairs = AdaptedExperts(gate_up, *adapters[:2]), AdaptedExperts(down, *adapters[2:])
            y, parameters = adapted_experts_mlp(*pairs, leaves[0], experts, leaves[1], memory), adapters
        else:
            y = experts_mlp(gate_up, down, leaves[0], experts, leaves[1], memory)
            parameters = [gate_up.weight, down.weight]
        found.append([y.detach(), *torch.autograd.grad(y, [*leaves, *parameters], dy)])
    for kept in found[1:]:
        assert torch.equal(kept[0], found[0][0])
        errors = [relative(a, b) for a, b in zip(kept[1:], found[0][1:], strict=True)]
        assert errors[0] > 0 and max(errors) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name,kwargs", [("bf16", {}), *KWARGS])
@pytest.mark.parametrize("memory", [IN_8_BITS, RECOMPUTING])
def test_on_gpu(name, kwargs, memory):
    """Forward bit for bit; gradients near those without, in bf16."""
    torch.manual_seed(0)
    model = MLP(256, 512).cuda().bfloat16()
    quantize_linears(model, SCHEMES.make(name, kwargs, "--quantize_kwargs"), seed=3)
    x, dy = (matrix(256, 256, i, dtype=torch.bfloat16).cuda() for i in range(2))
    exact, found = run(model, x, dy), run(model, x, dy, memory)
    assert torch.equal(found[0], exact[0])
    assert all(relative(a, b) < 0.08 for a, b in zip(found[1:], exact[1:], strict=True)), name
