"""Adapters on a checkpoint in codes: the frozen base is the file's codes, bit for bit."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import llm_finetune
from qtrain.models import Decoder, Lora, add_lora, build_model, merge_lora, read_model_source
from qtrain.models.config.hf_layout import layout
from qtrain.models.cost.trained import only_adapters
from qtrain.models.hf.readers.declared import DeclaredCodes
from qtrain.models.hf.readers.kept import IN_HIGH_PRECISION, linears_without_codes
from qtrain.quant import LowBitLinear, QuantizedModel, quantize_linears
from qtrain.quant.schemes.frozen_base import keeping_scheme
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.log.metrics import read_metrics
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.settings.settings import LanguageSettings
from tests.models.hf.codes_reader import load_tensors, read_matrix
from tests.models.hf.readers.coded import change, matrices, read_nf4, split, write_coded
from tests.peak_bytes import PeakBytes
from tests.system import call, flags, only_run
from tests.train.plan.test_plan import checked_of, linears_of

IDS = torch.arange(48).view(2, 24)
KEPT = {
    "fp8_block": "frozen fp8_block",
    "ct_fp8_block": "frozen fp8_block",
    "ct_fp8_row": "frozen fp8",
    "ct_int8": "frozen int8",
    "ct_int4_g128": "frozen int4_g128",
    "ct_int4_g32": "frozen int4_g32",
    "nf4": "frozen nf4",
    "nf4_double": "frozen nf4",
    "bitnet": "frozen ternary",
}
DEQUANTIZED = ["mxfp8", "ct_mxfp8", "ct_nvfp4"]


def built(folder: Path, quantize: str = "bf16", **options) -> tuple[Decoder, QuantizedModel, DeclaredCodes]:
    source = read_model_source(str(folder))
    declared = source.declared_codes()
    model = build_model(source, pretrained=True, lazy=True, **options)
    scheme, left = keeping_scheme(declared.format, quantize), linears_without_codes(declared, model)
    return model, quantize_linears(model, scheme, seed=0, head=model.lm_head, left=left), declared


def file_codes(tensors: dict, module: str) -> torch.Tensor:
    """The codes of the file's own tensor, in ours: only nibbles of NF4 and bits of BitNet are at other places."""
    if f"{module}.weight_packed" in tensors:  # int32 of 8 codes + 8
        packed = tensors[f"{module}.weight_packed"].view(torch.uint8)
        return packed ^ 0x88
    weight = tensors[f"{module}.weight"]
    if f"{module}.weight.absmax" in tensors:
        return weight.flatten() >> 4 | weight.flatten() << 4
    if weight.dtype == torch.uint8:
        codes = torch.cat([(weight >> 2 * i) & 3 for i in range(4)]).long() - 1
        fields = (codes & 3).view(len(codes), -1, 4)
        return sum(fields[..., i] << 2 * i for i in range(4)).to(torch.uint8)
    return weight


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize(("fmt", "family"), [*((fmt, "llama") for fmt in KEPT), ("fp8_block", "qwen3_moe")])
def test_codes_are_those_of_the_file_before_and_after_training(fmt, family, files, tmp_path):
    write_coded(tmp_path / "hf", fmt, family)
    if files == "several":
        split(tmp_path / "hf")
    model, quantized, _ = built(tmp_path / "hf")
    assert {c.spec for c in quantized.choices if c.reason is None} == {KEPT[fmt]}
    add_lora(model, Lora(r=4), seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    found = []
    for _ in range(5):
        loss = model(IDS[:, :-1], IDS[:, 1:].contiguous()).loss / 46
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        quantized.refresh()
        found.append(loss.item())
    assert found[-1] < found[0] - 0.05
    tensors = load_tensors(tmp_path / "hf")
    config = read_model_source(str(tmp_path / "hf")).config["quantization_config"]
    plain = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)
    names = dict(matrices(plain))
    compared = 0
    for name, module in model.named_modules():
        if not isinstance(module, LowBitLinear):
            continue
        assert isinstance(module.weight.data, StoredWeight)
        value, codes = module.weight.data.dequantize(), module.weight.data.codes
        own = name.removesuffix(".base")
        for hf_name, start, rows in slices(plain, own):
            wanted = read_nf4(tensors, hf_name) if "nf4" in fmt else read_matrix(tensors, hf_name, config).value
            assert torch.equal(value[start : start + rows], wanted) and torch.equal(wanted, names[hf_name])
            ours = codes[start : start + rows].flatten().view(torch.uint8)
            assert torch.equal(ours, file_codes(tensors, hf_name).flatten().view(torch.uint8)), hf_name
            compared += 1
    assert compared == (16 if family == "qwen3_moe" else 14)


def slices(model: Decoder, linear: str) -> list[tuple[str, int, int]]:
    """(module in the checkpoint, first row, rows) of a linear."""
    shape = model.get_submodule(linear).weight.shape
    return [
        (e.hf_name.removesuffix(".weight"), e.start, e.shape(shape)[0])
        for e in layout(model.config)
        if e.name == f"{linear}.weight"
    ]


