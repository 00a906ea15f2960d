"""GGUF files hold the codes that training multiplied with; transformers reads the weights that they stand for."""

import itertools
import json

import numpy as np
import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.data.tokenizers.sentencepiece_model import train_tokenizer
from qtrain.data.tokenizers.tokenizer import FastTokenizer, load_tokenizer
from qtrain.models.config.hf_layout import layout
from qtrain.models.hf.formats.format import EXPORT_FORMATS
from qtrain.models.hf.gguf_export import export_gguf
from qtrain.models.hf.quantized_export import ExportOptions
from qtrain.quant import LowBitLinear
from tests.data.corpora import functions
from tests.models.hf.test_quantized_export import IDS, left_as_trained, source_of, trained, training_codes

gguf = pytest.importorskip("gguf", reason="pip install gguf")


def made(name: str):
    return EXPORT_FORMATS.make(name, {}, "--export_format")


def read(path) -> dict[str, tuple[torch.Tensor, str]]:
    """Values of each tensor as the package reads them, and the type that it is stored in."""
    return {
        t.name: (torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))), t.tensor_type.name)
        for t in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "qwen3-tied", "qwen3_moe", "qwen3_moe-tied"])
@pytest.mark.parametrize(
    ("fmt", "scheme", "options"),
    [
        ("gguf_q8_0", "int8", {}),
        ("gguf_tq2_0", "bitnet", {"sub_norm": False}),
        ("gguf_tq1_0", "bitnet", {"sub_norm": False}),
        ("gguf_q8_0", "bf16", {}),
        ("gguf_f16", "bf16", {}),
    ],
)
def test_transformers_reads_the_weights_that_training_multiplied(fmt, scheme, options, family, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    wide = {"intermediate_size": 512, "moe_intermediate_size": 256} if "tq" in fmt else {}
    source = source_of(family, **wide)
    model, quantized = trained(source, scheme, options)
    held = export_gguf(model, tmp_path / "x", made(fmt), left_as_trained(quantized))
    assert held is None if fmt == "gguf_f16" else (held.equal == held.matrices) is (scheme != "bf16")
    # transformers takes a head's size of Qwen3, and an expert's width, for those of the published models.
    config = AutoConfig.for_model(**source.config)
    where = {"gguf_file": "model.gguf", "config": config, "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "x", **where)
    values = theirs.state_dict()
    equal = total = 0
    for entry in layout(model.config):
        if ".experts." in entry.hf_name:
            continue  # stacked there; the logits below see them
        owner, _, kind = entry.name.rpartition(".")
        linear = model.get_submodule(owner)
        if isinstance(linear, LowBitLinear) and kind == "weight":
            ours, rows = training_codes(linear), slice(entry.start, entry.stop)
            scale = ours.scale[rows].half().float()
            codes = (values[entry.hf_name] / scale).round()
            equal, total = equal + int((codes == ours.codes[rows]).sum()), total + codes.numel()
            torch.testing.assert_close(values[entry.hf_name], ours.codes[rows] * scale, rtol=0, atol=0)
        else:
            mine = entry.of(model.state_dict()[entry.name])
            rounding = (
                {"gguf_f16": 2**-10, "gguf_q8_0": 0.01}[fmt]
                if kind == "weight" and mine.ndim > 1 and scheme == "bf16"
                else 0
            )
            assert (values[entry.hf_name] - mine).norm() <= rounding * mine.norm()
    print(f"{fmt} of {family} in {scheme}: {equal:,} of {total:,} codes equal")
    assert equal == total
    with torch.no_grad():
        found, expected = theirs.eval()(IDS).logits, model(IDS)
    assert (found - expected).norm() <= (0.002 if fmt == "gguf_f16" else 0.1) * expected.norm()


def test_bitnets_own_architecture_has_its_norms(tmp_path):
    source = source_of("llama-tied", intermediate_size=512)
    model, quantized = trained(source, "bitnet")
    export_gguf(model, tmp_path / "x", made("gguf_tq2_0"), left_as_trained(quantized))
    tensors, ours = read(tmp_path / "x/model.gguf"), training_codes(model.layers[1].mlp.down_proj)
    value, kind = tensors["blk.1.ffn_down.weight"]
    assert kind == "TQ2_0" and tensors["blk.0.attn_sub_norm.weight"][1] == "F32"
    assert torch.equal(value, ours.codes * ours.scale.half().float())
    arch = gguf.GGUFReader(tmp_path / "x/model.gguf").fields["general.architecture"].contents()
    assert arch == "bitnet"


def test_models_that_the_file_cannot_describe_are_refused(tmp_path):
    for changes, says in (
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "without scaling of rotary positions, and the model has l",
        ),
        ({"model_type": "mistral", "sliding_window": 7}, "without a sliding window"),
        (
            {"hidden_size": 320, "head_dim": 64},
            r"cannot hold model.layers.0.self_attn.q_proj.weight: .* of 256, not 320",
        ),
    ):
        model, _ = trained(source_of("llama", **changes), "bf16")
        with pytest.raises(UserError, match=says):
            export_gguf(model, tmp_path / "x", made("gguf_tq1_0"))
    assert not list(tmp_path.iterdir())


class Saved:
    """A tokenizer whose files are given."""

    bos_id, eos_id = None, 1

    def __init__(self, tokenizer_json: str):
        self.text = tokenizer_json

    def save_hf(self, folder) -> None:
        (folder / "tokenizer.json").write_text(self.text)


def test_a_bpe_tokenizer_is_in_the_file_if_llama_cpp_splits_alike(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.add_special_tokens(["<|eos|>"])
    text = backend.to_str()
    assert json.loads(text)["added_tokens"][0]["id"] == 3
    model, _ = trained(source_of("llama"), "bf16")
    export_gguf(model, tmp_path / "x", made("gguf_f16"), ExportOptions(Saved(text)))
    fields = gguf.GGUFReader(tmp_path / "x/model.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[:5] == ["a", "b", "ab", "<|eos|>", "[PAD4]"]
    assert fields["tokenizer.ggml.token_type"].contents() == [1, 1, 1, 3] + [5] * 93  # the embedding's rows
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2" and fields["tokenizer.ggml.merges"].contents() == ["a b"]
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    export_gguf(model, tmp_path / "x", made("gguf_f16"), ExportOptions(Saved(backend.to_str())))
    assert "has no tokenizer" in capsys.readouterr().out
    fields = gguf.GGUFReader(tmp_path / "x/model.gguf").fields
    assert "tokenizer.ggml.tokens" not in fields and fields["tokenizer.ggml.model"].contents() == "no_vocab"


TEXTS = (
    "def f(x: int = 0) -> str:\n    return '\u00fcn\u00efc\u00f6d\u00e9' * 13",
    "",
    "  two  spaces \n\n",
    "x",
    "\u4f60\u597d the the",
)


def llama_cpp_ids(fields, text: str) -> list[int]:
    """llama.cpp's llm_tokenizer_spm: join the adjacent pair with the best score, the leftmost of equal ones, until no
    pair is a piece; characters that are no piece become their bytes."""
    pieces, scores, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores", "token_type"))
    ids = {piece: number for number, piece in enumerate(pieces)}
    assert all((kind == gguf.TokenType.BYTE) == (piece[:3] == "<0x") for piece, kind in zip(pieces, kinds, strict=True))
    prefix = " " if fields["tokenizer.ggml.add_space_prefix"].contents() and text else ""
    symbols = list((prefix + text).replace(" ", "\u2581"))
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    found = [[ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [number for part in found for number in part]


@pytest.mark.parametrize("prefix", [False, True])
def test_a_trained_sentencepiece_tokenizer_is_in_the_file(tmp_path, prefix):
    """One that --train_tokenizer made, and one that puts a space before a text, as Llama 2's does."""
    (tmp_path / "x.model").write_bytes(train_tokenizer([*functions(), *TEXTS], 400, "--train_tokenizer"))
    tokenizer = load_tokenizer(str(tmp_path / "x.model"), "--tokenizer")
    if prefix:
        saved = json.loads(tokenizer._json)
        steps = [{"type": "Prepend", "prepend": "\u2581"}, saved["normalizer"]["normalizers"][-1]]
        saved["normalizer"]["normalizers"] = steps
        single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        start = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        saved["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": start,
        }
        tokenizer = FastTokenizer("llama", json.dumps(saved), tokenizer._config)
    model, _ = trained(source_of("llama", vocab_size=410), "bf16")
    export_gguf(model, tmp_path / "x", made("gguf_f16"), ExportOptions(tokenizer))
    fields = gguf.GGUFReader(tmp_path / "x/model.gguf").fields
    told = {key: fields[f"tokenizer.ggml.{key}"].contents() for key in ("model", "bos_token_id", "eos_token_id")}
    assert told == {"model": "llama", "bos_token_id": 1, "eos_token_id": 2}
    assert fields["tokenizer.ggml.add_bos_token"].contents() is prefix
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:3] == [2, 3, 3] and kinds[400:] == [5] * 10  # unknown, control; rows of the embedding without a piece
    for text in [*TEXTS, *functions()[:5]]:
        assert llama_cpp_ids(fields, text) == tokenizer.encode(text), text
