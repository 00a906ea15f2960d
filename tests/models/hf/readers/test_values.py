"""Checkpoints in codes load with the values that their own readers get, exactly."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtrain.models import build_model, export_hf, read_model_source
from qtrain.models.hf.readers import bitsandbytes, reader
from tests.models.hf.codes_reader import load_tensors, read_matrix
from tests.models.hf.readers.coded import (
    FORMATS,
    change,
    matrices,
    plain_model,
    read_nf4,
    source_of,
    split,
    write_coded,
    write_nf4,
)

IDS = torch.arange(48).view(2, 24)
OF_MODELS = ["fp8_block", "mxfp8", "ct_fp8_row", "ct_fp8_block", "ct_int8", "ct_int4_g128", "ct_int4_g32"]
"""What transformers reads on a CPU in fp32."""


def expected(tensors, module, config):
    return read_nf4(tensors, module) if "bnb_4bit_quant_type" in config else read_matrix(tensors, module, config).value


def check(folder, dtype=torch.float32) -> int:
    """Compare every matrix with the specification's reader. Returns the number of matrices."""
    source = read_model_source(str(folder))
    model, tensors = build_model(source, pretrained=True, dtype=dtype), load_tensors(folder)
    found = matrices(model)
    for module, value in found:
        wanted = expected(tensors, module, source.config["quantization_config"])
        assert torch.equal(value, wanted.to(dtype)), module
    assert found
    return len(found)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", ["llama-tied", "qwen3_moe"])
def test_values_are_those_of_the_specification(fmt, family, tmp_path, monkeypatch):
    """Some rows at a time, and the same from several files, in which a matrix may be in two."""
    if family == "qwen3_moe" and fmt == "bitnet":
        family = "qwen3"
    monkeypatch.setattr(reader, "AT_ONCE", 128 * 384)
    monkeypatch.setattr(bitsandbytes, "AT_ONCE", 128 * 384)
    write_coded(tmp_path / "hf", fmt, family)
    assert check(tmp_path / "hf") == {"llama-tied": 14, "qwen3": 14, "qwen3_moe": 16}[family]
    split(tmp_path / "hf")
    check(tmp_path / "hf", torch.bfloat16)


