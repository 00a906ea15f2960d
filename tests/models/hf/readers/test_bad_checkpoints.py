"""What a quantized checkpoint may get wrong: one message that names the file or key, before values are used."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llm_finetune
from qtrain.core.errors import UserError
from qtrain.models import build_model, read_model_source
from tests.models.hf.readers.coded import as_bytes, change, nf4_tensors, plain_model, write_coded
from tests.system import call, flags, tree

Q = "model.layers.1.self_attn.q_proj"
OWN_STATE = "weight.quant_state.bitsandbytes__nf4"
STATE = f"{Q}.{OWN_STATE}"

CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq": ("ct_int8", {"quant_method": "gptq", "bits": 4}, "unknown quant_method 'gptq'.* Allowed: bitnet, bits"),
    "awq": ("ct_int8", {"quant_method": "awq"}, "unknown quant_method 'awq'"),
    "mxfp4": ("fp8_block", {"quant_method": "mxfp4"}, "unknown quant_method 'mxfp4'.* Did you mean 'mxfp8'"),
    "torchao": ("ct_int8", {"quant_method": "torchao"}, "unknown quant_method 'torchao'"),
    "fbgemm": ("fp8_block", {"quant_method": "fbgemm_fp8"}, "unknown quant_method 'fbgemm_fp8'"),
    "no method": ("fp8_block", {"quant_method": None}, "unknown quant_method 'None'"),
    "a method that is code": ("fp8_block", {"quant_method": "__import__('os').abort()"}, "unknown quant_method"),
    "other blocks": ("fp8_block", {"weight_block_size": [64, 64]}, r"weight_block_size: \[64, 64\] is not read"),
    "blocks of text": ("fp8_block", {"weight_block_size": "128"}, "weight_block_size: '128' is not allowed"),
    "other codes": ("fp8_block", {"fmt": "e5m2"}, "fmt: 'e5m2' is not read; only 'e4m3'"),
    "names that are none": ("fp8_block", {"modules_to_not_convert": 3}, "modules_to_not_convert: 3 is not allowed"),
    "zero points": ("ct_int4_g32", {"symmetric": False}, "symmetric: false is not read"),
    "other bits": ("ct_int4_g32", {"num_bits": 3}, "num_bits 3, .* is not read; FP8 and INT8"),
    "another group": ("ct_int4_g32", {"group_size": 48}, "group_size 48 is not read"),
    "another strategy": ("ct_int8", {"strategy": "token"}, "strategy 'token'.* is not read"),
    "sparse": ("ct_int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not read"),
    "rotated": ("ct_int8", {"transform_config": {"config_groups": {"u": {}}}}, "rotated weights are not read"),
    "not compressed": ("ct_int8", {"quantization_status": "frozen"}, "quantization_status: 'frozen' is not"),
    "no groups": ("ct_int8", {"config_groups": {}}, "config_groups: there is none"),
    "no expression": ("ct_int8", {"ignore": ["re:(("]}, r"ignore: '\(\(' is no regular expression"),
    "a long expression": ("ct_int8", {"ignore": ["re:" + "(a+)+" * 99]}, "longer than 200 characters"),
    "INT8 of bitsandbytes": ("nf4", {"load_in_8bit": True}, "8-bit weights of bitsandbytes are not read"),
    "FP4": ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type: 'fp4' is not read; only 'nf4'"),
    "norms in linears": ("bitnet", {"use_rms_norm": True}, "use_rms_norm: true is not read"),
    "another linear": ("bitnet", {"linear_class": "linear"}, "linear_class: 'linear' is not allowed"),
}  # fmt: skip
"""Format, changes of its quantization_config, message."""


def damage(part: str, made: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[dict], None]:
    """Replaces a tensor of the matrix Q; None: takes it out."""

    def turn(tensors: dict) -> None:
        new = made(tensors.pop(f"{Q}.{part}"))
        if new is not None:
            tensors[f"{Q}.{part}"] = new

    return turn


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def turn(t: torch.Tensor) -> torch.Tensor:
        values = t.float()
        values.view(-1)[0] = value
        return values.to(t.dtype)

    return turn


def state(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: as_bytes({**json.loads(bytes(t.tolist())), **changes})


SCALE = "weight_scale_inv"
TENSORS: dict[str, tuple[str, Callable[[dict], Any], str]] = {
    "no scale": ("fp8_block", damage(SCALE, lambda t: None), f"lacks the tensors: {Q}.weight_scale_inv"),
    "no scale of int8": ("ct_int8", damage("weight_scale", lambda t: None), f"lacks the tensors: {Q}.weight_scale"),
    "no codes": ("fp8_block", damage("weight", lambda t: None), f"lacks the tensors: {Q}.weight"),
    "a scale too many": ("fp8_block", damage(SCALE, lambda t: torch.ones(3, 2)), r"inv has the shape \[3, 2\] \(expec"),
    "a scale of rows": ("ct_fp8_row", damage("weight_scale", lambda t: t[:9]), r"has the shape \[9, 1\] \(expected"),
    "a huge scale": ("fp8_block", damage(SCALE, lambda t: torch.ones(1 << 20)), r"inv has the shape \[1048576\]"),
    "a scale of text": ("ct_int8", damage("weight_scale", lambda t: t.to(torch.int64)), "stored as I64 .expected"),
    "NaN": ("fp8_block", damage(SCALE, first(math.nan)), f"{Q}.{SCALE} holds NaN: the file is damaged"),
    "Inf": ("ct_int8", damage("weight_scale", first(math.inf)), f"{Q}.weight_scale holds Inf: the file is damaged"),
    "NaN in codes": ("fp8_block", damage("weight", first(math.nan)), f"{Q}.weight holds NaN"),
    "an exponent of 255": ("mxfp8", damage(SCALE, lambda t: t.fill_(255)), "has a scale that is NaN or Inf"),
    "a global scale of 0": ("ct_nvfp4", damage("weight_global_scale", torch.zeros_like), "a scale that is NaN or Inf"),
    "dense codes": ("fp8_block", damage("weight", lambda t: t.float()), r"is stored as F32 \(expected F8_E4M3\)"),
    "a shape that lies": ("ct_int4_g32", damage("weight_shape", lambda t: t * 2), r"weight_shape of \[512, 512\]"),
    "cut codes": ("ct_int4_g32", damage("weight_packed", lambda t: t[:, :-1]), r"has the shape \[256, 31\] \(expected"),
    "zero points": ("ct_int8", lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(256)}), "zero points are not"),
    "an order": ("ct_int4_g32", lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(256)}), "an order of columns are"),
    "no fourth code": ("bitnet", damage("weight", lambda t: t | 3), f"{Q}.weight has codes that are not ternary"),
    "another tensor": ("ct_int8", lambda t: t.update({f"{Q}.extra": torch.ones(1)}), f"does not: {Q}.extra"),
    "a scale of nothing": ("ct_int8", lambda t: t.update({"lm_head.weight_scale": torch.ones(1)}), "lm_head.weight"),
    "nested scales": ("nf4_double", damage("weight.nested_absmax", lambda t: torch.ones(9)), "has 9 scales of 1024"),
    "a short map": ("nf4_double", damage("weight.nested_quant_map", lambda t: t[:99]), "scales of 1024 scales"),
    "absmax": ("nf4", damage("weight.absmax", lambda t: t[:-1]), "has 1023 scales for 1024 blocks of 64"),
    "no JSON": ("nf4", damage(OWN_STATE, lambda t: t[:-4]), f"{Q}.weight cannot be read: "),
    "no text": ("nf4", damage(OWN_STATE, lambda t: t | 0x80), f"{Q}.weight cannot be read: "),
    "much text": ("nf4", damage(OWN_STATE, lambda t: torch.full((1 << 20,), 32).byte()), "1048576 bytes"),
    "another shape": ("nf4", damage(OWN_STATE, state(shape=[2, 2])), r"a quant_state of nf4 \[2, 2\]"),
    "no blocks": ("nf4", damage(OWN_STATE, state(blocksize=0)), "blocksize: 0 is out of range"),
    "an offset of NaN": ("nf4_double", damage(OWN_STATE, state(nested_offset=math.nan)), "cannot be re"),
    "FP4": ("nf4", lambda t: t.update({STATE.replace("nf4", "fp4"): t.pop(STATE)}), "FP4 codes are not read"),
    "8 bits": ("nf4", lambda t: t.update({f"{Q}.SCB": torch.ones(256)}), "INT8 codes of bitsandbytes are not read"),
}  # fmt: skip
"""Format, changes of its tensors, message."""


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(fmt: str) -> Path:
        if fmt not in made:
            made[fmt] = tmp_path_factory.mktemp(fmt) / "hf"
            write_coded(made[fmt], fmt, vocab_size=258)  # the tokenizer `byte`
        return made[fmt]

    return of


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_is_not_read(case, good, tmp_path):
    fmt, changes, message = CONFIGS[case]
    folder = copied(good(fmt), tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if changes.keys() & {"symmetric", "num_bits", "group_size", "strategy"}:  # keys of the weights of a group
        config["config_groups"]["group_0"]["weights"] |= changes
        changes = config
    change(folder, **changes)
    with pytest.raises(UserError, match=message) as caught:
        build_model(read_model_source(str(folder)), pretrained=True)
    assert str(folder / "config.json") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_not_what_the_config_says(case, good, tmp_path):
    fmt, turn, message = TENSORS[case]
    folder = copied(good(fmt), tmp_path / "bad")
    change(folder, turn)
    with pytest.raises(UserError, match=message) as caught:
        build_model(read_model_source(str(folder)), pretrained=True)
    assert str(caught.value).startswith(f"--pretrained ({folder})") and "\n" not in str(caught.value)


def test_a_truncated_file(good, tmp_path):
    folder = copied(good("fp8_block"), tmp_path / "bad")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read as safetensors"):
        build_model(read_model_source(str(folder)), pretrained=True)


def test_a_config_without_codes_and_codes_without_a_config(good, tmp_path):
    dense = tmp_path / "dense"
    write_coded(dense, "ct_fp8_row")

    def turn(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            weight = name.removesuffix("_scale")
            tensors[weight] = tensors[weight].float() * tensors.pop(name)

    change(dense, turn)
    with pytest.raises(UserError, match=r"has a quantization_config .*, but none of its matrices is codes"):
        build_model(read_model_source(str(dense)), pretrained=True)
    bare = copied(good("fp8_block"), tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text())
    del config["quantization_config"]
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"has tensors that this architecture does not: .*weight_scale_inv"):
        build_model(read_model_source(str(bare)), pretrained=True)


MISTAKES = {
    "another method": ("ct_int8", {"quant_method": "gptq"}, {}, "unknown quant_method 'gptq'"),
    "merge": (
        "ct_int8",
        {},
        {"merge": "original"},
        "--lora.merge: 'original' adds adapters to files in high",
    ),
    "nothing kept": ("ct_int8", {"ignore": ["re:.*"]}, {}, 'quantizes none of the model\'s 9 linears.*base":"dense"'),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_run_is_refused_before_it_writes(case, good, tmp_path, monkeypatch):
    fmt, changes, lora, message = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    copied(good(fmt), Path("bad"))
    change(Path("bad"), **changes)
    Path("text.txt").write_text("some text " * 100)
    before = tree(tmp_path)
    train_ds = {"type": "text", "paths": "text.txt", "tokenizer": "byte"}
    done = call(llm_finetune.main, flags(model="bad", train_ds=train_ds, n_steps=1, device="cpu", lora=lora))
    assert done.code == 2, done.err
    assert re.search(message, done.err), done.err
    assert tree(tmp_path) == before


def test_nf4_of_another_table_has_values_and_no_codes_to_keep(tmp_path):
    folder = tmp_path / "hf"
    write_coded(folder, "nf4")
    change(folder, damage("weight.quant_map", lambda t: t * 0.5))
    tensors = load_file(folder / "model.safetensors")
    model = build_model(read_model_source(str(folder)), pretrained=True, lazy=True)
    value = dict(plain_model().named_parameters())["layers.1.attn.qkv.weight"][:256].detach()
    assert nf4_tensors(value, False)["weight"].equal(tensors[f"{Q}.weight"])
    from qtrain.tensors.lazy import existing_codes, initial_value

    weight = model.layers[1].attn.qkv.weight
    assert initial_value(weight)[:256].abs().max() <= 0.5 * value.abs().max()
    with pytest.raises(UserError, match="has another table: its codes are not those of NF4"):
        existing_codes(weight, "nf4")
