"""Checkpoints of transformers load, ours load there, and what does not fit is named."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtrain.core.errors import TrainingStopped, UserError
from qtrain.models import build_model, export_hf, read_model_source
from qtrain.models.hf import io as hf
from qtrain.tensors.lazy import initial_value
from tests.models.families import FAMILIES, MIXTURES, batch, drawn, source_of


class FakeTokenizer:
    bos_id, eos_id = None, 5

    def save_hf(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def transformers_model(name: str, folder: Path, **save_options):
    """A transformers model with random weights of this family, saved by transformers itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict((FAMILIES | MIXTURES)[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **save_options)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_transformers_loads(name, tmp_path):
    theirs = transformers_model(name, tmp_path)
    ours = build_model(read_model_source(str(tmp_path)), pretrained=True)
    ids, _ = batch()
    logits = theirs(ids).logits
    assert (ours(ids) - logits).abs().max() <= 1e-4 * logits.abs().max()


def test_sharded_both_ways(tmp_path, monkeypatch):
    """Several files with an index, theirs and ours, in bf16: every bit arrives."""
    from transformers import AutoModelForCausalLM

    transformers_model("qwen2", tmp_path / "theirs", max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    source = read_model_source(str(tmp_path / "theirs"))
    ours = build_model(source, pretrained=True, dtype=torch.bfloat16)
    monkeypatch.setattr(hf, "MAX_SHARD_BYTES", 15_000)
    export_hf(ours, source, tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert theirs.dtype == torch.bfloat16
    again = build_model(read_model_source(str(tmp_path / "ours")), pretrained=True, dtype=torch.bfloat16)
    for a, b in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    deferred = build_model(source, pretrained=True, dtype=torch.bfloat16, lazy=True)
    assert sum(p.untyped_storage().nbytes() for p in deferred.layers.parameters() if p.ndim > 1) == 0
    for a, b in zip(ours.parameters(), deferred.parameters(), strict=True):
        assert torch.equal(a, initial_value(b))
    assert torch.equal(theirs.model.embed_tokens.weight, ours.embed_tokens.weight)
    kv = ours.config.kv_size
    assert torch.equal(theirs.model.layers[2].self_attn.v_proj.bias, ours.layers[2].attn.qkv.bias[-kv:])


def test_export_leaves_exactly_one_complete_folder(tmp_path):
    """A second export replaces the first; nothing temporary stays; config and special tokens are those trained with."""
    model, source = drawn(source_of("llama2", eos_token_id=2)), source_of("llama2", eos_token_id=2)
    for _ in range(2):
        export_hf(model, source, tmp_path / "run" / "hf", FakeTokenizer())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["hf"]
    names = {p.name for p in (tmp_path / "run" / "hf").iterdir()}
    assert names == {"checksums.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((tmp_path / "run" / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == 5 and config["torch_dtype"] == "float32"
    assert json.loads((tmp_path / "run" / "hf" / "generation_config.json").read_text())["eos_token_id"] == 5


def test_an_end_token_among_several_keeps_them_all(tmp_path):
    source = source_of("llama2", eos_token_id=[2, 5])
    export_hf(drawn(source), source, tmp_path / "hf", FakeTokenizer())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == [2, 5]


def test_a_failed_export_leaves_the_old_one(tmp_path):
    class Failing(FakeTokenizer):
        def save_hf(self, folder: Path) -> None:
            raise OSError("disk full")

    model, source = drawn(source_of("llama2")), source_of("llama2")
    export_hf(model, source, tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    with pytest.raises(TrainingStopped, match="hf could not be written: disk full"):
        export_hf(build_model(source, seed=9), source, tmp_path / "hf", Failing())
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


def load_error(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        build_model(read_model_source(str(folder)), pretrained=True)
    return str(caught.value)


def test_what_does_not_fit_is_named(tmp_path):
    source = source_of("llama2")
    export_hf(drawn(source), source, tmp_path / "good")
    (tmp_path / "good/checksums.json").unlink()  # what is changed below is to be refused for what it is
    good = load_file(tmp_path / "good" / "model.safetensors")

    def with_tensors(name: str, change) -> Path:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        tensors = dict(good)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    message = load_error(with_tensors("missing", lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")))
    assert "lacks the tensors: model.layers.1.self_attn.k_proj.weight" in message and "--pretrained" in message
    message = load_error(with_tensors("extra", lambda t: t.update({"model.layers.0.moe.weight": torch.ones(1)})))
    assert "model.layers.0.moe.weight" in message
    message = load_error(with_tensors("shape", lambda t: t.update({"model.norm.weight": torch.ones(31)})))
    assert "model.norm.weight [31] (expected [32])" in message
    with_tensors("old", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    build_model(read_model_source(str(tmp_path / "old")), pretrained=True)  # a buffer of old files, not a weight

    (tmp_path / "missing" / "model.safetensors").write_bytes(b"no header")
    assert "cannot be read as safetensors" in load_error(tmp_path / "missing")
    (tmp_path / "extra" / "model.safetensors").unlink()
    assert "only safetensors are read" in load_error(tmp_path / "extra")
    index = {"weight_map": dict.fromkeys(good, "model-00001-of-00001.safetensors")}
    (tmp_path / "extra" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks files" in load_error(tmp_path / "extra")


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    source = source_of("qwen2")
    model = drawn(source)
    export_hf(model, source, tmp_path)
    (tmp_path / "checksums.json").unlink()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    again = build_model(read_model_source(str(tmp_path)), pretrained=True)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    assert "tie_word_embeddings" in load_error(tmp_path)


@pytest.mark.parametrize("outside", ["../secret/model.safetensors", "/model.safetensors", "sub/../../m.safetensors"])
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_an_index_names_files_of_its_folder_only(tmp_path, outside, impl):
    source = source_of("llama2")
    for folder in ("hf", "secret"):
        export_hf(drawn(source), source, tmp_path / folder)
        (tmp_path / folder / "checksums.json").unlink()
    tensors = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "m.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, outside)}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is not the name of a file in its folder"):
        build_model(read_model_source(str(tmp_path / "hf")), impl=impl, pretrained=True)


def test_a_link_to_a_file_elsewhere_loads(tmp_path):
    source = source_of("llama2")
    export_hf(drawn(source), source, tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "blob")
    (tmp_path / "hf/model.safetensors").symlink_to(tmp_path / "blob")
    build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)


@pytest.mark.parametrize(("value", "named"), [(float("nan"), "NaN"), (float("-inf"), "Inf")])
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_weights_that_are_not_finite_are_refused_as_they_load(tmp_path, value, named, impl):
    source = source_of("llama2")
    model = drawn(source)
    with torch.no_grad():
        model.layers[1].attn.qkv.weight[-1, 3] = value
    export_hf(model, source, tmp_path)
    with pytest.raises(UserError, match=rf"--pretrained .*layers\.1\.self_attn\.v_proj\.weight holds {named}"):
        build_model(read_model_source(str(tmp_path)), impl=impl, pretrained=True)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_the_umask_decides_who_may_read_an_export(tmp_path, umask, impl):
    source = source_of("llama2")
    model, before = build_model(source, impl=impl, seed=0), os.umask(umask)
    try:
        export_hf(model, source, tmp_path / "hf", FakeTokenizer())
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "hf").iterdir()} == {0o666 & ~umask}
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o777 & ~umask
