"""A gated MLP as one function: bit for bit the two linears with the activation between them."""

import copy

import pytest
import torch
from torch import nn

from qtrain.kernels.swiglu.swiglu import swiglu
from qtrain.quant import SCHEMES, quantize_linears, supports_swiglu_mlp, swiglu_mlp
from tests.cases import matrix, sampled

KWARGS = [
    ("int8", {}),
    ("int8", {"stochastic_rounding": True}),
    ("int8", {"stochastic_rounding": ["grad_weight"]}),
    ("int8", {"grad_weight": "bf16"}),
    ("int8", {"granularity": "tensorwise"}),
    ("switchback", {}),
    ("int8_blockwise", {}),
    ("fp8_tensorwise", {}),
    ("fp8_tensorwise", {"scaling": "delayed"}),
    ("fp8_tensorwise", {"scaling": "delayed", "grad_format": "e5m2"}),
    ("fp8_tensorwise", {"scaling": "delayed", "stochastic_rounding": ["grad_input", "grad_weight"]}),
    ("fp8_rowwise", {}),
    ("fp8_rowwise", {"stochastic_rounding": True}),
    ("fp8_rowwise_gw_hp", {}),
    ("fp8_blockwise", {}),
    ("fp8_blockwise", {"grad_weight_x": "128x128"}),
    ("fp8_blockwise", {"grad_weight_x": "128x128", "stochastic_rounding": ["grad_weight"]}),
    ("mxfp8", {}),
    ("int4", {}),
    ("int8_weight", {}),
    ("int4_weight", {}),
]


class MLP(nn.Module):
    def __init__(self, width, inner, bias=False):
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias), nn.Linear(inner, width, bias)

    def forward(self, x, fused):
        return swiglu_mlp(self.gate_up, self.down, x) if fused else self.down(swiglu(self.gate_up(x)))


def pair(name, kwargs, device, dtype, width=128, inner=256, bias=False):
    torch.manual_seed(0)
    model = MLP(width, inner, bias).to(device, dtype)
    models = [model, copy.deepcopy(model)]
    return models, [quantize_linears(m, SCHEMES.make(name, kwargs, "--quantize_kwargs"), seed=3) for m in models]


def results(model, x, dy, fused, run=None):
    leaf = x.clone().requires_grad_()
    y = (model if run is None else run)(leaf, fused)
    model.zero_grad()
    y.backward(dy)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), leaf.grad, *grads, *(b.detach().clone() for b in model.buffers())]


def equal(a, b):
    assert len(a) == len(b)
    return all(torch.equal(x.double(), y.double()) for x, y in zip(a, b, strict=True))


def check(name, kwargs, device, dtype, bias=False):
    (plain, fused), quantized = pair(name, kwargs, device, dtype, bias=bias)
    assert supports_swiglu_mlp(fused.gate_up, fused.down)
    for step in range(3):
        x, dy = (matrix(2 * 48, 128, 10 * step + i, "outlier", dtype).to(device).view(2, 48, 128) for i in range(2))
        expected = results(plain, x, dy, False)
        assert equal(results(fused, x, dy, True), expected), (name, kwargs, step)
        assert expected[1].abs().sum() > 0 and len(expected) >= 4
        for q in quantized:
            q.refresh()
    plain.eval(), fused.eval()
    with torch.no_grad():
        assert torch.equal(fused(x, True), plain(x, False))


@pytest.mark.parametrize("name,kwargs", KWARGS)
def test_every_scheme(name, kwargs):
    check(name, kwargs, "cpu", torch.float32)


