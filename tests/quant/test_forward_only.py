"""A model that is not trained keeps one set of codes a weight, and computes what the trained one does in evaluation."""

import pytest
import torch

from qtrain.models import build_model
from qtrain.quant import SCHEMES, LowBitLinear, quantize_linears
from tests.cases import without_norms
from tests.models.families import batch, source_of

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 64,
}


@torch.no_grad()
def quantized(family: str, scheme: str, forward_only: bool):
    """The model, and its logits."""
    model = build_model(source_of(family, **SHAPE), seed=1, lazy=True)
    made = SCHEMES.make(scheme, without_norms(scheme), "-")
    quantize_linears(model, made, seed=0, head=model.lm_head, quantize_head=True, forward_only=forward_only)
    return model, model.eval()(batch()[0])


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES.names() if name != "auto"])
def test_logits_are_those_with_both_sets_of_codes(scheme, family):
    _, expected = quantized(family, scheme, False)
    model, found = quantized(family, scheme, True)
    assert torch.equal(found, expected)
    linears = [module for module in model.modules() if isinstance(module, LowBitLinear)]
    assert bool(linears) is (scheme != "bf16")
    for linear in linears:
        assert linear.weight_codes.operands().columns is None
        tied = linear is model.lm_head  # with the embedding, which reads the weight itself
        stored = linear.scheme.stored_format is not None
        assert tied or stored or linear.codes_only


def test_memory_is_that_of_the_codes():
    model, _ = quantized("llama3", "int8", True)
    linear = model.layers[0].mlp.down_proj
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in linear.state_dict().values()}
    held |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in linear.buffers()}
    n, k = linear.weight.shape
    assert sum(held.values()) < n * k + 4 * n + 1024
