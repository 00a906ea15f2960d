"""The low-bit linear: its three GEMMs against an fp64 emulation, its codes' freshness, its memory, its random bits."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from qtrain.quant import SCHEMES, LowBitLinear, quantize_linears
from qtrain.quant.quantized_model import SharedLinear
from tests.cases import matrix


def scheme(**options):
    return SCHEMES.make("int8", options, "--quantize_kwargs")


def fake_quantize(x: Tensor) -> Tensor:
    """x rounded to INT8 with one scale a row, as fp64 values: the emulation, written apart from the kernels."""
    scale = (x.double().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    return (x.double() / scale).round().clamp(-127, 127) * scale


def emulate(x: Tensor, w: Tensor, dy: Tensor, output: bool, grad_input: bool, grad_weight: bool):
    """The three GEMMs in fp64 over rounded operands, each rounded along its own rows."""

    def q(t: Tensor, low: bool) -> Tensor:
        return fake_quantize(t) if low else t.double()

    y = q(x, output) @ q(w, output).t()
    dx = q(dy, grad_input) @ q(w.t(), grad_input).t()
    dw = q(dy.t(), grad_weight) @ q(x.t(), grad_weight).t()
    return y, dx, dw


def relative(a: Tensor, truth: Tensor) -> float:
    return float((a.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("low", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("kind", ["normal", "outlier"])
def test_gemms_against_fp64_emulation(low, kind):
    """Every choice of int8 or bf16 per GEMM, M = 1 and odd shapes: equal to the emulation but for fp32 rounding."""
    for seed, (m, k, n) in enumerate([(1, 32, 16), (37, 48, 65), (130, 33, 7)]):
        linear = nn.Linear(k, n)
        with torch.no_grad():
            linear.weight.copy_(matrix(n, k, seed + 50, "normal"))
        names = ("output", "grad_input", "grad_weight")
        options = {name: "int8" if on else "bf16" for name, on in zip(names, low, strict=True)}
        model = nn.Sequential(linear)
        quantize_linears(model, scheme(**options, stochastic_rounding=False), seed=0)
        assert isinstance(model[0], LowBitLinear)
        x, dy = matrix(m, k, seed, kind).requires_grad_(), matrix(m, n, seed + 100, kind)
        y = model(x)
        y.backward(dy)
        true_y, true_dx, true_dw = emulate(x.detach(), linear.weight.detach(), dy, *low)
        assert relative(y.detach(), true_y + linear.bias.detach().double()) < 2e-6
        assert relative(x.grad, true_dx) < 2e-6
        assert relative(linear.weight.grad, true_dw) < 2e-6
        assert relative(linear.bias.grad, dy.double().sum(0)) < 2e-6


def test_error_of_a_real_layer_is_small():
    """INT8 against the unquantized linear on ordinary data: cosine of every result at least 0.999."""
    model = nn.Sequential(nn.Linear(256, 384, bias=False))
    plain = copy.deepcopy(model)
    quantize_linears(model, scheme(), seed=0)
    x, dy = matrix(512, 256, 0), matrix(512, 384, 1)
    results = []
    for m in (plain, model):
        leaf = x.clone().requires_grad_()
        y = m(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, m[0].weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_keeps_codes_not_activations():
    """With all GEMMs in INT8, what is kept for backward of x is one byte an element."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_linears(model, scheme(), seed=0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(128, 64, requires_grad=True))
    own = {t.data_ptr() for t in model[0].buffers()}
    of_input = [t for t in kept if t.data_ptr() not in own and t.numel() > 1000]
    assert [(t.dtype, t.shape) for t in of_input] == [(torch.int8, (64, 128))]


def test_stale_codes_are_caught():
    """An optimizer step without a refresh trips the assertion; after the refresh the new weight is what multiplies."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    quantized = quantize_linears(model, scheme(), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    quantized.track_versions(optimizer)
    x = torch.randn(8, 32)
    before = model(x)
    before.square().sum().backward()
    quantized.assert_fresh()
    optimizer.step()
    assert torch.equal(model(x), before)  # still the old codes: this is what the assertion is for
    with pytest.raises(AssertionError, match="stale codes: 0"):
        quantized.assert_fresh()
    quantized.refresh()
    quantized.assert_fresh()
    assert relative(model(x).detach(), x.double() @ model[0].weight.detach().double().t()) < 0.02


def test_stochastic_rounding_is_keyed_on_step_and_linear():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    quantized = quantize_linears(model, scheme(stochastic_rounding=True), seed=3)
    x = torch.randn(16, 64)
    first, again = model[0](x), model[0](x)
    assert torch.equal(first, again)
    assert not torch.equal(first, model[1](x))
    quantized.set_step(1)
    assert not torch.equal(first, model[0](x))
    quantized.set_step(0)
    assert torch.equal(first, model[0](x))
    assert torch.equal(model.eval()[0](x), model[0](x))


def test_stochastic_gradient_is_unbiased():
    """Averaged over many steps, the stochastic weight gradient approaches the exact one as 1 / sqrt(steps)."""
    model = nn.Sequential(nn.Linear(16, 12, bias=False))
    quantized = quantize_linears(model, scheme(stochastic_rounding=True, output="bf16"), seed=3)
    x, dy = matrix(24, 16, 0), matrix(24, 12, 1)
    total, steps = torch.zeros(12, 16, dtype=torch.float64), 400
    errors = []
    for step in range(steps):
        quantized.set_step(step)
        model.zero_grad()
        model(x).backward(dy)
        total += model[0].weight.grad.double()
        errors.append(relative(model[0].weight.grad, dy.double().t() @ x.double()))
    assert relative(total / steps, dy.double().t() @ x.double()) < 3 * sum(errors) / steps / steps**0.5


def test_compiles_whole_and_does_not_recompile_on_a_new_step():
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 16, bias=False))
    quantized = quantize_linears(model, scheme(), seed=0)
    x = torch.randn(4, 8, 32)
    eager = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.allclose(compiled(x), eager, rtol=1e-5, atol=1e-6)
        quantized.set_step(5)
        compiled(x).sum().backward()


def test_scales_of_several_groups_of_processes_are_reduced_by_each_of_them():
    """In one message of each: of the first and third linear, of whose weights another process has an element twice as
    large, and of the second, of which none has."""
    messages = []

    def twice(statistics: Tensor) -> Tensor:
        messages.append(len(statistics))
        return 2 * statistics

    def same(statistics: Tensor) -> Tensor:
        messages.append(len(statistics))
        return statistics

    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    shared = {"0": SharedLinear(reduce=twice), "1": SharedLinear(reduce=same), "2": SharedLinear(reduce=twice)}
    quantized = quantize_linears(model, SCHEMES.make("fp8_tensorwise", {}, "-"), seed=0, shared=shared.get)
    messages.clear()
    quantized.refresh_weights()
    assert messages == [2, 1]
    for linear, factor in zip(quantized.linears, (2, 1, 2), strict=True):
        scale = linear.weight_codes.operands().rows.scale
        assert scale.item() == pytest.approx(factor * linear.weight.abs().max().item() / 448)
