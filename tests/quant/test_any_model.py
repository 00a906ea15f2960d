"""`qtrain.quantize`: fresh codes under any optimizer, and what it refuses."""

import gc
import weakref

import pytest
import torch
from torch import nn

import qtrain
from qtrain.core.errors import UserError
from qtrain.quant import LowBitLinear
from qtrain.quant.scheme import SCHEMES
from tests.cases import without_norms


def perceptron(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128, **options), nn.GELU(), nn.Linear(128, 64, **options))


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def codes(model: nn.Module) -> list[torch.Tensor]:
    found = [m.weight_codes.operands().rows for m in model.modules() if isinstance(m, LowBitLinear)]
    return [rows.dequantize(torch.float32) for rows in found]


def of_weights(model: nn.Module) -> list[torch.Tensor]:
    """The codes that a new quantization of the same weights has."""
    plain = perceptron()
    plain.load_state_dict(model.state_dict())
    qtrain.quantize(plain, "int8")
    return codes(plain)


OPTIMIZERS = {
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "torch, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "qtrain": lambda model: qtrain.optim.AdamW8bit(model, lr=0.1),
    "of one layer": lambda model: torch.optim.SGD(model[2].parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_codes_follow_the_weights_under_any_optimizer(name):
    model = perceptron()
    qtrain.quantize(model, "int8")
    before = codes(model)[1].clone()
    step(model, OPTIMIZERS[name](model))
    assert not torch.equal(codes(model)[1], before)
    assert all(torch.equal(a, b) for a, b in zip(codes(model), of_weights(model), strict=True))


def test_values_that_are_loaded_or_set_are_found_by_the_next_forward_pass():
    model, other = perceptron(), perceptron()
    qtrain.quantize(model, "int8")
    with torch.no_grad():
        other[0].weight.mul_(3)
    model.load_state_dict(other.state_dict())
    qtrain.quantize(other, "int8")
    assert torch.equal(model(X), other(X))
    with torch.no_grad():
        model[2].weight.zero_()
        assert torch.equal(model(X), model[2].bias.expand(32, 64))


def test_delayed_scales_roll_with_the_models_own_optimizer_alone():
    model, other = perceptron(), perceptron()
    assert qtrain.quantize(model, "fp8_tensorwise", scaling="delayed").left == {}
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first = [model[0].x_scale.clone(), model[2].dy_scale.clone()]
    assert all(scale > 0 for scale in first)
    model(X * 5)
    step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert torch.equal(model[0].x_scale, first[0])
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model[0].x_scale > 4 * first[0]


def test_hooks_go_with_the_model():
    from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

    before = len(hooks)
    model = perceptron()
    qtrain.quantize(model, "int8")
    assert len(hooks) == before + 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(hooks) == before


def test_each_training_pass_draws_its_own_bits_and_evaluation_none():
    model = perceptron()
    qtrain.quantize(model, "int8", stochastic_rounding=True, seed=3)
    first, second = model(X), model(X)
    assert not torch.equal(first, second)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES.names()) - {"bf16", "auto"}))
def test_every_scheme_trains(scheme):
    model = perceptron().bfloat16()
    quantized = qtrain.quantize(model, scheme, **without_norms(scheme))
    assert "quantized" in str(quantized) and len(quantized.schemes) == 2
    optimizer = qtrain.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = (model(X.bfloat16()).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_overrides_min_size_and_the_head():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    quantized = qtrain.quantize(model, "int8", overrides={"*.mlp.*": "fp8_rowwise", "*.q_proj": "bf16"}, min_size=65)
    assert set(quantized.left) == {"lm_head", *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo")}
    assert quantized.schemes["model.layers.0.mlp.up_proj"] == "fp8_rowwise"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: qtrain.quantize(perceptron(), "fp8_rowise"),
            "unknown scheme 'fp8_rowise'. Did you mean 'fp8_rowwise'?",
        ),
        (lambda: qtrain.quantize(perceptron(), "int8", granularty="rowwise"), "granularty"),
        (
            lambda: qtrain.quantize(nn.Sequential(nn.GELU()), "int8"),
            "Sequential has no nn.Linear or nn.Conv2d to quantize",
        ),
        (lambda: qtrain.quantize(perceptron(), "int8", min_size=500), "fewer than 500"),
        (lambda: qtrain.quantize(perceptron(), "int8", overrides={"0": "int9"}), "int9"),
    ],
)
def test_mistakes_are_one_line(call, says):
    with pytest.raises(UserError) as caught:
        call()
    assert says in str(caught.value) and "\n" not in str(caught.value)
