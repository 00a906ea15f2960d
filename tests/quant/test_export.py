"""A model trained in any scheme, exported, gives the same loss in transformers, within the scheme's rounding."""

import json

import pytest
import torch

from qtrain.models import Decoder, ModelSource, build_model, export_hf, read_model_source
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.tensors.stored_weight import StoredWeight

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
ROUNDING = {
    "nvfp4": 0.1,
    "bf16": 1e-6,
    "int8_weight": 1e-6,
    "int4_weight": 1e-6,
    "int8": 0.005,
    "bitnet": 0.005,
    "binary": 0.005,
    "int4": 0.1,
}
"""Relative difference of losses; where it is not given, that of FP8, which keeps half the bits of INT8."""


def source_of(model_type: str, **changes) -> ModelSource:
    return ModelSource(model_type, {"model_type": model_type, **SHAPE, **changes}, "--model")


def trained(source: ModelSource, name: str, options: dict | None = None, impl: str = "native", steps: int = 4):
    """A few steps of plain gradient descent; returns the model in evaluation mode."""
    torch.manual_seed(0)
    model = build_model(source, impl=impl, seed=1)
    scheme = SCHEMES.make(name, options or {}, "--quantize")
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head)
    ids = torch.randint(0, 97, (4, 17))
    for step in range(steps):
        quantized.set_step(step)
        model(ids[:, :-1], ids[:, 1:]).loss.div(64).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if isinstance(parameter, StoredWeight):
                    parameter.store_(parameter.dequantize() - 0.5 * parameter.grad)
                else:
                    parameter -= 0.5 * parameter.grad
                parameter.grad = None
        quantized.refresh()
    return model.eval(), ids


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).item()


def check_export(model, source: ModelSource, ids: torch.Tensor, folder, rounding: float):
    from transformers import AutoModelForCausalLM

    export_hf(model, source, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        ours, exported = loss_of(model(ids[:, :-1]), ids), loss_of(theirs(ids[:, :-1]).logits, ids)
    assert exported == pytest.approx(ours, rel=rounding)
    return theirs


@pytest.mark.parametrize("name", [n for n in SCHEMES.names() if n != "auto"])
def test_every_scheme(name, tmp_path):
    source = source_of("llama")
    model, ids = trained(source, name)
    check_export(model, source, ids, tmp_path / "hf", ROUNDING.get(name, 0.02))


@pytest.mark.parametrize("name", ["int8_weight", "int4_weight", "bitnet"])
def test_transformers_models_too(name, tmp_path):
    """What is saved by transformers itself is as plain: no codes, no scales, no norms that it does not know."""
    source = source_of("qwen2")
    model, ids = trained(source, name, impl="hf")
    check_export(model, source, ids, tmp_path / "hf", ROUNDING.get(name, 0.02))


def test_bitnet_is_exported_as_bitnet_and_loads_here_again(tmp_path):
    """Biases of q, k and v, which transformers' BitNet has only together with o_proj's, included."""
    source = source_of("qwen2", tie_word_embeddings=True)
    model, ids = trained(source, "bitnet")
    theirs = check_export(model, source, ids, tmp_path / "hf", 0.005)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["hidden_act"]) == ("bitnet", "silu")
    weight = theirs.model.layers[0].self_attn.q_proj.weight
    assert len(weight.unique()) == 3
    again = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)
    assert isinstance(again, Decoder)
    with torch.no_grad():
        difference = again(ids[:, :-1]) - theirs(ids[:, :-1]).logits
    assert difference.abs().max() < 1e-4


def test_bitnet_without_its_norms_keeps_the_architecture(tmp_path):
    source = source_of("llama")
    model, ids = trained(source, "bitnet", {"sub_norm": False, "backward": "int8"})
    theirs = check_export(model, source, ids, tmp_path / "hf", 0.005)
    assert theirs.config.model_type == "llama"
