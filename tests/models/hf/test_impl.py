"""`--model_impl hf`: the same contract over models of transformers, the covered families and foreign ones."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from qtrain.core.errors import UserError
from qtrain.models import (
    RECOMPUTE_SETS,
    Decoding,
    ModelSource,
    apply_recompute,
    build_model,
    continuations,
    export_hf,
    read_model_source,
)
from qtrain.quant import SCHEMES, quantize_linears
from tests.models.families import DOC_IDS, batch, drawn, source_of

FOREIGN = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97},
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "final_logit_softcapping": 5.0,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
}


def foreign(name: str):
    return build_model(ModelSource(name, FOREIGN[name], name), impl="hf", seed=1)


def test_equals_the_native_decoder(tmp_path):
    """Same files, same logits, loss and gradients, with and without documents."""
    source = source_of("qwen2")
    native = drawn(source)
    export_hf(native, source, tmp_path / "hf")
    other = build_model(read_model_source(str(tmp_path / "hf")), impl="hf", pretrained=True)
    ids, labels = batch()
    for doc_ids in (None, DOC_IDS):
        native.zero_grad()
        other.zero_grad()
        expected = native(ids, doc_ids=doc_ids)
        assert (other(ids, doc_ids=doc_ids) - expected).abs().max() <= 1e-4 * expected.abs().max()
        ours, theirs = native(ids, labels, doc_ids), other(ids, labels, doc_ids)
        assert theirs.loss.item() == pytest.approx(ours.loss.item(), rel=1e-5)
        ours.loss.backward()
        theirs.loss.backward()
        grad, expected = other.lm_head.weight.grad, native.lm_head.weight.grad
        assert (grad - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("name", "chunked"), [("gpt2", True), ("gemma2", False), ("bloom", True)])
def test_foreign_models_give_transformers_loss(name, chunked):
    """The loss goes through the head in chunks only where logits are nothing but head(hidden); gemma2 caps them."""
    model = foreign(name).eval()
    model.loss_chunks = 3
    ids, labels = batch()
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    grad = model.lm_head.weight.grad.clone()
    model.zero_grad()
    sums = model(ids, labels)
    sums.loss.backward()
    assert model._plain_head is chunked
    assert sums.nll.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (model.lm_head.weight.grad - grad).abs().max() <= 1e-4 * grad.abs().max()


def test_documents_are_kept_apart_or_refused():
    """A document's logits do not depend on what is before it; ALiBi models have no positions to restart."""
    ids, _ = batch()
    changed = ids.clone()
    changed[0, :10] = (changed[0, :10] + 1) % 97
    for name in ("gpt2", "gemma2"):
        model = foreign(name).eval()
        first, second = model(ids, doc_ids=DOC_IDS), model(changed, doc_ids=DOC_IDS)
        assert torch.equal(first[0, 10:], second[0, 10:]) and not torch.equal(first[0, :10], second[0, :10])
    with pytest.raises(UserError, match="--doc_mask: BloomForCausalLM"):
        foreign("bloom")(ids, doc_ids=DOC_IDS)


def test_documents_of_a_mixture_and_of_a_quantized_model_are_kept_apart():
    """Up to rounding: the rows of an expert are multiplied together, and a tensorwise scale covers all tokens."""
    ids, _ = batch()
    build_model(source_of("mixtral"), impl="hf", seed=1)(ids, doc_ids=DOC_IDS)
    model = build_model(source_of("qwen2"), impl="hf", seed=1)
    model.check_documents()
    quantize_linears(model, SCHEMES.make("fp8_tensorwise", {}, "--quantize"), seed=1, min_size=0)
    model(ids, doc_ids=DOC_IDS)


def test_loaded_weights_can_be_freed(tmp_path):
    """Full sharding frees what it has divided; transformers maps weights from the file."""
    build_model(source_of("qwen2"), impl="hf", seed=1).save_pretrained(tmp_path, 10**9)
    loaded = build_model(read_model_source(str(tmp_path)), impl="hf", pretrained=True)
    assert all(p.untyped_storage().resizable() for p in loaded.parameters())


def test_layers_and_recomputation():
    model = foreign("gemma2")
    assert len(model.layers) == 2 and model.layers is model.model.model.layers
    ids, labels = batch()
    expected = None
    for mode in ("none", "full", "selective", "none"):
        apply_recompute(model, RECOMPUTE_SETS[mode])
        model.zero_grad()
        model(ids, labels).loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        expected = expected or grads
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), mode


def test_seed_and_export(tmp_path):
    first, same, other = (build_model(source_of("qwen3"), impl="hf", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    export_hf(first, source_of("qwen3"), tmp_path / "hf")
    native = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)
    ids, _ = batch()
    expected = first(ids)
    assert (native(ids) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_unknown_architecture():
    with pytest.raises(UserError, match=r"model_type 'lamma'.*Did you mean"):
        build_model(ModelSource("x", {"model_type": "lamma"}, "--model (x)"), impl="hf")
    with pytest.raises(UserError, match="transformers refuses this config"):
        bad = {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}
        build_model(ModelSource("x", bad, "--model (x)"), impl="hf")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 12}, 12),
        ({"model_type": "opt", "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": 12}, 12),
        ({"model_type": "gptj", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 12, "rotary_dim": 4}, 12),
        (FOREIGN["bloom"], None),
        ({"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": 12}, None),
    ],
)  # fmt: skip
def test_a_table_of_positions_limits_what_is_read(config, limit):
    """Samples and answers stay within it; a longer --seq_len is refused (tests/test_bad_input.py)."""
    model = build_model(ModelSource("x", {"vocab_size": 97, **config}, "x"), impl="hf", seed=1)
    assert model.max_positions == limit
    found = continuations(model, [[1, 2, 3], list(range(10)), list(range(20))], Decoding(8))
    assert [len(ids) for ids in found] == ([8, 3, 1] if limit else [8, 8, 8])


def test_what_transformers_would_draw_at_random_is_refused(tmp_path, capsys):
    source = source_of("llama2")
    export_hf(drawn(source), source, tmp_path)
    (tmp_path / "checksums.json").unlink()
    file, name = tmp_path / "model.safetensors", "model.norm.weight"
    tensors = load_file(file)

    def load(values: dict[str, torch.Tensor]) -> None:
        save_file(values, file, metadata={"format": "pt"})
        build_model(read_model_source(str(tmp_path)), impl="hf", pretrained=True)

    with pytest.raises(UserError, match=f"--pretrained .* lacks the tensors: {name}"):
        load({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(UserError, match=rf"another shape .*: {name} \[64\] \(expected \[32\]\)"):
        load({**tensors, name: torch.ones(64)})
    load({**tensors, "model.extra": torch.ones(2)})
    assert "1 tensors are not used, first model.extra" in capsys.readouterr().out
    file.unlink()
    torch.save({"a": tmp_path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="a file holds other objects than tensors") as caught:
        build_model(read_model_source(str(tmp_path)), impl="hf", pretrained=True)
    assert "weights_only" not in str(caught.value)
