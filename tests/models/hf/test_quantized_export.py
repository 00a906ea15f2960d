"""An export in low bits holds the codes that training multiplied with, and its readers get their values."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from qtrain.core.errors import UserError
from qtrain.kernels.numerics.formats import expand_scale, unpack
from qtrain.models import Decoder, ModelSource, build_model, export_hf, read_model_source
from qtrain.models.config.hf_layout import layout
from qtrain.models.hf import quantized_export
from qtrain.models.hf.exports import left_by_training
from qtrain.models.hf.formats.format import EXPORT_FORMATS, SafetensorsFormat
from qtrain.models.hf.formats.table import keeping, kept
from qtrain.models.hf.quantized_export import ExportOptions, export_quantized
from qtrain.quant import SCHEMES, LowBitLinear, QuantizedModel, quantize_linears
from tests.models.hf.codes_reader import Read, equal_numbers, load_tensors, read_matrix

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "llama": {"model_type": "llama", **SHAPE},
    "llama-tied": {"model_type": "llama", **SHAPE},
    "qwen3": {"model_type": "qwen3", **SHAPE},
    "qwen3-tied": {"model_type": "qwen3", **SHAPE},
    "qwen3_moe": {"model_type": "qwen3_moe", **SHAPE, **EXPERTS, "num_hidden_layers": 1},
    "qwen3_moe-tied": {"model_type": "qwen3_moe", **SHAPE, **EXPERTS, "num_hidden_layers": 1},
}
FAMILIES = {name: {**values, "tie_word_embeddings": name.endswith("-tied")} for name, values in FAMILIES.items()}
TRAINED_IN = {
    "fp8_block": "fp8_blockwise",
    "mxfp8": "mxfp8",
    "ct_fp8_row": "fp8_rowwise",
    "ct_fp8_block": "fp8_blockwise",
    "ct_int8": "int8",
    "ct_int4_g128": "int4_weight",
    "ct_int4_g32": "int4",
    "ct_nvfp4": "nvfp4",
    "ct_mxfp8": "mxfp8",
    "bitnet": "bitnet",
    "torchao_int8": "int8",
    "torchao_fp8": "fp8_rowwise",
}
"""A scheme whose codes the format keeps."""
WITHOUT_EXPERTS = {"ct_fp8_block", "ct_int8", "ct_mxfp8", "ct_nvfp4"}
"""transformers 5.24 loads no experts of these formats, and of ct_nvfp4 without the tensor's scale; vLLM does."""
BF16_ONLY = {"ct_nvfp4", "ct_mxfp8"}
"""compressed-tensors decompresses to bf16 whatever the model's dtype, which then does not run."""
IDS = torch.arange(48).view(2, 24)


def left_as_trained(quantized: QuantizedModel) -> ExportOptions:
    return ExportOptions(left=left_by_training(quantized.choices))


def source_of(family: str, **changes: Any) -> ModelSource:
    return ModelSource(family, {**FAMILIES[family], **changes}, "--model")


def trained(
    source: ModelSource, scheme: str, options: dict | None = None, *, dtype=torch.float32, head: bool = False, seed=1
) -> tuple[Decoder, QuantizedModel]:
    """Two steps of gradient descent; the codes are those of the last step's weights."""
    model = build_model(source, seed=seed, dtype=dtype)
    made = SCHEMES.make(scheme, options or {}, "--quantize")
    quantized = quantize_linears(model, made, seed=0, head=model.lm_head, quantize_head=head)
    for step in range(2):
        quantized.set_step(step)
        model(IDS[:, :-1], IDS[:, 1:]).loss.div(64).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if hasattr(parameter, "store_"):
                    parameter.store_(parameter.dequantize() - 0.1 * parameter.grad)
                else:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
        quantized.refresh()
    return model.eval(), quantized


def made(fmt: str) -> SafetensorsFormat:
    return EXPORT_FORMATS.make(fmt, {}, "--export_format")


def training_codes(linear: LowBitLinear) -> Read | None:
    """What `output` multiplies, from the buffers that it reads, of all of a linear; None: high precision."""
    operand = linear.weight_codes.operands().rows
    if operand is None:
        return None
    (n, k), fmt = linear.weight.shape, operand.format
    scale = expand_scale(operand.scale.float(), fmt.granularity, (n, k)).expand(n, k)
    return Read(
        unpack(operand.codes, fmt.fmt, k).float(), scale * (1 if operand.tensor_scale is None else operand.tensor_scale)
    )


