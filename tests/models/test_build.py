"""Weights are drawn reproducibly, tied where they should be, and refused clearly where there are none."""

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import build_model, read_model_source
from tests.models.families import source_of


def test_same_seed_same_weights_and_other_seed_other_weights():
    first, same, other = (build_model(source_of("qwen2"), seed=s) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.layers[0].attn.qkv.weight, other.layers[0].attn.qkv.weight)
    assert not torch.equal(first.layers[0].attn.o_proj.weight, first.layers[1].attn.o_proj.weight)


def test_a_parameters_values_do_not_depend_on_the_others():
    """The same layer in a shallower model starts from the same weights."""
    deep, shallow = build_model(source_of("llama2")), build_model(source_of("llama2", num_hidden_layers=1))
    assert torch.equal(deep.layers[0].mlp.gate_up.weight, shallow.layers[0].mlp.gate_up.weight)


def test_initial_weights_are_transformers_distribution():
    model = build_model(source_of("qwen2", hidden_size=256, intermediate_size=512, initializer_range=0.05))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.005, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


def test_bf16_weights_are_the_fp32_ones_rounded():
    exact, rounded = build_model(source_of("llama2")), build_model(source_of("llama2"), dtype=torch.bfloat16)
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("llama2", False)])
def test_tied_embeddings_are_one_parameter(name, tied):
    model = build_model(source_of(name))
    assert (model.lm_head.weight is model.embed_tokens.weight) is tied


def test_bad_requests():
    with pytest.raises(UserError, match="--pretrained: quickstart is a shape without weights"):
        build_model(read_model_source("quickstart"), pretrained=True)
    with pytest.raises(UserError, match=r"--model_impl.*Did you mean 'native'"):
        build_model(read_model_source("quickstart"), impl="nativ")
