"""Adapters: those of PEFT, number for number, from the first step to the saved folder; and frozen bases in low bits."""

import dataclasses
import json
import math
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtrain.core.errors import UserError
from qtrain.models import (
    Lora,
    ModelSource,
    add_lora,
    as_lora,
    build_model,
    export_hf,
    load_adapter,
    merge_lora,
    read_model_source,
    save_adapter,
)
from qtrain.models.adapters.peft_format import adapter_tensors
from qtrain.quant import quantize_linears
from qtrain.quant.schemes.frozen_base import BASES, base_scheme
from tests.models.beside_peft import train_beside_peft
from tests.system import TINY

STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("lora") / "hf"
    source = ModelSource("tiny", {**TINY, "num_key_value_heads": 1}, "--model")
    export_hf(build_model(source, seed=1), source, path)
    return path


def batches() -> list[torch.Tensor]:
    """Two batches in turn, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 258, (2, 24), generator=generator) for _ in range(2)] * (STEPS // 2)


def adapted(folder, lora: Lora, impl: str = "native"):
    model = build_model(read_model_source(str(folder)), impl=impl, pretrained=True)
    add_lora(model, lora, seed=3)
    return model


@pytest.mark.parametrize(
    ("lora", "impl"),
    [
        (Lora(r=4, alpha=8), "native"),
        (Lora(r=3, alpha=6, rslora=True, targets=("k_proj", "up_proj", "down_proj")), "native"),
        (Lora(r=4, alpha=8, targets=("q_proj", "gate_proj")), "hf"),
        (Lora(r=4, alpha=8, dora=True), "native"),
        (Lora(r=3, alpha=6, dora=True, rslora=True, targets=("k_proj", "up_proj", "down_proj")), "native"),
    ],
)
def test_twenty_steps_equal_pefts_and_the_saved_adapter_loads_there(folder, tmp_path, lora, impl):
    peft = pytest.importorskip("peft")
    own = adapted(folder, lora, impl)
    save_adapter(own, lora, str(folder), tmp_path / "start")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "start", is_trainable=True).train()
    losses = train_beside_peft(own, theirs, batches())
    assert losses[-1] < losses[0] - 0.05, "nothing was learned"

    save_adapter(own, lora, str(folder), tmp_path / "end")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "end").eval()
    ids = batches()[0]
    with torch.no_grad():
        logits = own.eval()(ids)
        assert torch.allclose(loaded(input_ids=ids).logits, logits, atol=1e-5)
        merge_lora(own)
        assert not adapter_tensors(own) and torch.allclose(own(ids), logits, atol=1e-5)
        export_hf(own, read_model_source(str(folder)), tmp_path / "hf")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
        assert torch.allclose(merged(input_ids=ids).logits, logits, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_peft_saved_loads_here(folder, tmp_path, dora):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["k_proj", "up_proj", "o_proj"], use_dora=dora)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn_like(p) * 0.1)
    theirs.save_pretrained(tmp_path)
    lora = as_lora({"adapter": str(tmp_path)})
    assert (lora.r, lora.alpha, lora.dora) == (4, 6.0, dora)
    own = adapted(folder, lora).eval()
    load_adapter(own, lora.adapter)
    ids = batches()[0]
    with torch.no_grad():
        assert torch.allclose(own(ids), theirs(input_ids=ids).logits, atol=1e-5)


def test_an_adapter_goes_on_from_its_folder_with_its_own_settings(folder, tmp_path):
    lora = Lora(r=4, alpha=8, rslora=True, targets=("q_proj", "o_proj"))
    model = adapted(folder, lora)
    with torch.no_grad():
        for tensor, _ in adapter_tensors(model).values():
            tensor.normal_()
    save_adapter(model, lora, "x", tmp_path / "adapter")
    again = as_lora({"adapter": str(tmp_path / "adapter"), "r": lora.r, "targets": ["q_proj", "o_proj"]})
    assert again == dataclasses.replace(lora, targets=("o_proj", "q_proj"), adapter=again.adapter)
    other = adapted(folder, again)
    load_adapter(other, again.adapter)
    ids = batches()[0]
    assert torch.equal(other(ids), model(ids))
    wider = build_model(ModelSource("wider", {**TINY, "hidden_size": 64}, "--model"))
    add_lora(wider, again, seed=0)
    with pytest.raises(UserError, match=r"is an adapter of another model: .* has the shape"):
        load_adapter(wider, again.adapter)


@pytest.mark.parametrize(
    ("key", "value", "saved"),
    [
        ("r", 4, "16"),
        ("alpha", 1, "16.0"),
        ("rslora", True, "False"),
        ("dora", True, "False"),
        ("targets", ["q_proj"], "['o_proj', 'q_proj']"),
    ],
)
def test_an_option_that_contradicts_the_adapter_is_refused(folder, tmp_path, key, value, saved):
    """What would be trained and what config.json records must be the same."""
    lora = Lora(targets=("q_proj", "o_proj"))
    save_adapter(adapted(folder, lora), lora, "x", tmp_path)
    given = {"adapter": str(tmp_path), key: value}
    with pytest.raises(
        UserError, match=rf"--lora\.{key}: .* contradicts the adapter .*, which has {re.escape(saved)}\."
    ):
        as_lora(given)
    assert as_lora({**given, key: getattr(lora, key)}).r == 16


BASES_AND_PRODUCTS = [
    *((base, "bf16", dora) for base in BASES for dora in (False, True)),
    *(("nf4", products, False) for products in ("int8", "fp8_rowwise", "fp8_tensorwise")),
]


@pytest.mark.parametrize(("base", "products", "dora"), BASES_AND_PRODUCTS)
def test_a_frozen_base_in_low_bits_keeps_its_codes_and_trains_adapters(folder, base, products, dora):
    """Its products are those of its dequantized weights, up to the rounding of activations; merging keeps the sum."""
    plain = build_model(read_model_source(str(folder)), pretrained=True)
    model = build_model(read_model_source(str(folder)), pretrained=True)
    quantized = quantize_linears(model, base_scheme(base, products), seed=0, head=model.lm_head)
    add_lora(model, Lora(r=4, dora=dora), seed=0)
    ids = batches()[0]
    before = {name: t.clone() for name, t in model.named_buffers()}
    error = (model(ids) - plain(ids)).norm() / plain(ids).norm()
    assert 0 < error < {"nf4": 0.25, "int8": 0.05, "fp8": 0.1}[base]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    quantized.track_versions(optimizer)
    found = []
    for _ in range(8):
        quantized.assert_fresh()
        loss = model(ids[:, :-1], ids[:, 1:].contiguous()).loss / ids[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        quantized.refresh()
        found.append(loss.item())
    assert found[-1] < found[0] - 0.1
    assert all(torch.equal(t, before[name]) for name, t in model.named_buffers())
    with torch.no_grad():
        logits = model.eval()(ids)
        merge_lora(model)
        error = (model(ids) - logits).norm() / logits.norm()
    assert error < {"nf4": 1e-5 if products == "bf16" else 0.1, "int8": 0.05, "fp8": 0.1}[base]


def test_dora_beside_biases_and_rows_without_adapters_is_its_merged_weights():
    """Lengths and adapters far from where they start; the bias is not scaled, nor are the rows of k and gate."""
    source = ModelSource("biased", {**TINY, "attention_bias": True, "mlp_bias": True}, "--model")
    model = build_model(source, seed=1)
    add_lora(model, Lora(r=3, alpha=5, dora=True, targets=("q_proj", "v_proj", "up_proj", "down_proj")), seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad or name.endswith("bias"):
                p.add_(torch.randn_like(p) * 0.3)
    ids = batches()[0]
    with torch.no_grad():
        logits = model.eval()(ids)
        merge_lora(model)
        assert torch.allclose(model(ids), logits, atol=1e-5) and logits.std() > 0.01


def test_only_adapters_have_gradients_and_no_weight_has_one(folder):
    """A base in INT8 makes no grad_weight, whose codes of x would be kept."""
    for base in ("none", "nf4", "int8"):
        model = build_model(read_model_source(str(folder)), pretrained=True)
        if base != "none":
            quantize_linears(model, base_scheme(base, "bf16"), seed=0, head=model.lm_head)
        add_lora(model, Lora(r=2), seed=0)
        ids = batches()[0]
        model(ids[:, :-1], ids[:, 1:].contiguous()).loss.backward()
        given = {name for name, p in model.named_parameters() if p.grad is not None}
        assert given == {name for name, _ in model.named_parameters() if "lora_" in name} and len(given) == 28


def test_scale_and_targets(folder):
    assert Lora(r=16, alpha=8).scale == 0.5 and Lora(r=16, alpha=8, rslora=True).scale == 8 / math.sqrt(16)
    model = adapted(folder, Lora(r=2, targets=("v_proj",)))
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert names == [f"layers.{i}.attn.qkv.{k}.0" for i in range(2) for k in ("lora_a", "lora_b")]
    with pytest.raises(UserError, match=r"--lora\.targets: unknown projection 'q_prj'.* Did you mean 'q_proj'"):
        adapted(folder, Lora(targets=("q_prj",)))


def test_a_damaged_or_foreign_adapter_is_named(folder, tmp_path, capsys):
    lora = Lora(r=2)
    model = adapted(folder, lora)
    save_adapter(model, lora, "their/base", tmp_path)
    load_adapter(model, str(tmp_path), base="their/base")
    assert not capsys.readouterr().out
    load_adapter(model, str(tmp_path), base="other")
    assert f"{tmp_path} was trained on 'their/base'; here it is added to --model other" in capsys.readouterr().out
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    for change, says in (
        (lambda t: t * float("nan"), "holds NaN"),
        (lambda t: t.to(torch.int64), "is stored as int64; only floating-point"),
    ):
        save_file({name: change(t) for name, t in tensors.items()}, weights)
        with pytest.raises(UserError, match=says):
            load_adapter(model, str(tmp_path))
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is not a file"):
        load_adapter(model, str(tmp_path))


@pytest.mark.parametrize("change", [{"use_dora": "no"}, {"use_rslora": []}, {"target_parameters": 5}, {"r": [2]}])
def test_an_adapters_config_of_other_kinds_is_refused(folder, tmp_path, change):
    lora = Lora(r=2)
    save_adapter(adapted(folder, lora), lora, "base", tmp_path)
    (tmp_path / "checksums.json").unlink()
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(UserError, match=rf"--lora\.adapter: {next(iter(change))}: .* is not allowed"):
        as_lora({"adapter": str(tmp_path)})
