"""A probe of a linear that runs: its products' errors are those of the real products, and it leaves no trace."""

import pytest
import torch
from torch import nn

from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.experts import experts_mlp
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.health.findings import alternatives
from qtrain.quant.health.measures import NAMES
from qtrain.quant.health.probe import LinearProbe, high_precision, probing
from qtrain.quant.swiglu_mlp import swiglu_mlp
from tests.cases import matrix

SCHEME_NAMES = [
    ("int8", {}),
    ("int8", {"granularity": "tensorwise", "stochastic_rounding": True}),
    ("fp8_tensorwise", {}),
    ("fp8_tensorwise", {"scaling": "delayed"}),
    ("fp8_rowwise", {"grad_format": "e5m2"}),
    ("fp8_blockwise", {}),
    ("mxfp8", {}),
    ("nvfp4", {}),
    ("int4", {}),
    ("switchback", {}),
]


def one_linear(scheme: str, kwargs: dict, n: int = 48, k: int = 64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n))
    quantized = quantize_linears(model, SCHEMES.make(scheme, kwargs, "--quantize"), seed=3)
    return model, quantized, LinearProbe(quantized.choices[0], quantized.linears[0])


def relative(read: torch.Tensor, exact: torch.Tensor) -> float:
    return ((read.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("scheme", "kwargs"), SCHEME_NAMES)
def test_errors_are_those_of_the_products_that_run(scheme, kwargs):
    """All rows and columns are sampled here. What the linear computes is one with the codes that the probe has seen."""
    model, quantized, probe = one_linear(scheme, kwargs)
    (linear,), x, dy = quantized.linears, matrix(33, 64, 1, "outlier").requires_grad_(), matrix(33, 48, 2)
    with probing([probe]):
        y = model(x)
        y.backward(dy)
    w, x64, dy64 = (t.detach().double() for t in (linear.weight, x, dy))
    y = y.detach().double() - linear.bias.detach().double()
    found = {name: error.item() for name, error in probe.own.products.items()}
    assert found["output"] == pytest.approx(relative(y, x64 @ w.t()), rel=1e-3, abs=1e-5)
    assert found["grad_input"] == pytest.approx(relative(x.grad, dy64 @ w), rel=1e-3, abs=1e-5)
    assert found["grad_weight"] == pytest.approx(relative(linear.weight.grad, dy64.t() @ x64), rel=1e-3, abs=1e-5)
    assert set(probe.own.tensors) == {"x", "w", "dy"}


def test_what_other_schemes_do_is_what_they_do_when_they_run():
    """Tensors and products of a what-if scheme are those of a linear that runs in it."""
    model, quantized, _ = one_linear("int8", {}, 48, 192)
    others = alternatives(quantized.choices[0], torch.device("cpu"))
    probe = LinearProbe(quantized.choices[0], quantized.linears[0], others)
    x, dy = matrix(33, 192, 1, "outlier").requires_grad_(), matrix(33, 48, 2)
    with probing([probe]):
        model(x).backward(dy)
    assert list(probe.what_if) == ["fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"]
    for name, errors in probe.what_if.items():
        model, _, own = one_linear(name, {}, 48, 192)
        with probing([own]):
            model(x).backward(dy)
        rel = 0.2 if name == "nvfp4" else 1e-5  # rounded stochastically
        assert {k: v.item() for k, v in errors.products.items()} == pytest.approx(
            {k: v.item() for k, v in own.own.products.items()}, rel=rel
        )
        for tensor, measures in own.own.tensors.items():
            torch.testing.assert_close(errors.tensors[tensor], measures, rtol=rel, atol=1e-2 * rel)


@pytest.mark.parametrize("rows", [1, 300])
def test_sampled_errors_are_close_to_those_of_whole_products(rows):
    model, quantized, probe = one_linear("int8", {}, 300, 200)
    x, dy = matrix(rows, 200, 1).requires_grad_(), matrix(rows, 300, 2)
    with probing([probe]):
        y = model(x)
        y.backward(dy)
    w, bias = quantized.linears[0].weight.detach().double(), quantized.linears[0].bias.detach().double()
    true = relative(y.detach().double() - bias, x.detach().double() @ w.t())
    assert probe.own.products["output"].item() == pytest.approx(true, rel=0.15)
    assert probe.own.products["grad_weight"].item() == pytest.approx(
        relative(quantized.linears[0].weight.grad, dy.double().t() @ x.detach().double()), rel=0.15, abs=1e-6
    )


def test_a_probe_changes_nothing_and_records_no_absmax():
    model, quantized, probe = one_linear("fp8_tensorwise", {"scaling": "delayed"})
    (linear,), x, dy = quantized.linears, matrix(9, 64, 1), matrix(9, 48, 2)
    with probing([probe]):
        measured = model(x)
        measured.backward(dy)
    probed, linear.weight.grad = linear.weight.grad, None
    assert linear.probe is None and not linear.x_amax.any() and not linear.dy_amax.any()
    y = model(x)
    y.backward(dy)
    assert torch.equal(y, measured) and torch.equal(linear.weight.grad, probed) and linear.x_amax.any()


def test_the_scale_is_that_of_the_run():
    """Under delayed scaling a tensor that has grown is cut off."""
    model, quantized, probe = one_linear("fp8_tensorwise", {"scaling": "delayed"})
    x = matrix(64, 64, 1)
    model(x).sum().backward()
    quantized.refresh()
    with probing([probe]):
        model(4 * x).sum().backward()
    share = ((4 * x).abs() > x.abs().max() * 464 / 448).float().mean()
    assert probe.own.tensors["x"][NAMES.index("saturated")].item() == pytest.approx(share.item(), abs=1e-6)


@pytest.mark.parametrize("scheme", ["int8", "fp8_blockwise", "bf16"])
def test_in_high_precision_the_linear_is_a_plain_one(scheme):
    model, quantized, _ = one_linear("int8" if scheme == "bf16" else scheme, {})
    linear, x, dy = quantized.linears[0], matrix(9, 64, 1).requires_grad_(), matrix(9, 48, 2)
    with high_precision(quantized.linears):
        y = model(x)
        y.backward(dy)
    assert torch.equal(y, nn.functional.linear(x, linear.weight, linear.bias))
    assert torch.allclose(linear.weight.grad, dy.t() @ x.detach(), atol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "fp8_rowwise", "fp8_tensorwise", "fp8_blockwise"])
