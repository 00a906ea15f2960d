"""The native decoder computes what transformers computes, and keeps documents apart."""

import pytest
import torch

from qtrain.models import ModelConfig, apply_recompute, compile_layers
from tests.models.beside_transformers import backward_of_both
from tests.models.families import DOC_IDS, FAMILIES, batch, drawn, source_of


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal to 1e-4 of the scale, which is what fp32 sums in another order may differ by."""
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_transformers(name, tmp_path):
    """Through the files: what export writes, transformers loads as the same function with the same gradients."""
    ours, theirs = backward_of_both(name, tmp_path / "hf", close)

    layer, other = ours.layers[1], theirs.model.layers[1]
    attention = other.self_attn
    qkv = torch.cat([p.weight.grad for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    gate_up = torch.cat([other.mlp.gate_proj.weight.grad, other.mlp.up_proj.weight.grad])
    assert close(ours.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad)
    assert close(ours.lm_head.weight.grad, theirs.lm_head.weight.grad)
    assert close(layer.attn.qkv.weight.grad, qkv)
    assert close(layer.attn.o_proj.weight.grad, attention.o_proj.weight.grad)
    assert close(layer.mlp.gate_up.weight.grad, gate_up)
    assert close(layer.mlp.down_proj.weight.grad, other.mlp.down_proj.weight.grad)
    assert close(layer.attn_norm.weight.grad, other.input_layernorm.weight.grad)
    assert close(layer.mlp_norm.weight.grad, other.post_attention_layernorm.weight.grad)
    if layer.attn.q_norm is not None:
        assert close(layer.attn.k_norm.weight.grad, attention.k_norm.weight.grad)
    if layer.attn.qkv.bias is not None:
        biases = torch.cat([p.bias.grad for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        assert close(layer.attn.qkv.bias.grad, biases)


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3"])
def test_doc_ids_make_each_document_as_if_alone(name):
    """Logits and gradients of packed documents equal those of the documents one by one, positions included."""
    packed, alone = drawn(source_of(name)), drawn(source_of(name))
    ids, labels = batch()
    logits = packed(ids, doc_ids=DOC_IDS)
    packed(ids, labels, DOC_IDS).loss.backward()
    for row in range(len(ids)):
        for document in DOC_IDS[row].unique():
            inside = DOC_IDS[row] == document
            part, part_labels = ids[row, inside][None], labels[row, inside][None]
            assert close(logits[row, inside], alone(part)[0])
            alone(part, part_labels).loss.backward()
    for ours, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        assert close(ours.grad, theirs.grad)


def test_without_doc_ids_a_document_sees_the_one_before():
    model = drawn(source_of("llama2"))
    ids, _ = batch()
    assert not close(model(ids), model(ids, doc_ids=DOC_IDS))


def test_one_document_is_plain_causal_attention():
    model = drawn(source_of("llama2"))
    ids, _ = batch()
    assert close(model(ids, doc_ids=torch.zeros_like(ids)), model(ids))


def test_logits_have_the_models_dtype_and_sums_are_fp32():
    model = drawn(source_of("qwen2"), dtype=torch.bfloat16)
    ids, labels = batch()
    assert model(ids).dtype == torch.bfloat16
    sums = model(ids, labels)
    assert sums.loss.dtype == sums.nll.dtype == torch.float32


def test_a_linear_can_be_swapped():
    """Linears are called as modules: one that replaces another is used, in layers and at the head."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    ids, labels = batch()
    for owner, name in (("layers.0.attn", "qkv"), ("layers.2.mlp", "gate_up"), ("", "lm_head")):
        model = drawn(source_of("llama2"))
        before, loss_before = model(ids), model(ids, labels).loss.item()
        owner_module = model.get_submodule(owner)
        old = getattr(owner_module, name)
        new = Doubled(old.in_features, old.out_features, bias=old.bias is not None)
        new.weight, new.bias = old.weight, old.bias
        setattr(owner_module, name, new)
        assert not close(model(ids), before)
        assert model(ids, labels).loss.item() != pytest.approx(loss_before, rel=1e-4)


def test_rope_tables_stay_fp32_in_a_bf16_model():
    """Positions beyond 256 are not representable in bf16; two neighbours must still differ."""
    from qtrain.models.native.rope import rope_tables

    rope = ModelConfig.from_hf(FAMILIES["qwen2"]).rope
    cos, sin = rope_tables(rope, 8, 2048, torch.device("cpu"))
    assert cos.dtype == sin.dtype == torch.float32
    positions = torch.arange(2048, dtype=torch.float64)
    assert torch.allclose(sin[:, 0].double(), positions.sin(), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_joined_layers_compute_the_same_bits(name):
    (ids, labels), model, found = batch(), drawn(source_of(name)), []
    for joins in (False, True):
        if joins:
            model.join_layers()
        assert model.joins_layers is joins
        model.zero_grad()
        sums = model(ids, labels, DOC_IDS)
        sums.loss.backward()
        found.append([*sums, *(p.grad for p in model.parameters()), model(ids)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


@pytest.mark.usefixtures("compiler")
def test_joined_layers_share_their_code():
    """The first one too, which gets zeros to add."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, (ids, labels) = drawn(source_of("qwen2")), batch()
    expected = [*torch.autograd.grad(model(ids, labels).loss, model.parameters())]
    compile_layers(model)
    model.join_layers()
    found = [*torch.autograd.grad(model(ids, labels).loss, model.parameters())]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kinds", ["block", "norm"])
def test_layers_that_are_recomputed_as_a_whole_are_not_joined(kinds):
    model = drawn(source_of("qwen2"))
    apply_recompute(model, [kinds])
    model.join_layers()
    assert not model.joins_layers
