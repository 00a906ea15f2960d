"""What the swap will do, known before it: the printed list, the plan's figures, and what is refused or warned about."""

import dataclasses
from pathlib import Path

import pytest
import torch

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.core.hardware.device import describe_hardware
from qtrain.models import Decoder, ModelConfig, build_model, read_model_source
from qtrain.quant import LowBitLinear, describe_choices, quantize_linears
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.plan.plan import Plan
from qtrain.train.settings.settings import LanguageSettings
from tests.data.corpora import write_jsonl
from tests.system import TINY, call, flags, only_run, tree, write_model
from tests.train.plan.test_plan import SHAPE, checked_of, linears_of, plan_for

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    return tmp_path


def argv(**settings) -> list[str]:
    chosen = {"model": "tiny.json", "train_ds": TEXT, "seq_len": 32, "n_steps": 2, "device": "cpu", "quantize": "int8"}
    return flags(**{**chosen, **settings})


# ---- the list --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_a_dry_run_prints_what_the_run_then_does_to_each_linear(here, impl):
    settings = {"quantize_min_size": 33, "model_impl": impl, "export": False}
    write_model(Path("tiny.json"), hidden_size=48, num_attention_heads=2)
    dry, run = (call(llm_pretrain.main, argv(**settings, **more)) for more in ({"dry_run": True}, {}))
    assert dry.code == run.code == 0, run.err
    listed = [line for line in dry.out.splitlines() if "quantized" in line or "left, " in line]
    assert sum(int(line.split()[0]) for line in listed) == (9 if impl == "native" else 15)
    assert any("fewer than 33" in line for line in listed) == (impl == "hf")  # k and v have 24 out-features
    assert all(line in run.out for line in listed)
    assert all(line in (only_run(Path("runs")) / "train.log").read_text() for line in listed)


@pytest.mark.parametrize("quantize", ["int8", "int8_weight", "bitnet", "mxfp8", "bf16"])
@pytest.mark.parametrize("head", [False, True])
def test_the_planned_linears_are_the_swapped_ones(quantize, head):
    settings = LanguageSettings(quantize=quantize, quantize_lm_head=head, quantize_min_size=64)
    checked, config = checked_of(settings, dtype=torch.float32), ModelConfig.from_hf({**TINY, "hidden_size": 64})
    model = build_model(dataclasses.replace(read_model_source("quickstart"), config={**TINY, "hidden_size": 64}))
    quantized = quantize_linears(
        model, checked.scheme, seed=0, head=model.lm_head, quantize_head=head, min_size=settings.quantize_min_size
    )
    planned = linears_of(checked, config)
    assert planned == quantized.choices and describe_choices(quantized.choices)
    swapped = {name: m.scheme for name, m in model.named_modules() if isinstance(m, LowBitLinear)}
    assert {linear.name: linear.scheme for linear in planned if linear.scheme} == swapped
    assert [linear.name for linear in planned if linear.is_head] == ["lm_head"]


# ---- refused, warned -------------------------------------------------------------------------------------------------


def test_a_scheme_that_swaps_nothing_is_refused_with_the_reasons(here):
    before = tree(here)
    done = call(llm_pretrain.main, argv(quantize_min_size=100_000))
    assert done.code == 2 and done.out == "" and tree(here) == before
    assert done.err == (
        "error: --quantize: 'int8' quantizes none of the model's 9 linears: 8 x it has fewer than 100000 in- or "
        "out-features (--quantize_min_size); 1 x output head (--quantize_lm_head takes it too). Change that, or stay "
        "in high precision with --quantize bf16.\n"
    )
    assert call(llm_pretrain.main, argv(quantize_min_size=100_000, quantize="bf16", dry_run=True)).code == 0
    auto = {"quantize": "auto", "quantize_kwargs": {"candidates": ["bf16"]}}  # all of it bf16, by choice
    assert call(llm_pretrain.main, argv(**auto, dry_run=True)).code == 0


def test_a_frozen_base_that_stores_nothing_is_refused(here):
    settings = {"pretrained": False, "lora": {"base": "nf4"}, "quantize": "bf16", "quantize_min_size": 1000}
    done = call(llm_finetune.main, argv(**settings, dry_run=True))
    assert done.code == 2 and "--lora.base: 'frozen nf4' quantizes none of the model's 9 linears" in done.err


def test_a_vision_model_without_linears_to_swap_is_refused(here):
    pytest.importorskip("timm")
    pytest.importorskip("sklearn")
    digits = {"type": "sklearn:digits"}
    settings = {"model": "resnet18", "pretrained": False, "train_ds": digits, "device": "cpu"}
    done = call(timm_finetune.main, flags(**settings, quantize="fp8_blockwise"))
    assert done.code == 2 and "quantizes none of the model's 21 linears and convolutions: 1 x 3 input" in done.err
    assert "19 x the scheme's scales of 1x128 blocks are for linears; 1 x output head" in done.err
    for changes in ({"quantize": "fp8_blockwise", "quantize_lm_head": True}, {"quantize": "int8"}):
        assert call(timm_finetune.main, flags(**settings, **changes, dry_run=True)).code == 0