@pytest.mark.parametrize("name,kwargs", sampled(KWARGS, lambda name, kwargs: "stochastic_rounding" in kwargs))
def test_biases(name, kwargs):
    check(name, kwargs, "cpu", torch.float32, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name,kwargs", KWARGS)
def test_every_scheme_on_gpu(name, kwargs, bias):
    check(name, kwargs, "cuda", torch.bfloat16, bias)


@pytest.mark.parametrize(
    "name,kwargs,keeps", [("int8", {}, False), ("fp8_rowwise", {}, False), ("fp8_tensorwise", {}, True)]
)
def test_what_is_kept_of_the_activation(name, kwargs, keeps):
    """Its codes; where scales are those of rows, the maxima of its columns only."""
    (_, model), _ = pair(name, kwargs, "cpu", torch.float32, width=128, inner=256)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_mlp(model.gate_up, model.down, matrix(40, 128, 0, "normal").requires_grad_())
    assert ((256, 40) in [tuple(t.shape) for t in kept]) == keeps
    assert any(t.shape == (256,) and t.dtype == torch.int32 for t in kept) == (not keeps)


@pytest.mark.parametrize(
    "name,kwargs", [("int8_blockwise", {"block": "128x128"}), *(case for case in KWARGS if case[0] == "fp8_blockwise")]
)
def test_scales_of_128_blocks_are_computed_with_the_activation(name, kwargs):
    """And with its gradient: neither is written for a quantizer that reads it."""
    (_, model), _ = pair(name, kwargs, "cpu", torch.float32)
    ops = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ops.append(op.name())
            return op(*args, **(kwargs or {}))

    x, dy = matrix(40, 128, 0, "normal").requires_grad_(), matrix(40, 128, 1, "normal")
    with Record():
        swiglu_mlp(model.gate_up, model.down, x).backward(dy)
    ops = [op for op in ops if "quantize" in op or "swiglu" in op]
    assert ops == 2 * ["qtrain::quantize_dual", "qtrain::quantize_swiglu"]  # x, activation; dy, its gradient


FROZEN = [("gate_up.weight",), ("down.weight",), ("gate_up.weight", "down.weight"), ("gate_up.bias", "down.bias")]


@pytest.mark.parametrize("scheme,kwargs", [("int8", {}), ("fp8_tensorwise", {"scaling": "delayed"})])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parameters(frozen, scheme, kwargs):
    (plain, fused), _ = pair(scheme, kwargs, "cpu", torch.float32, bias=True)
    for model in (plain, fused):
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    x, dy = matrix(40, 128, 0, "normal"), matrix(40, 128, 1, "normal")
    assert equal(results(fused, x, dy, True), results(plain, x, dy, False))
    for model in (plain, fused):
        assert [n for n, p in model.named_parameters() if p.grad is None] == list(frozen)


def test_biases_alone_are_trained():
    (plain, fused), _ = pair("fp8_tensorwise", {"scaling": "delayed"}, "cpu", torch.float32, bias=True)
    x, dy = matrix(40, 128, 0, "normal"), matrix(40, 128, 1, "normal")
    for model, is_fused in ((plain, False), (fused, True)):
        model.gate_up.weight.requires_grad_(False), model.down.weight.requires_grad_(False)
        model(x, is_fused).backward(dy)
        assert [n for n, p in model.named_parameters() if p.grad is not None] == ["gate_up.bias", "down.bias"]
    for name in ("gate_up.bias", "down.bias"):
        assert torch.equal(fused.get_parameter(name).grad, plain.get_parameter(name).grad)


def test_an_input_without_gradient():
    (plain, fused), _ = pair("fp8_rowwise", {}, "cpu", torch.float32)
    x, dy = matrix(40, 128, 0, "normal"), matrix(40, 128, 1, "normal")
    for model, is_fused in ((plain, False), (fused, True)):
        model(x, is_fused).backward(dy)
    assert equal([p.grad for p in fused.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize(
    "name,kwargs",
    sampled(KWARGS, lambda name, kwargs: bool(kwargs) and not kwargs.keys() >= {"scaling", "stochastic_rounding"}),
)
def test_compiled_whole(name, kwargs):
    torch._dynamo.reset()
    (_, fused), _ = pair(name, kwargs, "cpu", torch.float32)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    eager = copy.deepcopy(fused)
    x, dy = matrix(40, 128, 0, "normal"), matrix(40, 128, 1, "normal")
    assert equal(results(fused, x, dy, True, compiled), results(eager, x, dy, True))


def test_another_module_is_not_taken():
    (_, fused), _ = pair("int8", {}, "cpu", torch.float32)
    assert not supports_swiglu_mlp(nn.Linear(4, 4, bias=False), fused.down)