def compare(model: Decoder, folder: Path) -> tuple[int, int, float]:
    """(equal codes, codes, largest relative difference of scales) of all matrices that the folder has in codes."""
    tensors, config = load_tensors(folder), json.loads((folder / "config.json").read_text())["quantization_config"]
    equal = total = 0
    largest = 0.0
    for entry in layout(model.config):
        owner = model.get_submodule((entry.name or "").rpartition(".")[0])
        if not isinstance(owner, LowBitLinear) or not entry.hf_name.endswith("weight"):
            continue
        theirs, ours = read_matrix(tensors, entry.hf_name.removesuffix(".weight"), config), training_codes(owner)
        rows = slice(entry.start, entry.stop)
        equal, total = equal + equal_numbers(theirs.codes, ours.codes[rows]), total + theirs.codes.numel()
        largest = max(largest, ((theirs.scale - ours.scale[rows]).abs() / ours.scale[rows]).max().item())
    return equal, total, largest


def cells() -> list[tuple[str, str]]:
    """Every scheme with every format; those whose codes are kept come first."""
    schemes = [name for name in SCHEMES.names() if name not in ("auto", "bf16")]
    holding = {"bitnet": ("bitnet", "binary")}  # other schemes are refused
    every = [(scheme, fmt) for scheme in schemes for fmt in TRAINED_IN if scheme in holding.get(fmt, schemes)]
    return sorted(every, key=lambda cell: TRAINED_IN[cell[1]] != cell[0])


@pytest.mark.parametrize(("scheme", "fmt"), cells())
def test_the_table_says_what_exports_hold(scheme, fmt, tmp_path):
    model, quantized = _trained(scheme)
    says = kept(SCHEMES.make(scheme, {}, ""), made(fmt))
    held = export_quantized(model, source_of("llama"), tmp_path / "hf", made(fmt), left_as_trained(quantized))
    equal, total, scales = compare(model, tmp_path / "hf")
    print(f"{scheme} > {fmt}: {equal:,} of {total:,} codes equal; the table: {says.text}")
    assert total == 2 * 256 * (256 + 2 * 128 + 256 + 3 * 384)
    assert (equal == total and scales < 2**-22) is says.equal  # inverted twice, a scale may lose its last bit
    assert (held.equal == held.matrices) is says.equal


@functools.cache
def _trained(scheme: str) -> tuple[Decoder, QuantizedModel]:
    return trained(source_of("llama"), scheme)


@pytest.mark.parametrize(
    ("family", "fmt"), [case for case in itertools.product(FAMILIES, TRAINED_IN) if case[1] != "bitnet"]
)
def test_its_reader_gets_the_weights_that_training_multiplied(family, fmt, tmp_path):
    """transformers on a CPU. In bf16 it rounds compressed-tensors' scales, which in fp32 are those of training."""
    from transformers import AutoModelForCausalLM

    if fmt.startswith("ct_"):
        pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    if fmt.startswith("torchao"):
        pytest.importorskip("torchao", reason="pip install torchao")
        if "moe" in family:
            pytest.skip("refused")
    source, dtype = source_of(family), torch.bfloat16 if fmt in BF16_ONLY else torch.float32
    model, quantized = trained(source, TRAINED_IN[fmt], dtype=dtype)
    left = left_by_training(quantized.choices)
    held = export_quantized(model, source, tmp_path / "hf", made(fmt), ExportOptions(left=left))
    equal, total, _ = compare(model, tmp_path / "hf")
    print(f"{fmt} of {family}: {equal:,} of {total:,} codes equal")
    assert equal == total and held.equal == held.matrices > 0
    if "moe" in family and fmt in WITHOUT_EXPERTS:
        return
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    plain = dequantized(model, source, tmp_path / "dense")
    with torch.no_grad():
        found, expected = theirs(IDS).logits.float(), plain(IDS).logits.float()
    eight_bits = fmt.startswith("ct_") and made(fmt).activations is not None
    assert (found - expected).norm() <= (0.2 if eight_bits else 0.02) * expected.norm()
    values, wanted = dict(theirs.named_parameters()), dict(plain.named_parameters())
    matrices = [name for name in wanted if wanted[name].ndim > 1]
    tolerance = {"rtol": 2**-7, "atol": 0} if dtype is torch.bfloat16 else {"rtol": 0, "atol": 0}
    for name in matrices:
        if hasattr(values[name], "qdata"):  # torchao's tensor subclasses
            values[name] = values[name].dequantize()
        torch.testing.assert_close(values[name], wanted[name], **tolerance)
    assert len(matrices) > 6


