"""`qtrain.save_quantized`: codes are those of training, and their readers load them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import qtrain
from qtrain.core.errors import UserError
from qtrain.quant import LowBitLinear
from qtrain.quant.export_codes import trained_codes


def llama(**changes) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **{**sizes, **changes}))


def trained(scheme: str, **changes) -> nn.Module:
    model = llama(**changes)
    qtrain.quantize(model, scheme)
    optimizer, tokens = torch.optim.AdamW(model.parameters(), 1e-3), torch.arange(64)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model


PAIRS = [("fp8_blockwise", "fp8_block", 0.05), ("int8", "ct_int8", 0.05), ("fp8_rowwise", "ct_fp8_row", 0.1)]


@pytest.mark.parametrize(("scheme", "fmt", "within"), PAIRS)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_the_codes_of_training(tmp_path, scheme, fmt, within, tied):
    model = trained(scheme, tie_word_embeddings=tied)
    held = qtrain.save_quantized(model, tmp_path / "saved", fmt)
    assert len(held) == 7 and set(held.values()) == {None}
    tensors = load_file(tmp_path / "saved/model.safetensors")
    for name, linear in model.named_modules():
        if isinstance(linear, LowBitLinear):
            assert torch.equal(
                tensors[f"{name}.weight"].view(torch.int8), trained_codes(linear)[0].codes.view(torch.int8)
            )
    assert ("lm_head.weight" in tensors) != tied
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
    tokens = torch.arange(100)[None]
    with torch.no_grad():
        ours, theirs = model.eval()(input_ids=tokens).logits, read(input_ids=tokens).logits
    assert (ours - theirs).abs().max() < within * ours.abs().max()


def test_codes_of_another_format_are_new_and_said(tmp_path):
    held = qtrain.save_quantized(trained("int8"), tmp_path, "fp8_block")
    assert set(held.values()) == {"int8 codes, not e4m3"}


def test_any_module_gets_the_quantization_config_alone(tmp_path):
    model = nn.Sequential(nn.Linear(128, 128), nn.Conv1d(1, 1, 1), nn.Linear(128, 256))
    qtrain.quantize(model, "int8", overrides={"0": "bf16"})
    assert list(qtrain.save_quantized(model, tmp_path / "new", "ct_int8")) == ["2.weight"]
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert list(config) == ["quantization_config"] and config["quantization_config"]["ignore"] == ["0"]
    tensors = load_file(tmp_path / "new/model.safetensors")
    assert torch.equal(tensors["0.weight"], model[0].weight) and tensors["2.weight"].dtype == torch.int8


def quantized(rows: int = 128) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, rows))
    qtrain.quantize(model, "int8")
    return model


@pytest.mark.parametrize(
    ("make", "fmt", "says"),
    [
        (quantized, "ct_int9", "unknown export format 'ct_int9'. Did you mean"),
        (quantized, "hf", "'hf' has no codes in safetensors"),
        (quantized, "gguf_q8_0", "'gguf_q8_0' has no codes in safetensors"),
        (quantized, "bitnet", "'bitnet' holds ternary weights, and 0.weight has others; train with --quantize bitnet"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), "ct_int8", "call qtrain.quantize first"),
        (lambda: quantized(96), "fp8_block", "cannot hold 0: it takes out-features in multiples of 128, not 96"),
    ],
)
def test_mistakes_write_nothing(tmp_path, make, fmt, says):
    with pytest.raises(UserError) as caught:
        qtrain.save_quantized(make(), tmp_path / "new", fmt)
    assert says in str(caught.value) and not (tmp_path / "new").exists()


def test_a_folder_with_files_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="exists already"):
        qtrain.save_quantized(quantized(), tmp_path, "ct_int8")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