def test_a_fused_mlp_shows_the_tensors_between_its_linears(scheme):
    torch.manual_seed(0)
    model = nn.ModuleDict({"gate_up": nn.Linear(32, 128, bias=False), "down": nn.Linear(64, 32, bias=False)})
    quantized = quantize_linears(model, SCHEMES.make(scheme, {}, "--quantize"), seed=3)
    probes = [LinearProbe(*pair) for pair in zip(quantized.choices, quantized.linears, strict=True)]
    x, dy = matrix(40, 32, 1).requires_grad_(), matrix(40, 32, 2)
    plain = swiglu_mlp(model["gate_up"], model["down"], x)
    plain.backward(dy)
    before = [p.grad.clone() for p in model.parameters()]
    with probing(probes):
        seen = swiglu_mlp(model["gate_up"], model["down"], x)
        gradients = torch.autograd.grad(seen, list(model.parameters()), dy)
    assert torch.equal(seen, plain), "the codes are the same"
    for one, other in zip(gradients, before, strict=True):
        assert relative(one, other.double()) < 0.05
    for probe in probes:
        assert set(probe.own.tensors) == {"x", "w", "dy"} and len(probe.own.products) == 3
        assert all(0 < error < 0.1 for error in probe.own.products.values())


@pytest.mark.parametrize("scheme", ["int8", "fp8_rowwise", "fp8_tensorwise", "fp8_blockwise", "nvfp4"])
def test_experts_are_sampled_at_the_one_with_the_most_rows(scheme):
    torch.manual_seed(0)
    model = nn.ModuleDict({"gate_up": GroupedLinear(4, 128, 128), "down": GroupedLinear(4, 64, 128)})
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    x = matrix(60, 128, 1).requires_grad_()
    quantized = quantize_linears(model, SCHEMES.make(scheme, {}, "--quantize"), seed=3)
    assert len(quantized.linears) == 2
    names = {choice.name: choice for choice in quantized.choices}
    probes = {
        name: LinearProbe(names[name], linear, alternatives(names[name], x.device))
        for name, linear in quantized.by_name().items()
    }
    experts = torch.randint(0, 4, (60, 1), generator=torch.Generator().manual_seed(1))
    experts[:40] = 2
    with probing(list(probes.values())):
        y = experts_mlp(model["gate_up"], model["down"], x, experts, torch.ones(60, 1))
        y.backward(matrix(60, 128, 2))
    bound = 0.35 if scheme == "nvfp4" else 0.06
    for name, probe in probes.items():
        assert set(probe.own.tensors) == {"x", "w", "dy"}, name
        assert all(0 < error < bound for error in probe.own.products.values()), (name, probe.own.products)
        assert probe.what_if.keys() == alternatives(names[name], x.device).keys()
        for errors in probe.what_if.values():
            assert len(errors.products) == 3 and all(0 < error < 0.4 for error in errors.products.values())
