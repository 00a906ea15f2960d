"""The scripts on mixtures of experts: they train, resume bit for bit, say how experts are used, and export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import llm_finetune
import llm_pretrain
from qtrain.models import build_model, read_model_source
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl
from tests.system import call, contents, flags, losses, only_run, write_model

EXPERTS = {"intermediate_size": 48, "num_hidden_layers": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN = {
    **EXPERTS,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "head_dim": 16,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
DEEPSEEK = {
    **EXPERTS,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("jsonl"))
    return tmp_path


def tiny(shape: dict, **settings) -> list[str]:
    text = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    chosen = {"model": write_model(Path("tiny.json"), **shape), "train_ds": text, "seq_len": 32, "n_steps": 4}
    return flags(**{**chosen, "device": "cpu", "export": False, "quantize": "bf16", **settings})


def test_a_mixture_trains_and_its_log_tells_how_experts_are_used(here):
    options = {"n_steps": 40, "lr": 0.01, "router_z_loss": 1e-3, "activation_checkpointing": "full"}
    done = call(llm_pretrain.main, tiny(QWEN, **options, sample_prompts=["def "], sample_tokens=3, log_interval=2))
    assert done.code == 0, done.err
    assert "of them active" in done.out
    steps = [record for record in read_metrics(only_run(Path("runs")) / "metrics.jsonl") if "loss" in record]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert all(1 <= record["expert_load"] <= 4 and 0 < record["expert_entropy"] <= 1 for record in steps)


def test_a_resumed_run_is_the_uninterrupted_one(here):
    """DeepSeek-V3's selection biases are part of the state."""
    options = {"router_bias_rate": 0.01, "router_balance_loss": 1e-3, "micro_batch_size": 2, "batch_size": 4}
    options |= {"n_steps": 6, "ckpt_interval": 3}
    assert call(llm_pretrain.main, tiny(DEEPSEEK, **options)).code == 0
    run = only_run(Path("runs"))
    halfway, end = sorted((run / "checkpoints").iterdir())
    found, told, end_time = contents(end), losses(run), end.stat().st_mtime_ns
    biases = [t for name, t in found.items() if name.endswith("router.bias")]
    assert len(biases) == 2 and all(0 < t.abs().max() <= 0.06 + 1e-6 for t in biases)
    done = call(llm_pretrain.main, tiny(DEEPSEEK, **options, resume=str(halfway)))
    assert done.code == 0, done.err
    again = max(Path("runs").rglob("checkpoints/*"), key=lambda path: path.stat().st_mtime_ns)
    assert again.stat().st_mtime_ns > end_time and again.name == end.name
    assert losses(again.parent.parent)[-3:] == told[-3:]
    resumed = contents(again)
    assert found.keys() == resumed.keys()
    assert all(torch.equal(t, resumed[name]) for name, t in found.items() if name.startswith("model."))


