"""BitNet b1.58: its products against the method written out in fp64, its norms, and its options."""

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.models import build_model
from qtrain.quant import SCHEMES, quantize_linears
from tests.cases import matrix
from tests.models.families import batch, source_of


def ternary(w: torch.Tensor) -> torch.Tensor:
    scale = w.double().abs().mean()
    return (w.double() / scale).clamp(-1, 1).round() * scale


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.double().abs().amax(1, keepdim=True) / 127
    return (x.double() / scale).round() * scale


@pytest.mark.parametrize("backward", ["bf16", "int8"])
def test_products_are_the_methods(backward):
    for m, k, n in [(1, 32, 16), (37, 50, 65)]:
        model = nn.Sequential(nn.Linear(k, n, bias=False))
        quantize_linears(model, SCHEMES.make("bitnet", {"backward": backward}, "--quantize"), seed=0)
        w = model[0].weight.detach()
        x, dy = matrix(m, k, 0).requires_grad_(), matrix(m, n, 1)
        y = model(x)
        y.backward(dy)
        rows = rounded(x.detach())
        truth = [rows @ ternary(w).t(), dy.double() @ ternary(w), dy.double().t() @ rows]
        if backward == "int8":
            truth[1:] = rounded(dy) @ ternary(w), rounded(dy.t()) @ rounded(x.detach().t()).t()
        for found, true in zip((y.detach(), x.grad, model[0].weight.grad), truth, strict=True):
            assert (found.double() - true).norm() < 3e-6 * true.norm()


def test_keeps_one_byte_an_element_of_its_input():
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_linears(model, SCHEMES.make("bitnet", {}, "--quantize"), seed=0)
    own, kept = {t.data_ptr() for t in model[0].buffers()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(128, 64, requires_grad=True))
    assert [t.dtype for t in kept if t.data_ptr() not in own and t.numel() > 1000] == [torch.int8]


def test_a_native_decoder_gets_the_norms_that_it_lacks():
    """They are parameters like others, before both output projections, and change nothing but that."""
    model = build_model(source_of("llama2"))
    ids, labels = batch()
    quantize_linears(model, SCHEMES.make("bitnet", {}, "--quantize"), seed=0, head=model.lm_head)
    names = {name for name, _ in model.named_parameters()}
    assert {f"layers.{i}.{part}.sub_norm.weight" for i in range(3) for part in ("attn", "mlp")} <= names
    assert model.config.sub_norm and model.config.model_type == "bitnet"
    seen = []
    model.layers[0].mlp.down_proj.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    model(ids, labels).loss.backward()
    assert (seen[0].detach().square().mean(-1) - 1).abs().max() < 1e-3
    assert model.layers[1].mlp.sub_norm.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "what"), [("qwen3", "QK-norm"), ("llama-biases-linear-rope", "MLP"), ("mistral-window", "window")]
)
def test_an_architecture_that_could_not_be_exported_is_refused(name, what):
    model = build_model(source_of(name))
    with pytest.raises(UserError, match=what) as error:
        quantize_linears(model, SCHEMES.make("bitnet", {}, "--quantize"), seed=0)
    assert '{"sub_norm":false}' in str(error.value)
    quantize_linears(model, SCHEMES.make("bitnet", {"sub_norm": False}, "--quantize"), seed=0)


def test_stochastic_rounding_needs_gradients_in_int8():
    with pytest.raises(UserError, match='"backward":"int8"'):
        SCHEMES.make("bitnet", {"stochastic_rounding": True}, "--quantize")