def test_more_than_half_of_the_work_left_in_high_precision_is_one_warning(here):
    """Of 51,200 weights 32,768 are the head's; with the smaller vocabulary 8,256 of 26,688."""
    write_model(Path("tiny.json"), vocab_size=1024)
    done = call(llm_pretrain.main, argv(dry_run=True))
    (line,) = [line for line in done.out.splitlines() if line.startswith("warning: ")]
    assert line == "warning: 64% of the linears' FLOPs stay in fp32: 1 x output head (--quantize_lm_head takes it too)"
    write_model(Path("tiny.json"))
    for settings in ({}, {"quantize": "bf16"}, {"quantize_lm_head": True}):
        assert "warning" not in call(llm_pretrain.main, argv(**settings, dry_run=True)).out


def test_fp8_on_a_gpu_without_it_is_refused_by_the_plan_as_by_the_code(here, monkeypatch):
    """One truth: the linears would stay in bf16, so nothing is emulated and nothing is trained."""
    name = "NVIDIA GeForce RTX 3090"
    properties = type("Properties", (), {"name": name, "total_memory": 24 * 2**30})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 24 * 2**30))
    assert not describe_hardware(torch.device("cuda", 0)).measured
    settings = {"device": "cuda", "dry_run": True, "model": "llama-100m"}
    done = call(llm_pretrain.main, argv(**settings, quantize="fp8_rowwise"))
    assert done.code == 2 and f"48 x {name} has no FP8 arithmetic" in done.err and "emulated" not in done.out, done
    for scheme in ("int8", "bf16"):
        found = call(llm_pretrain.main, argv(**settings, quantize=scheme))
        assert found.code == 0 and "emulated" not in found.out, found.err


# ---- figures ---------------------------------------------------------------------------------------------------------


NARROW = {**SHAPE, "model_type": "llama", "hidden_size": 128, "head_dim": 32, "num_attention_heads": 2}
"""o_proj has 64 in-features, all other linears at least 96 in either direction."""


def test_sol_and_memory_count_only_what_is_swapped():
    config = ModelConfig.from_hf({**NARROW, "num_key_value_heads": 1, "intermediate_size": 96})

    def plan(**changes) -> Plan:
        return plan_for(checked_of(LanguageSettings(batch_size=1, seq_len=64, **changes)), config)

    whole, plain = plan(quantize="int8"), plan(quantize="bf16")
    assert plan(quantize="int8", quantize_min_size=64) == dataclasses.replace(whole)
    some = plan(quantize="int8", quantize_min_size=65)
    o_proj = 64 * 128 / (64 * 128 + 128 * 128 + 128 * 192 + 96 * 128)
    int8, bf16 = whole.seconds["blocks"], plain.seconds["blocks"]
    assert some.seconds["blocks"] == pytest.approx((1 - o_proj) * int8 + o_proj * bf16) and int8 < bf16
    assert whole.memory["weights"] - some.memory["weights"] == 2 * 2 * 64 * 128  # codes in two layouts, two layers
    # Beside the attention output, which is kept anyway, its codes; the peak is where one layer is left.
    assert whole.memory["activations"] - some.memory["activations"] == 64 * 64
    with_head = plan(quantize="int8", quantize_lm_head=True)
    assert with_head.seconds["head"] == pytest.approx(whole.seconds["head"] / 2, rel=1e-3)
    assert with_head.memory["weights"] - whole.memory["weights"] == 2 * config.vocab_size * 128


def test_a_quantized_head_needs_the_codes_of_its_logits_gradient():
    """Of the 0.5B, 32 sequences of 1,024: of a chunk of 8,192 tokens, in two layouts; the codes of its weight in two
    layouts; and four chunks' gradients of it in bf16, in place of their sum in fp32."""
    config, loss = read_model_source("qwen2.5-0.5b").model_config(), []
    for head in (False, True):
        sizes = {"model": "qwen2.5-0.5b", "quantize": "int8", "seq_len": 1024, "batch_size": 32}
        checked = checked_of(LanguageSettings(**sizes, quantize_lm_head=head))
        moments = LanguageRun(checked, config, linears_of(checked, config), None).memory().moments
        loss.append(sum(moments["the loss"].values()))
    more = loss[1] - loss[0]
    logits, weight = 8192 * 151936 * 2, 151936 * 896
    assert more == pytest.approx(logits + 2 * weight + (4 * 2 - 4) * weight, rel=0.01)


@pytest.mark.parametrize("min_size", [0, 65])
@pytest.mark.parametrize("scheme", ["int8", "int8_weight", "fp8_tensorwise", "switchback"])
def test_planned_bytes_of_weights_are_those_of_the_swapped_model(scheme, min_size):
    """Weights and codes of a real model, fp32 scales aside."""
    config = ModelConfig.from_hf(NARROW)
    settings = LanguageSettings(batch_size=1, seq_len=8, quantize=scheme, quantize_min_size=min_size)
    checked = checked_of(settings)
    model = Decoder(config).to(torch.bfloat16)
    quantize_linears(model, checked.scheme, seed=0, head=model.lm_head, min_size=min_size)
    held = [t for p in model.parameters() for t in (p.inner.values() if isinstance(p, StoredWeight) else [p])]
    held += [t for name, t in model.named_buffers() if "weight_codes" in name]
    sizes = {id(t): t.nbytes for t in held if t.dtype != torch.float32}
    assert plan_for(checked, config).memory["weights"] == sum(sizes.values())