@pytest.mark.parametrize("fmt", KEPT)
def test_products_are_those_of_the_dequantized_weights(fmt, tmp_path):
    """Up to the rounding of activations where they are quantized; gradients of inputs and adapters too."""
    write_coded(tmp_path / "hf", fmt)
    model, _, declared = built(tmp_path / "hf")
    plain = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)
    results = []
    for one in (model, plain):
        add_lora(one, Lora(r=4), seed=0)
        with torch.no_grad():
            for name, p in one.named_parameters():
                if "lora_b" in name:
                    p.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        loss = one(IDS[:, :-1], IDS[:, 1:].contiguous()).loss / 46
        loss.backward()
        results.append([loss.detach()[None], *(p.grad.flatten() for p in one.parameters() if p.grad is not None)])
    rounding = {"e4m3": 0.35, "int8": 0.1}.get(declared.format.fmt, 1e-4)
    loss, wanted = results[0][0], results[1][0]
    assert abs(loss - wanted) <= 0.05 * rounding * wanted
    gradient, wanted = (torch.cat(found[1:]) for found in results)
    assert (gradient - wanted).norm() <= rounding * wanted.norm()


def test_fp8_blocks_take_one_byte_a_weight(tmp_path):
    write_coded(tmp_path / "hf", "fp8_block")
    _, quantized, _ = built(tmp_path / "hf")
    for linear in quantized.linears:
        buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in linear.buffers()}
        weight = linear.weight.data
        own = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (weight.codes, weight.scale)}
        assert sum({**buffers, **own}.values()) < 1.01 * weight.numel() + 100


def test_both_layouts_of_fp8_blocks_are_the_same_codes(tmp_path):
    """Experts read both; requantizing values would change codes whose block does not reach 448."""
    write_coded(tmp_path / "hf", "fp8_block", "qwen3_moe")

    def quarter(tensors):
        tensors.update({n: (t.float() / 4).to(t.dtype) for n, t in tensors.items() if t.itemsize == 1})

    change(tmp_path / "hf", quarter)
    model, _, _ = built(tmp_path / "hf")
    experts = model.layers[0].mlp.experts.gate_up
    rows, columns = experts.weight_codes.operands()
    assert torch.equal(rows.codes.view(torch.uint8).t(), columns.codes.view(torch.uint8))
    assert torch.equal(rows.scale.t(), columns.scale)


@pytest.mark.parametrize("fmt", ["fp8_block", "ct_int8", "nf4_double", "ct_int4_g32"])
def test_a_build_takes_the_model_and_one_matrix(fmt, tmp_path):
    """No weight is made in high precision; the plan says at least what it takes."""
    sizes = {"num_hidden_layers": 12, "dtype": "bfloat16"}
    source = write_coded(tmp_path / "hf", fmt, **sizes)
    scheme = keeping_scheme(source.declared_codes().format, "bf16")
    config, checked = source.model_config(), checked_of(LanguageSettings(pretrained=True), scheme)
    checked = dataclasses.replace(checked, dtype=torch.bfloat16)
    trained = only_adapters(config, Lora(r=1))
    planned = sum(LanguageRun(checked, config, linears_of(checked, config), trained).memory().build.values())
    with PeakBytes() as counted:
        model, _, _ = built(tmp_path / "hf", dtype=torch.bfloat16)
    tensors = [*model.parameters(), *model.buffers()]
    tensors = [t for p in tensors for t in (p.data.inner.values() if isinstance(p.data, StoredWeight) else [p])]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    largest = 2 * 384 * 256
    print(f"{fmt}: model {sum(storages.values()):,} peak {counted.peak:,} planned {planned:,}")
    assert counted.peak <= sum(storages.values()) + 6 * largest
    assert counted.peak <= 1.05 * planned


def test_linears_that_the_checkpoint_has_in_high_precision_stay(tmp_path):
    write_coded(tmp_path / "hf", "ct_int8")
    dense = torch.randn(256, 384)
    name = "model.layers.0.mlp.down_proj"

    def turn(tensors):
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = dense

    change(tmp_path / "hf", turn, ignore=["lm_head", "re:.*layers.0.mlp.down_proj"])
    model, quantized, _ = built(tmp_path / "hf")
    reasons = {c.name: c.reason for c in quantized.choices if c.reason}
    assert reasons["layers.0.mlp.down_proj"] == IN_HIGH_PRECISION and len(reasons) == 2
    assert torch.equal(model.layers[0].mlp.down_proj.weight, dense)


