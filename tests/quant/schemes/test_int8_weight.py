"""Schemes whose weights live in low bits: their products against fp64, and that nothing in high precision is left."""

import pytest
import torch
from torch import nn

from qtrain.quant import SCHEMES, quantize_linears
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.plan.scheme_bytes import code_bytes, weight_bytes
from tests.cases import matrix

NAMES = ["int8_weight", "int4_weight"]


def swapped(name: str, k: int, n: int, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n))
    quantized = quantize_linears(model, SCHEMES.make(name, options, "--quantize"), seed=0)
    return model, quantized


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x in INT8 with a scale a row, as fp64 values."""
    scale = (x.double().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return (x.double() / scale).round() * scale


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activations", ["none", "int8"])
def test_products_against_fp64(name, activations):
    for m, k, n in [(1, 32, 16), (37, 200, 65)]:
        model, _ = swapped(name, k, n, activations=activations)
        w = model[0].weight.dequantize().double()
        x, dy = matrix(m, k, 0, "outlier").requires_grad_(), matrix(m, n, 1)
        y = model(x)
        y.backward(dy)
        q = (lambda t: t.double()) if activations == "none" else rounded
        w_rows = w if name == "int8_weight" else q(w)  # INT8 codes are the operand themselves
        truth = {
            "y": q(x.detach()) @ w_rows.t() + model[0].bias.detach().double(),
            "dx": q(dy) @ q(w.t()).t(),
            "dw": q(dy.t()) @ q(x.detach().t()).t(),
        }
        for found, true in zip((y.detach(), x.grad, model[0].weight.grad), truth.values(), strict=True):
            assert (found.double() - true).norm() < 3e-6 * true.norm()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_high_precision_is_left(name):
    """Bytes of parameters and buffers are those that the scheme tells the plan, scales of rows aside."""
    for activations in ("none", "int8"):
        model, _ = swapped(name, 512, 256, activations=activations)
        scheme = model[0].scheme
        tensors = {t.data_ptr(): t for t in (*model[0].weight.inner.values(), *model[0].buffers()) if t.ndim == 2}
        expected = 512 * 256 * (weight_bytes(scheme, 2) + code_bytes(scheme))
        assert sum(t.nbytes for t in tensors.values()) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activations", ["none", "int8", "int8_sr"])
def test_an_update_is_what_multiplies_after_the_refresh(name, activations):
    model, quantized = swapped(name, 64, 32, activations=activations)
    model.eval()
    weight = model[0].weight
    assert isinstance(weight, StoredWeight)
    weight.store_(matrix(32, 64, 8))
    with pytest.raises(AssertionError, match="stale codes"):
        quantized.assert_fresh()
    quantized.refresh()
    quantized.assert_fresh()
    x = matrix(5, 64, 9)
    true = x.double() @ weight.dequantize().double().t() + model[0].bias.detach().double()
    assert (model(x).double() - true).norm() < 0.02 * true.norm()


def test_gradients_rounded_stochastically_differ_by_step():
    model, quantized = swapped("int8_weight", 64, 32, activations="int8_sr")
    x, grads = matrix(5, 64, 9), []
    for step in (0, 1, 0):
        quantized.set_step(step)
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append(model[0].weight.grad)
    assert torch.equal(grads[0], grads[2]) and not torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole(name):
    torch._dynamo.reset()
    model, quantized = swapped(name, 64, 32, activations="int8_sr")
    x = matrix(5, 64, 9)
    eager = model(x)
    eager.sum().backward()
    gradient, model[0].weight.grad = model[0].weight.grad, None
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        y = compiled(x)
        y.sum().backward()
        assert torch.equal(y, eager) and torch.equal(model[0].weight.grad, gradient)
        quantized.set_step(3)
        model[0].weight.store_(matrix(32, 64, 2), torch.tensor([0, 1, 2]))
        quantized.refresh()
        assert torch.equal(compiled(x), model(x))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", NAMES)
def test_no_dequantized_weight_is_kept_from_forward_to_backward(name):
    """Compiled, where forward's and backward's dequantization would be one operation. What is kept is the input."""
    torch._dynamo.reset()
    model, _ = swapped(name, 256, 512, activations="none")
    compiled, x = torch.compile(model, fullgraph=True), matrix(64, 256, 9).requires_grad_()
    compiled(x).sum().backward()  # compiles backward too, which may decide what is kept
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compiled(x)
    plain = [t for t in kept if not isinstance(t, StoredWeight) and t.numel() >= 256 * 512 // 2]
    assert {t.data_ptr() for t in plain} <= {t.data_ptr() for t in model.buffers()}
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_a_shared_weight_and_odd_widths_are_left():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False), nn.Linear(10, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    quantized = quantize_linears(model, SCHEMES.make("int4_weight", {}, "--quantize"), seed=0)
    reasons = {choice.name: choice.reason for choice in quantized.choices}
    assert "another module" in reasons["1"] and reasons["2"] is None and "multiples of 2" in reasons["3"]
