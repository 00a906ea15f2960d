"""The size of a decoder against real modules: parameters exactly, FLOPs by the formula."""

import collections
import dataclasses

import pytest
import torch

from qtrain.models import (
    Decoder,
    ModelConfig,
    list_models,
    read_model_source,
)
from qtrain.models.cost.parameters import (
    count_parameters,
    flops_per_token,
    forward_again,
    layer_linears,
    parameter_shapes,
)
from tests.models.families import FAMILIES, MIXTURES

CONFIGS = {name: read_model_source(name).model_config() for name, _ in list_models()}
CONFIGS |= {name: ModelConfig.from_hf(values) for name, values in (FAMILIES | MIXTURES).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_counts_are_those_of_the_module(name):
    with torch.device("meta"):
        model = Decoder(CONFIGS[name])
    counted = count_parameters(CONFIGS[name])
    parameters = dict(model.named_parameters())
    assert counted.total == sum(p.numel() for p in parameters.values())
    embedding = [p for n, p in parameters.items() if n.startswith(("embed_tokens", "lm_head"))]
    assert counted.embedding == sum(p.numel() for p in embedding)
    linear = [m.weight for m in model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert counted.linear == sum(p.numel() for p in linear)
    shapes = collections.Counter(tuple(p.shape) for p in parameters.values() if p.ndim == 2)
    planned = collections.Counter()
    for group in parameter_shapes(CONFIGS[name]):
        planned[group.shape] += group.count
    assert {shape: n for shape, n in planned.items() if len(shape) == 2} == shapes


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_are_those_of_a_model_with_no_more_experts_than_a_token_uses(name):
    config = CONFIGS[name]
    fewer = dataclasses.replace(config.moe, experts=config.moe.per_token)
    counted, active = count_parameters(config), count_parameters(dataclasses.replace(config, moe=fewer))
    assert counted.active < counted.total and active.inactive == 0
    routers = len(config.moe_layers) * (config.moe.experts - fewer.experts) * config.hidden_size
    assert counted.active == active.total + routers
    assert flops_per_token(config, 64).blocks == 6 * active.linear


PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the biases that select experts are no parameters here
}
"""Parameters of the checkpoints on the hub."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_shapes_have_the_published_number_of_parameters(name):
    assert count_parameters(CONFIGS[name]).total == PUBLISHED[name]


def test_linears_of_a_layer():
    found = layer_linears(CONFIGS["qwen2.5-7b"])
    assert {name: linear.shape for name, linear in found.items()} == {
        "qkv": (4608, 3584),
        "o_proj": (3584, 3584),
        "gate_up": (37888, 3584),
        "down_proj": (3584, 18944),
    }


def test_flops_follow_the_designs_formula():
    config, seq_len = CONFIGS["qwen2.5-7b"], 1024
    layers, c, inner, qkv = 28, 3584, 18944, 4608
    flops = flops_per_token(config, seq_len)
    assert flops.blocks == 6 * layers * c * (3 * inner + c + qkv)
    assert flops.head == 6 * 152064 * c
    assert flops.attention == 6 * layers * c * seq_len


def test_what_is_computed_again_of_a_forward_pass():
    """Shares of the layers' products, and of attention."""
    config = CONFIGS["llama2-1b"]
    c, inner = config.hidden_size, config.intermediate_size
    layer = c * (config.qkv_size + config.q_size + 3 * inner)
    assert forward_again(config, frozenset({"norm", "swiglu"})) == {"blocks": 0, "attention": 0}
    found = forward_again(config, frozenset({"qkv", "attention"}))
    assert found == {"blocks": pytest.approx(c * config.qkv_size / layer), "attention": 1}
    assert forward_again(config, frozenset({"ffn"}))["blocks"] == pytest.approx(2 * c * inner / layer)
    assert set(forward_again(config, frozenset({"block"})).values()) == {1.0}