@pytest.mark.parametrize("fmt", OF_MODELS)
def test_weights_and_logits_are_those_of_transformers(fmt, tmp_path):
    """Of formats that quantize activations there, only the weights are."""
    if fmt.startswith("ct_"):
        pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    source = write_coded(tmp_path / "hf", fmt)
    ours = build_model(source, pretrained=True).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        found, logits = theirs(IDS).logits, ours(IDS)  # compressed-tensors decompresses as it runs
    weights = {name.removesuffix(".weight"): p for name, p in theirs.named_parameters()}
    assert all(torch.equal(weights[module], value) for module, value in matrices(ours))
    if not fmt.startswith("ct_") or "int4" in fmt:
        assert (found - logits).norm() <= 1e-5 * logits.norm()


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_a_ternary_scale_divides_or_multiplies_as_transformers_has_it(kind, tmp_path):
    """With activations that its INT8 holds exactly."""
    source = write_coded(tmp_path / "hf", "bitnet")
    if kind == "autobitlinear":

        def invert(tensors):
            for name in [n for n in tensors if n.endswith("weight_scale")]:
                tensors[name] = tensors[name].reciprocal()

        change(tmp_path / "hf", invert, linear_class=kind)
        source = read_model_source(str(tmp_path / "hf"))
    ours = dict(matrices(build_model(source, pretrained=True)))["model.layers.0.mlp.up_proj"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).model.layers[0].mlp.up_proj
    x = torch.randint(-127, 128, (5, 256)).float()
    x[:, 0] = 127.0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(theirs(x), x @ ours.t(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_is_what_bitsandbytes_writes_and_reads(nested, tmp_path):
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model, values = plain_model(), {}
    export_hf(model, source_of(), tmp_path / "hf")

    def turn(tensors):
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            codes, state = quantize_4bit(tensors[name].bfloat16(), quant_type="nf4", compress_statistics=nested)
            values[name.removesuffix(".weight")] = dequantize_4bit(codes, state)
            tensors[name] = codes
            tensors.update({f"{name}.{part}": t for part, t in state.as_dict(packed=True).items()})

    change(tmp_path / "hf", turn, quant_method="bitsandbytes", bnb_4bit_quant_type="nf4", load_in_4bit=True,
           bnb_4bit_use_double_quant=nested)  # fmt: skip
    ours = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True, dtype=torch.bfloat16)
    assert all(torch.equal(values[module], value) for module, value in matrices(ours)) and len(values) == 14


def test_blocks_of_other_sizes_and_rows_that_they_cross(tmp_path):
    """NF4 blocks of 128, and of 64 along rows of 96."""
    export_hf(plain_model(), source_of(), tmp_path / "wide")
    write_nf4(tmp_path / "wide", nested=True, block=128)
    check(tmp_path / "wide")
    narrow = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    write_coded(tmp_path / "narrow", "nf4", **narrow)
    check(tmp_path / "narrow")


def test_blocks_at_the_edges_of_a_matrix_are_shorter(tmp_path):
    """As DeepSeek-V3's are, which transformers does not divide."""
    sizes = {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 2, "num_key_value_heads": 1}
    export_hf(plain_model(**sizes), source_of(**sizes), tmp_path / "hf")

    def turn(tensors):
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            n, k = tensors[name].shape
            tensors[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(-(-n // 128), -(-k // 128)) + 0.5

    change(tmp_path / "hf", turn, quant_method="fp8", weight_block_size=[128, 128])
    check(tmp_path / "hf")


@pytest.mark.parametrize(("fmt", "dtype"), [("fp8_block", torch.bfloat16), ("ct_int8", torch.float16)])
def test_scales_in_fewer_bits(fmt, dtype, tmp_path):
    write_coded(tmp_path / "hf", fmt)

    def narrow(tensors):
        tensors.update({name: t.to(dtype) for name, t in tensors.items() if "weight_scale" in name})

    change(tmp_path / "hf", narrow)
    check(tmp_path / "hf")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_a_scale_of_the_whole_tensor(method, shape, tmp_path):
    source, scale = write_coded(tmp_path / "hf", "ct_fp8_row"), torch.tensor(0.037)
    name = "weight_scale_inv" if method == "fp8" else "weight_scale"

    def one(tensors):
        for weight in [n for n in tensors if n.endswith("proj.weight")]:
            del tensors[f"{weight}_scale"]
            tensors[f"{weight.removesuffix('weight')}{name}"] = scale.view(shape).clone()

    group = {"targets": ["re:.*proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    change(
        tmp_path / "hf",
        one,
        quant_method=method,
        weight_block_size=None,
        config_groups={"a": group},
        ignore=["lm_head"],
    )
    source = read_model_source(str(tmp_path / "hf"))
    tensors = load_tensors(tmp_path / "hf")
    for module, value in matrices(build_model(source, pretrained=True)):
        assert torch.equal(value, tensors[f"{module}.weight"].float() * scale)


def test_what_is_for_inference_alone_is_left_out(tmp_path):
    """Static scales of activations, and of a KV cache."""
    write_coded(tmp_path / "hf", "ct_fp8_row")

    def add(tensors):
        tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    change(tmp_path / "hf", add, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert check(tmp_path / "hf") == 14


def test_groups_of_two_formats(tmp_path):
    """INT8 attention and FP8 MLPs; a layer in high precision."""
    write_coded(tmp_path / "hf", "ct_int8")
    dense = dict(matrices(plain_model()))

    def turn(tensors):
        for module, value in dense.items():
            if ".mlp." in module:
                tensors[f"{module}.weight"] = (value * 200).to(torch.float8_e4m3fn)
            if module.endswith("layers.1.self_attn.o_proj"):
                tensors[f"{module}.weight"] = value
                del tensors[f"{module}.weight_scale"]

    channel = {"num_bits": 8, "strategy": "channel"}
    groups = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": {**channel, "type": "int"}},
        "mlp": {"targets": ["re:.*mlp.*"], "weights": {**channel, "type": "float"}, "format": "float-quantized"},
    }
    ignore = ["lm_head", "model.layers.1.self_attn.o_proj"]
    change(tmp_path / "hf", turn, config_groups=groups, ignore=ignore)
    source = read_model_source(str(tmp_path / "hf"))
    assert source.declared_codes().format is None
    tensors = load_tensors(tmp_path / "hf")
    for module, value in matrices(build_model(source, pretrained=True)):
        scale = tensors.get(f"{module}.weight_scale", torch.ones(1))
        assert torch.equal(value, tensors[f"{module}.weight"].float() * scale)


def test_an_export_of_a_quantized_model_says_what_it_is(tmp_path):
    """Dense weights have no quantization_config of the codes that they were."""
    source = write_coded(tmp_path / "coded", "fp8_block")
    model = build_model(source, pretrained=True)
    export_hf(model, source, tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    again = build_model(read_model_source(str(tmp_path / "dense")), pretrained=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_weights_that_transformers_quantizes_online_are_in_high_precision(tmp_path):
    export_hf(plain_model(), source_of(), tmp_path / "hf")
    change(tmp_path / "hf", quant_method="bitnet", linear_class="autobitlinear", quantization_mode="online")
    source = read_model_source(str(tmp_path / "hf"))
    model = build_model(source, pretrained=True)
    assert source.declared_codes() is None
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(matrices(model), matrices(plain_model()), strict=True))
