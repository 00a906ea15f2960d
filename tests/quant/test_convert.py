"""The swap: what is taken, what is left and why, and that parameters stay the objects the optimizer knows."""

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.quant import SCHEMES, LowBitLinear, choose_linears, describe_choices, quantize_linears
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.schemes.frozen_base import Nf4Base
from tests.cases import matrix


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.lm_head.weight = self.embed.weight


def test_swaps_all_but_the_head_and_says_why():
    model = Model()
    names, weights = [n for n, _ in model.named_parameters()], list(model.parameters())
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "--quantize_kwargs"), seed=0, head=model.lm_head)
    assert [type(layer) for layer in model.layers] == [LowBitLinear] * 3
    assert type(model.lm_head) is nn.Linear
    assert [n for n, _ in model.named_parameters()] == names
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    assert "operand" not in "".join(model.state_dict())
    lines = describe_choices(quantized.choices)
    assert any("3 x layers 8 -> 8: quantized" in line for line in lines)
    assert any("lm_head" in line and "--quantize_lm_head" in line for line in lines)


def test_head_on_request_keeps_its_tie():
    model = Model()
    scheme = SCHEMES.make("int8", {}, "--quantize_kwargs")
    quantize_linears(model, scheme, seed=0, head=model.lm_head, quantize_head=True)
    assert isinstance(model.lm_head, LowBitLinear) and model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("name", "options", "rounded"),
    [
        ("int8", {}, {"grad_weight", "grad_input"}),
        ("int8", {"grad_input": "bf16", "stochastic_rounding": False}, {"grad_weight"}),
        ("int8", {"stochastic_rounding": True}, True),
        ("int8_blockwise", {"stochastic_rounding": ("output",)}, {"output", "grad_weight", "grad_input"}),
        ("switchback", {}, {"grad_input"}),
        ("bitnet", {"sub_norm": False, "backward": "int8"}, {"grad_weight", "grad_input"}),
        ("bitnet", {"sub_norm": False}, False),
        ("fp8_rowwise", {}, False),
        ("int8_weight", {"activations": "int8"}, {"grad_weight", "grad_input"}),
        ("int4_weight", {"activations": "int8"}, {"grad_weight", "grad_input"}),
        ("int4_weight", {"activations": "int8_sr"}, True),
        ("int8_weight", {}, False),
    ],
)
def test_a_head_rounds_integer_gradients_of_logits_stochastically(name, options, rounded):
    model = Model()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # a latent weight must not be shared
    scheme = SCHEMES.make(name, options, "--quantize_kwargs")
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, quantize_head=True)
    found = model.lm_head.scheme.stochastic_rounding
    assert (set(found) if isinstance(found, tuple) else found) == rounded
    assert all(layer.scheme == scheme for layer in model.layers)
    (line,) = (line for line in describe_choices(quantized.choices) if "lm_head" in line)
    assert ("logits rounded stochastically" in line) == (found != scheme.stochastic_rounding)


@pytest.mark.parametrize("name", ["int8_weight", "int4_weight"])
def test_a_head_of_stored_weights_draws_for_its_gradients_alone(name):
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    scheme = SCHEMES.make(name, {"activations": "int8"}, "--quantize_kwargs")
    quantized = quantize_linears(model, scheme, seed=0, head=model[0], quantize_head=True)
    x, dy, found = matrix(5, 64, 1), matrix(5, 32, 2), []
    for step in (0, 1):
        quantized.set_step(step)
        y = model(x.requires_grad_())
        found.append((y.detach(), *torch.autograd.grad(y, (x, model[0].weight), dy)))
    same = [torch.equal(first, second) for first, second in zip(*found, strict=True)]
    assert same == [True, False, False]  # y, dx, dw


def test_experts_are_no_head():
    model = nn.Sequential(GroupedLinear(2, 128, 128))
    (choice,) = choose_linears(model, Nf4Base(activations="int8"), device=torch.device("cpu"))
    assert choice.scheme.activations == "none" and not choice.rounds_logits


def test_small_linears_are_left_on_request():
    """The size is that of the smaller side."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 16), nn.Linear(16, 15))
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "--quantize"), seed=0, min_size=16)
    assert [type(m) is LowBitLinear for m in model] == [False, True, False]
    assert "fewer than 16" in quantized.choices[0].reason and "--quantize_min_size" in quantized.choices[2].reason


def test_bf16_swaps_nothing():
    model = Model()
    quantized = quantize_linears(model, SCHEMES.make("bf16", {}, "--quantize_kwargs"), seed=0)
    assert not quantized.linears and all(c.reason for c in quantized.choices)


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("int9", {}, "unknown scheme 'int9'. Did you mean 'int8'?"),
        ("int8", {"outputs": "int8"}, "Did you mean 'output'?"),
        ("int8", {"output": "int4"}, "one of 'int8', 'bf16'"),
        ("int8", {"stochastic_rounding": 1}, "true or false"),
        ("bf16", {"output": "int8"}, "unknown key 'output'"),
    ],
)
def test_bad_choices_are_refused(name, options, message):
    with pytest.raises(UserError, match="--quantize") as error:
        SCHEMES.make(name, options, "--quantize")
    assert message in str(error.value)


def test_the_plan_says_once_that_the_scheme_quantizes_nothing():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8))
    choices = choose_linears(model, SCHEMES.make("bf16", {}, "--quantize"), device=torch.device("cpu"))
    assert [line.split() for line in describe_choices(choices)] == [
        ["3", "linears:", "all", "left,", "the", "scheme", "quantizes", "nothing"]
    ]