def test_blocks_that_projections_cut_are_dequantized(tmp_path):
    """A head of 64 rows ends within a block of 128 of the fused q, k, v."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 256}
    write_coded(tmp_path / "hf", "ct_fp8_row", **sizes)

    def turn(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale")]:
            n, k = tensors[name.removesuffix("_scale")].shape
            del tensors[name]
            tensors[f"{name}_inv"] = torch.rand(-(-n // 128), -(-k // 128)) + 0.5

    change(tmp_path / "hf", turn, quant_method="fp8", weight_block_size=[128, 128])
    model, quantized, _ = built(tmp_path / "hf")
    reasons = {c.name: c.reason for c in quantized.choices if c.reason}
    assert "no multiples of 128 rows" in reasons["layers.0.attn.qkv"] and len(reasons) == 3
    plain = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)
    assert torch.equal(model.layers[0].attn.qkv.weight, plain.layers[0].attn.qkv.weight)


@pytest.mark.parametrize("fmt", DEQUANTIZED)
def test_formats_that_no_base_holds(fmt, tmp_path):
    assert keeping_scheme(write_coded(tmp_path / "hf", fmt).declared_codes().format, "bf16") is None


def test_quantize_multiplies_an_nf4_base_and_dequantizes_others(tmp_path):
    nf4 = write_coded(tmp_path / "nf4", "nf4").declared_codes().format
    assert keeping_scheme(nf4, "int8").activations == "int8" and keeping_scheme(nf4, "int8").keeps_codes
    assert keeping_scheme(nf4, "fp8_blockwise") is None
    fp8 = write_coded(tmp_path / "fp8", "fp8_block").declared_codes().format
    assert keeping_scheme(fp8, "int8") is None


# ---- runs ------------------------------------------------------------------------------------------------------------


LETTERS = "the quick brown fox jumps over the lazy dog and goes home. "


def finetune(folder: str, **settings):
    train_ds = {"type": "text", "paths": "text.txt", "tokenizer": "byte"}
    common = {"model": folder, "train_ds": train_ds, "n_steps": 8, "seq_len": 32, "batch_size": 4, "device": "cpu"}
    return call(llm_finetune.main, flags(**{**common, "lr": 0.01, "dtype": "fp32", **settings}))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(LETTERS * 200)
    return tmp_path


RUNS = {
    "kept": ({"lora": {"r": 4}}, "the frozen base of 8 linears keeps them as they are"),
    "dense": ({"lora": {"r": 4, "base": "dense"}}, "training starts from their values, dequantized"),
    "full": ({"lr": 0.001}, "training starts from their values, dequantized"),
    "other base": ({"lora": {"r": 4, "base": "nf4"}}, "training starts from their values, dequantized"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_says_what_it_does_with_the_codes_and_learns(case, here):
    settings, line = RUNS[case]
    write_coded(Path("coded"), "fp8_block", vocab_size=258)
    done = finetune("coded", **settings)
    assert done.code == 0, done.err
    said = "weights 14 matrices of --model are codes (fp8: e4m3, a scale per 128x128): "
    assert re.search(re.escape(said + line), done.out), done.out
    assert ("frozen fp8_block" in done.out) is (case == "kept")
    run = only_run(Path("runs"), "llm_finetune")
    found = [r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    assert found[-1] < found[0] - 0.1
    merged = load_file(run / "hf" / "model.safetensors")
    assert merged["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_a_merged_export_is_the_kept_base_with_its_adapters(here):
    """No --lora here: the merge is asked of the model itself."""
    write_coded(Path("coded"), "fp8_block")
    model, _, _ = built(Path("coded"))
    add_lora(model, Lora(r=4), seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_b" in name:
                p.normal_()
    up = model.layers[0].mlp.down_proj
    wanted = up.base.weight.data.dequantize() + up.scale * up.lora_b[0] @ up.lora_a[0]
    merge_lora(model)
    torch.testing.assert_close(model.layers[0].mlp.down_proj.weight, wanted)


def test_a_merge_back_into_the_format_of_the_checkpoint_is_what_was_trained(here):
    """The last evaluation of the run is that of the exported codes."""
    write_coded(Path("coded"), "fp8_block", vocab_size=258)
    text = {"type": "text", "paths": "text.txt", "tokenizer": "byte"}
    done = finetune(
        "coded", lora={"r": 4, "merge_format": "fp8_block"}, export_format=["hf", "fp8_block"], eval_ds=text,
        eval_sequences=4, n_steps=12,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "all 14 matrices hold the codes that training multiplied with" in done.out
    run = only_run(Path("runs"), "llm_finetune")
    last = [r["eval_loss"] for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r][-1]
    again = finetune(str(run / "fp8_block"), lr=0.0, n_steps=1, eval_ds=text, eval_sequences=4, runs_dir="again")
    assert again.code == 0, again.err
    records = read_metrics(only_run(Path("again"), "llm_finetune") / "metrics.jsonl")
    first = next(r["eval_loss"] for r in records if "eval_loss" in r)
    assert abs(first - last) < 1e-4


def test_a_checkpoint_of_a_run_resumes_on_the_same_codes(here):
    write_coded(Path("coded"), "ct_int8", vocab_size=258)
    done = finetune("coded", lora={"r": 4}, ckpt_interval=4)
    assert done.code == 0, done.err
    run = only_run(Path("runs"), "llm_finetune")
    again = finetune("coded", lora={"r": 4}, n_steps=10, resume=str(run / "checkpoints" / "00000004"))
    assert again.code == 0, again.err
    change(Path("coded"), lambda t: t["model.layers.0.mlp.up_proj.weight"].add_(1))
    changed = finetune("coded", lora={"r": 4}, n_steps=10, resume=str(run / "checkpoints" / "00000004"))
    assert changed.code == 2 and "layers.0.mlp.gate_up" in changed.err