@pytest.mark.parametrize("shape", [QWEN, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
def test_the_export_is_the_trained_model(here, shape):
    from transformers import AutoModelForCausalLM

    done = call(llm_pretrain.main, tiny(shape, export=True, lr=0.01, dtype="fp32"))
    assert done.code == 0, done.err
    folder = only_run(Path("runs")) / "hf"
    ids = torch.arange(24).reshape(2, 12)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    ours = build_model(read_model_source(str(folder)), pretrained=True)(ids)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    config = json.loads((folder / "config.json").read_text())
    assert config["num_experts_per_tok"] == 2


def test_settings_that_a_model_does_not_have_are_refused(here):
    dense = {"model_type": "llama"}
    for shape, options, message in [
        (dense, {"router_balance_loss": 0.01}, "--router_balance_loss: tiny.json is not a mixture of experts"),
        (dense, {"router_z_loss": 0.01}, "--router_z_loss"),
        (QWEN, {"router_bias_rate": 0.001}, "--router_bias_rate: the routers of tiny.json select without a bias"),
        (QWEN, {"quantize": "bitnet"}, "a mixture of experts"),
        (QWEN, {"router_z_loss": -1}, "--router_z_loss: -1.0 is out of range"),
        ({**QWEN, "mlp_only_layers": [0, 1, 2]}, {"router_z_loss": 0.01}, "tiny.json is not a mixture of experts"),
        (QWEN, {"model_impl": "hf", "router_z_loss": 0.01}, "--router_z_loss: it has no effect on transformers' own"),
        (WIDE, {"quantize": "int8_weight", "optim": "torch.AdamW"}, "--optim: other libraries' optimizers cannot"),
    ]:
        done = call(llm_pretrain.main, tiny(shape, **options))
        assert done.code == 2 and message in done.err, done.err
    frozen = {"lora": {"r": 2}, "router_bias_rate": 0.01, "pretrained": False}
    done = call(llm_finetune.main, tiny(DEEPSEEK, **frozen))
    assert done.code == 2 and "--router_bias_rate: routers are frozen with --lora" in done.err, done.err
    assert not Path("runs").exists()


WIDE = {**QWEN, "hidden_size": 128, "moe_intermediate_size": 64}
"""Experts that schemes take: their matrices have rows in multiples of 128."""


def test_a_mixture_without_layers_of_experts_is_a_dense_model(here):
    """As DeepSeek-V3 cut to its first layers."""
    done = call(llm_pretrain.main, tiny({**DEEPSEEK, "first_k_dense_replace": 3}, quantize="int8"))
    assert done.code == 0, done.err


def test_the_plan_says_that_experts_of_transformers_models_are_not_quantized(here):
    done = call(llm_pretrain.main, tiny(WIDE, quantize="int8", model_impl="hf", dry_run=True))
    assert done.code == 0 and "of the parameters have three dimensions, as experts do" in done.out, done.err


@pytest.mark.parametrize("quantize", ["int8", "int8_weight", "auto"])
def test_low_bit_experts_train_and_resume(here, quantize):
    options = {"quantize": quantize, "n_steps": 6, "ckpt_interval": 3, "lr": 0.01}
    done = call(llm_pretrain.main, tiny(WIDE, **options))
    assert done.code == 0, done.err
    assert "3 x layers.mlp.experts.gate_up 4 of 128 -> 128: quantized" in done.out or quantize == "auto"
    run = only_run(Path("runs"))
    halfway, _ = sorted((run / "checkpoints").iterdir())
    told = losses(run)
    assert call(llm_pretrain.main, tiny(WIDE, **options, resume=str(halfway))).code == 0
    again = next(path for path in Path("runs").rglob("metrics.jsonl") if run not in path.parents).parent
    assert losses(again) == told


def test_adapters_of_experts_train_resume_and_are_exported(here):
    """On experts in NF4; checkpoints hold adapters alone, and a resumed run exports the same bytes."""
    targets = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
    options = {"n_steps": 6, "ckpt_interval": 3, "lr": 0.01, "pretrained": False, "batch_size": 2, "dtype": "fp32"}
    options |= {"lora": {"r": 2, "base": "nf4", "targets": targets}, "export": True, "eval_interval": 0}
    done = call(llm_finetune.main, tiny(WIDE, **options))
    assert done.code == 0, done.err
    assert "3 x layers.mlp.experts.gate_up 4 of 128 -> 128: quantized" in done.out
    run = only_run(Path("runs"), "llm_finetune")
    told = losses(run)
    halfway, end = sorted((run / "checkpoints").iterdir())
    saved = {name for name in contents(end) if name.startswith("model.")}
    assert saved and all("lora_" in name for name in saved) and any("experts.gate_up.lora_a" in name for name in saved)
    assert call(llm_finetune.main, tiny(WIDE, **options, resume=str(halfway))).code == 0
    again = next(path for path in Path("runs").rglob("metrics.jsonl") if run not in path.parents).parent
    assert losses(again) == told
    assert (again / "hf/model.safetensors").read_bytes() == (run / "hf/model.safetensors").read_bytes()
    adapter = load_file(run / "adapter/adapter_model.safetensors")
    assert adapter["base_model.model.model.layers.0.mlp.experts.lora_B.weight"].shape == (128, 2 * 4)
    assert json.loads((run / "adapter/adapter_config.json").read_text())["target_parameters"] == targets[1:]


def test_experts_whose_rows_do_not_fill_blocks_stay_in_high_precision(here):
    done = call(llm_pretrain.main, tiny(QWEN, quantize="int8", dry_run=True))
    assert "left, products of groups take matrices with rows in multiples of 128" in done.out