def dequantized(model: Decoder, source: ModelSource, folder: Path):
    """transformers' model with the values that training multiplied."""
    from transformers import AutoModelForCausalLM

    plain = build_model(source, dtype=model.norm.weight.dtype)
    values = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            codes = training_codes(owner) if isinstance(owner, LowBitLinear) else None
            parameter.copy_(values[name] if codes is None else codes.value)
    export_hf(plain, source, folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("fmt", ["ct_fp8_row", "ct_int8"])
def test_a_layer_with_quantized_activations_is_theirs_bit_for_bit(fmt, tmp_path):
    """y = x_q wᵀ in bf16, with the scale of each token's activations by their rule: absmax / 448 or / 127.5."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    from transformers import AutoModelForCausalLM

    source = source_of("llama")
    model, quantized = trained(source, TRAINED_IN[fmt], dtype=torch.bfloat16)
    export_quantized(model, source, tmp_path / "hf", made(fmt), left_as_trained(quantized))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        theirs(IDS)  # decompresses
        layer, x = theirs.model.layers[1].mlp.down_proj, torch.randn(2, 5, 384).bfloat16()
        found = layer(x)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    matrix = read_matrix(load_tensors(tmp_path / "hf"), "model.layers.1.mlp.down_proj", config)
    weight = (matrix.codes * matrix.scale.bfloat16()).bfloat16()
    scale = x.abs().amax(-1, keepdim=True) / (448 if fmt == "ct_fp8_row" else 127.5)
    codes = x / scale
    codes = codes.to(torch.float8_e4m3fn) if fmt == "ct_fp8_row" else codes.round().clamp(-128, 127)
    assert torch.equal(found, torch.nn.functional.linear(codes.bfloat16() * scale, weight))


@pytest.mark.parametrize(("fmt", "subclass"), [("torchao_int8", "Int8Tensor"), ("torchao_fp8", "Float8Tensor")])
def test_every_file_of_torchaos_says_what_its_tensors_make(fmt, subclass, tmp_path, monkeypatch):
    monkeypatch.setattr(quantized_export, "MAX_SHARD_BYTES", 600_000)
    source = source_of("llama-tied")
    model, quantized = trained(source, TRAINED_IN[fmt], dtype=torch.bfloat16)
    export_quantized(model, source, tmp_path / "hf", made(fmt), left_as_trained(quantized))
    equal, total, scales = compare(model, tmp_path / "hf")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert equal == total and scales == 0 and len(files) > 1
    for path in files:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        names = json.loads(metadata["tensor_names"])
        assert set(names) == {entry.hf_name for entry in layout(model.config)}
        kinds = [json.loads(metadata[name]) for name in names]
        assert [kind["_type"] for kind in kinds].count(subclass) == 14
        assert json.loads(metadata["model.layers.1.mlp.down_proj.weight"])["_data"]["block_size"] == [1, 384]
        assert json.loads(metadata["model.norm.weight"]) == {"_type": "Tensor"}


@pytest.mark.parametrize("sub_norm", [True, False])
def test_bitnets_reader_computes_what_training_computes(sub_norm, tmp_path):
    """BitLinear quantizes activations as the scheme does; eager, for its compilation takes a while."""
    from transformers import AutoModelForCausalLM

    source = source_of("llama-tied")
    model, quantized = trained(source, "bitnet", {"sub_norm": sub_norm})
    held = export_quantized(model, source, tmp_path / "hf", made("bitnet"), left_as_trained(quantized))
    assert held.equal == held.matrices == 14
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "BitLinear"
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found, expected = theirs(IDS).logits, model(IDS)
    assert (found - expected).norm() <= 0.01 * expected.norm()


def test_bitnet_holds_no_other_weights_and_no_experts(tmp_path):
    model, _ = trained(source_of("llama"), "int8")
    with pytest.raises(UserError, match=r"'bitnet' holds ternary weights, and model.layers.0.self_attn.q_proj.weight"):
        export_quantized(model, source_of("llama"), tmp_path / "hf", made("bitnet"))
    model = build_model(source_of("qwen3_moe"))
    for fmt in ("bitnet", "torchao_int8", "torchao_fp8"):
        with pytest.raises(UserError, match=f"'{fmt}' has no reader for a mixture of experts; use another format"):
            export_quantized(model, source_of("qwen3_moe"), tmp_path / "hf", made(fmt))
    assert not list(tmp_path.iterdir())


def test_a_dense_export_of_ternary_weights_is_packed_again(tmp_path):
    """The dense values are -a, 0 and a, whose mean is not their scale."""
    source = source_of("llama")
    model, _ = trained(source, "bitnet")
    export_hf(model, source, tmp_path / "dense")
    again = read_model_source(str(tmp_path / "dense"))
    export_quantized(build_model(again, pretrained=True), again, tmp_path / "packed", made("bitnet"))
    equal, total, scales = compare(model, tmp_path / "packed")
    assert equal == total and scales < 2**-22


def test_a_quantized_head_is_exported_in_codes(tmp_path):
    source = source_of("llama")
    model, quantized = trained(source, "int8", head=True)
    held = export_quantized(model, source, tmp_path / "hf", made("ct_int8"), left_as_trained(quantized))
    equal, total, _ = compare(model, tmp_path / "hf")
    assert held.equal == 15 and equal == total and "lm_head.weight_scale" in load_tensors(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["ignore"] == []


def test_a_head_with_the_embeddings_matrix_stays(tmp_path):
    source = source_of("llama-tied")
    model, quantized = trained(source, "int8", head=True)
    export_quantized(model, source, tmp_path / "hf", made("ct_int8"), left_as_trained(quantized))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert load_tensors(tmp_path / "hf")["model.embed_tokens.weight"].dtype == torch.float32


def test_what_training_left_in_high_precision_stays_there(tmp_path):
    """Routers, and linears below --quantize_min_size; readers are told by name."""
    source = source_of("qwen3_moe")
    model = build_model(source, seed=1)
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, ""), seed=0, head=model.lm_head, min_size=200)
    left = left_by_training(quantized.choices)
    export_quantized(model.eval(), source, tmp_path / "hf", made("ct_int8"), ExportOptions(left=left))
    ignored = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.3.down_proj"} <= set(ignored)
    tensors = load_tensors(tmp_path / "hf")
    assert tensors["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.int8
    assert tensors["model.layers.0.mlp.experts.3.down_proj.weight"].dtype == torch.float32


def test_a_model_that_trained_in_high_precision_gets_the_formats_own_codes(tmp_path):
    source = source_of("llama")
    model, quantized = trained(source, "bf16")
    held = export_quantized(model, source, tmp_path / "hf", made("ct_nvfp4"), left_as_trained(quantized))
    assert (held.equal, held.describe()) == (
        0,
        "0 of 14 matrices hold the codes that training multiplied with; new: 14 x trained in high precision",
    )
    tensors = load_tensors(tmp_path / "hf")
    scales = [tensors[f"model.layers.0.self_attn.{name}_proj.weight_global_scale"] for name in "qkv"]
    assert scales[0] == scales[1] == scales[2]  # readers fuse them


def test_a_weight_of_half_a_block_is_refused_and_nothing_written(tmp_path):
    source = source_of("llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=192)
    model, quantized = trained(source, "fp8_blockwise")
    says = "'fp8_block' cannot hold model.layers.0.self_attn.q_proj.weight: it takes in-features in multiples of 128"
    with pytest.raises(UserError, match=says):
        export_quantized(model, source, tmp_path / "hf", made("fp8_block"), left_as_trained(quantized))
    assert not list(tmp_path.iterdir())


def test_several_files_hold_the_same(tmp_path, monkeypatch):
    source = source_of("llama")
    model, quantized = trained(source, "int4")
    left = left_by_training(quantized.choices)
    export_quantized(model, source, tmp_path / "one", made("ct_int4_g32"), ExportOptions(left=left))
    monkeypatch.setattr(quantized_export, "MAX_SHARD_BYTES", 200_000)
    export_quantized(model, source, tmp_path / "several", made("ct_int4_g32"), ExportOptions(left=left))
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    one, several = load_tensors(tmp_path / "one"), load_tensors(tmp_path / "several")
    assert one.keys() == several.keys() and all(torch.equal(one[name], several[name]) for name in one)


def test_the_formats_that_keep_a_schemes_codes():
    def names(*schemes: str) -> list[str]:
        return keeping([SCHEMES.make(scheme, {}, "") for scheme in schemes])

    assert names("fp8_blockwise") == ["fp8_block", "ct_fp8_block"] and names("mxfp8") == ["mxfp8", "ct_mxfp8"]
    assert names("int8") == ["ct_int8", "torchao_int8", "gguf_q8_0"] and names("bitnet")[0] == "bitnet"
    assert names("binary")[0] == "bitnet", "signs are ternary codes without 0"
    assert names("int4")[:2] == ["ct_int4_g32", "ct_int4_g128"] and names("nvfp4") == ["ct_nvfp4"]
    assert names("int8", "switchback")[0] == "ct_int8" and names("int8", "fp8_rowwise") == names() == []


def test_stochastically_rounded_weights_keep_their_bits(tmp_path):
    """Those of the last refresh, drawn again from its key."""
    source = source_of("llama")
    model, quantized = trained(source, "int8", {"stochastic_rounding": True})
    export_quantized(model, source, tmp_path / "hf", made("ct_int8"), left_as_trained(quantized))
    equal, total, scales = compare(model, tmp_path / "hf")
    assert equal == total and not scales
    nearest, _ = trained(source, "int8")
    assert not torch.equal(
        training_codes(nearest.layers[0].mlp.down_proj).codes, training_codes(model.layers[0].mlp.down_proj).codes
    )
