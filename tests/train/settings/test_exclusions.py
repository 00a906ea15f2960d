"""Every row of what excludes what: refused or answered by a line where it applies, silent where it does not."""

import json
from dataclasses import replace

import pytest

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.core.config import as_dict
from qtrain.core.errors import UserError
from qtrain.quant.schemes.frozen_base import Fp8BlockBase
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.exclusions import EXCLUSIONS, KEPT, check_exclusions
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import VisionSettings

PRETRAIN, FINETUNE = llm_pretrain.PretrainSettings, llm_finetune.FinetuneSettings
TEXT = {"type": "text", "paths": "x", "tokenizer": "byte"}
BF16 = dict.fromkeys(("output", "grad_input", "grad_weight"), "bf16")
DECAYLESS = {"decay": 0}
SCHEDULE = ([0, "bf16"], [0.5, "int8"])

LORA, EXPERTS = {"r": 2}, {"targets": ["experts.down_proj"]}
MERGED = {"merge_format": "fp8_block"}
TEACHER = {"teacher": "folder"}
ALONE = {"optimizer_in_backward": True, "clip_grad_norm": 0.0}
MOVED = ("weights", "gradients")
KEPT_BASE = Fp8BlockBase().derived(keeps_codes=True)
"""Of rows about the codes of --model."""
WORLD = {"dry_run": True, "gpu": "h200", "world_size": 2}

# (option, what it does not go with): (settings, what makes the row apply, what makes it not)
CASES = {
    ("--gpu", "no --dry_run"): (PRETRAIN, {"gpu": "h200"}, {"dry_run": True}),
    ("--world_size", "no --dry_run"): (PRETRAIN, {"world_size": 2}, WORLD),
    ("--gpu", "--device cpu"): (PRETRAIN, {"gpu": "h200", "dry_run": True}, {"device": "auto"}),
    ("--gpus_per_node", "no --world_size"): (PRETRAIN, {"gpus_per_node": 4}, WORLD),
    ("--wire", "no --world_size"): (PRETRAIN, {"wire": "ib200"}, WORLD),
    ("--sol", "no --world_size"): (PRETRAIN, {"sol": 0.5}, WORLD),
    ("--world_size", "torchrun, --gpus"): (PRETRAIN, {**WORLD, "gpus": 2}, {"gpus": 0}),
    ("--gpu", "--quantize auto"): (PRETRAIN, {**WORLD, "quantize": "auto"}, {"quantize": "int8"}),
    ("--world_size", "--reshard_after_forward always (timm)"): (
        VisionSettings,
        {**WORLD, "reshard_after_forward": "always"},
        {"reshard_after_forward": "auto"},
    ),
    ("--memory_limit", "a CPU"): (
        PRETRAIN,
        {"memory_limit": 24, "device": "cpu"},
        {"gpu": "h100", "dry_run": True, "device": "auto"},
    ),
    ("--fit", "--quantize auto"): (PRETRAIN, {"fit": "auto", "quantize": "auto"}, {"quantize": "int8"}),
    ("--fit", "--model_impl hf"): (PRETRAIN, {"fit": "auto", "model_impl": "hf"}, {"model_impl": "native"}),
    ("--optim_kwargs.offload", "--offload"): (
        PRETRAIN,
        {"optim_kwargs": {"offload": True}, "offload": ("m",)},
        {"offload": None},
    ),
    ("--offload", "--optim that keeps its states on the GPU"): (
        PRETRAIN,
        {"offload": ("m",), "optim": "muon"},
        {"offload": ("residuals",)},
    ),
    ("--offload", "models of timm, --model_impl hf"): (
        PRETRAIN,
        {"offload": ("residuals",), "model_impl": "hf"},
        {"offload": ("m", "v")},
    ),
    ("--offload", "gradients with --lora"): (FINETUNE, {"offload": MOVED, "lora": LORA}, {"lora": None}),
    ("--offload", "weights of several processes"): (
        FINETUNE,
        {"offload": ("weights",), "lora": LORA, "gpus": 2},
        {"gpus": 1},
    ),
    ("--offload", "gradients of several processes without --reshard_after_forward always"): (
        PRETRAIN,
        {"offload": ("gradients",), "gpus": 2},
        {"reshard_after_forward": "always"},
    ),
    ("--offload", "weights without gradients"): (FINETUNE, {"offload": ("weights",)}, {"lora": LORA}),
    ("--offload", "gradients of one process without weights"): (
        PRETRAIN,
        {"offload": ("gradients",)},
        {"offload": MOVED},
    ),
    ("--offload", "gradients of one process with --optim that keeps its states on the GPU"): (
        PRETRAIN,
        {"offload": MOVED, "optim": "muon"},
        {"optim": "sgd"},
    ),
    ("--offload", "gradients of one process with weights stored in low bits"): (
        PRETRAIN,
        {"offload": MOVED, "quantize": "int8_weight"},
        {"quantize": "bitnet"},
    ),
    ("--optimizer_in_backward", "--offload gradients"): (PRETRAIN, {"offload": MOVED, **ALONE}, {"offload": ("m",)}),
    ("--deterministic", "--offload gradients of one process"): (
        PRETRAIN,
        {"offload": MOVED, "deterministic": True},
        {"deterministic": False},
    ),
    ("--offload", "--optim without what it names"): (
        PRETRAIN,
        {"offload": ("m", "v", "master"), "optim": "lion"},
        {"offload": ("m", "residuals")},
    ),
    ("--offload", "a CPU"): (PRETRAIN, {"offload": ("m",)}, {"offload": ()}),
    ("--optim_kwargs.offload", "a CPU"): (PRETRAIN, {"optim_kwargs": {"offload": True}}, {"optim_kwargs": None}),
    ("--weight_codes", "--quantize without a second layout that follows from the first"): (
        PRETRAIN,
        {"weight_codes": "one", "quantize": "int8"},
        {"quantize": "fp8_tensorwise"},
    ),
    ("--recompute", "--activation_checkpointing"): (
        PRETRAIN,
        {"recompute": ("norm",), "activation_checkpointing": "full"},
        {"activation_checkpointing": "none"},
    ),
    ("--recompute", "--model_impl hf"): (
        PRETRAIN,
        {"recompute": ("norm",), "model_impl": "hf"},
        {"model_impl": "native"},
    ),
    ("--mlp_chunks", "--model_impl hf"): (
        PRETRAIN,
        {"mlp_chunks": 4, "activation_checkpointing": "full", "model_impl": "hf"},
        {"model_impl": "native"},
    ),
    ("--mlp_chunks", "no --recompute block"): (
        PRETRAIN,
        {"mlp_chunks": 4, "recompute": ("ffn",)},
        {"recompute": ("block",)},
    ),
    ("--mlp_chunks", "--tp"): (
        PRETRAIN,
        {"mlp_chunks": 4, "activation_checkpointing": "full", "tp": 2},
        {"tp": 1},
    ),
    ("--keep_8bit", "--model_impl hf"): (
        PRETRAIN,
        {"keep_8bit": ("gate_up",), "model_impl": "hf"},
        {"model_impl": "native"},
    ),
    ("--keep_8bit", "--recompute ffn or block"): (
        PRETRAIN,
        {"keep_8bit": ("gate_up",), "activation_checkpointing": "full"},
        {"activation_checkpointing": "none", "recompute": ("swiglu",)},
    ),
    ("--keep_8bit", "--recompute norm without --compile"): (
        PRETRAIN,
        {"keep_8bit": ("gate_up",), "recompute": ("norm",)},
        {"compile": True},
    ),
    ("--keep_8bit", "--lora with --recompute norm or swiglu"): (
        FINETUNE,
        {"keep_8bit": ("gate_up",), "lora": LORA, "recompute": ("swiglu",)},
        {"recompute": ("qkv",)},
    ),
    ("--distill", "--model_impl hf"): (PRETRAIN, {"distill": TEACHER, "model_impl": "hf"}, {"model_impl": "native"}),
    ("--distill", "--tp"): (PRETRAIN, {"distill": TEACHER, "tp": 2}, {"tp": 1}),
    ("--distill", "--ep"): (PRETRAIN, {"distill": TEACHER, "ep": 2}, {"ep": 1}),
    ("--distill", "--cp"): (PRETRAIN, {"distill": TEACHER, "cp": 2}, {"cp": 1}),
    ("--activation_checkpointing", "--lora dropout"): (
        FINETUNE,
        {"lora": {"dropout": 0.1}, "activation_checkpointing": "full"},
        {"lora": LORA},
    ),
    ("--recompute", "--lora dropout"): (
        FINETUNE,
        {"lora": {"dropout": 0.1}, "recompute": ("norm",)},
        {"lora": LORA},
    ),
    ("--lora.dropout", "--lora dora"): (FINETUNE, {"lora": {"dropout": 0.1, "dora": True}}, {"lora": {"dora": True}}),
    ("--lora.targets", "--model_impl hf"): (FINETUNE, {"lora": EXPERTS, "model_impl": "hf"}, {"model_impl": "native"}),
    ("--lora.targets", "--lora dora"): (FINETUNE, {"lora": {**EXPERTS, "dora": True}}, {"lora": EXPERTS}),
    ("--quantize", "--lora dora"): (FINETUNE, {"lora": {"dora": True}, "quantize": "int8"}, {"quantize": "bf16"}),
    ("--quantize_overrides", "--lora dora"): (
        FINETUNE,
        {"lora": {"dora": True}, "quantize_overrides": {"*": "bf16", "*.qkv": "int8"}},
        {"quantize_overrides": {"*": "bf16", "*.qkv": "int8_weight"}},
    ),
    ("--quantize", "--quantize_schedule"): (
        PRETRAIN,
        {"quantize": "int8", "quantize_schedule": SCHEDULE},
        {"quantize_schedule": None},
    ),
    ("--quantize_kwargs", "--quantize_schedule"): (
        PRETRAIN,
        {"quantize_kwargs": {"stochastic_rounding": True}, "quantize_schedule": SCHEDULE},
        {"quantize_schedule": None},
    ),
    ("--quantize_schedule", "--lora base"): (
        FINETUNE,
        {"lora": {"base": "nf4"}, "quantize_schedule": SCHEDULE},
        {"lora": LORA},
    ),
    ("--quantize_schedule", KEPT): (
        FINETUNE,
        {"lora": LORA, "quantize_schedule": SCHEDULE},
        {"quantize_schedule": None},
    ),
    ("--quantize_kwargs", "--lora base"): (
        FINETUNE,
        {"lora": {"base": "nf4"}, "quantize": "int8", "quantize_kwargs": {"power_of_two": True}},
        {"lora": LORA},
    ),
    **{(f"--{name}", KEPT): (FINETUNE, {"lora": LORA, name: 2, "gpus": 2}, {name: 1}) for name in ("tp", "ep")},
    ("--quantize_kwargs", KEPT): (
        FINETUNE,
        {"lora": LORA, "quantize_kwargs": {"power_of_two": True}},
        {"quantize_kwargs": None},
    ),
    ("--reshard_after_forward", KEPT): (
        FINETUNE,
        {"lora": LORA, "reshard_after_forward": "always", "gpus": 2},
        {"gpus": 1},
    ),
    **{
        ("--lora.merge_format", f"--lora {name}"): (FINETUNE, {"lora": {**MERGED, **options}}, {"lora": MERGED})
        for name, options in (
            ("dora", {"dora": True}),
            ("dropout", {"dropout": 0.1}),
            ("expert targets", EXPERTS),
        )
    },
    ("--lora.merge_format", "--quantize_overrides"): (
        FINETUNE,
        {"lora": MERGED, "quantize_overrides": {"*.qkv": "int8"}},
        {"quantize_overrides": None},
    ),
    ("--lora.merge_format", "--lora merge original"): (
        FINETUNE,
        {"lora": {**MERGED, "merge": "original"}},
        {"lora": MERGED},
    ),
    ("--lora.merge_format", "--quantize"): (FINETUNE, {"lora": MERGED, "quantize": "int8"}, {"quantize": "bf16"}),
    ("--lora", "--quantize qat"): (FINETUNE, {"lora": LORA, "quantize": "qat"}, {"lora": None}),
    ("--lora.merge_format", "--model_impl hf"): (
        FINETUNE,
        {"lora": MERGED, "model_impl": "hf"},
        {"model_impl": "native"},
    ),
    **{
        ("--lora.merge_format", f"--{name}"): (FINETUNE, {**WORLD, "lora": MERGED, name: 2}, {name: 1})
        for name in ("tp", "ep")
    },
    ("--lora.merge_format", "--reshard_after_forward always"): (
        FINETUNE,
        {**WORLD, "lora": MERGED, "reshard_after_forward": "always"},
        {"reshard_after_forward": "auto"},
    ),
    ("--lora.merge_format", "--export_format without it"): (
        FINETUNE,
        {"lora": MERGED},
        {"export_format": ("hf", "fp8_block")},
    ),
    ("--lora.merge", "--no_pretrained"): (
        FINETUNE,
        {"lora": {"base": "nf4", "merge": "original"}, "pretrained": False},
        {"pretrained": True},
    ),
    ("--freeze_embedding_layer", "--lora"): (FINETUNE, {"freeze_embedding_layer": True, "lora": {}}, {"lora": None}),
    ("--router_bias_rate", "--lora"): (FINETUNE, {"router_bias_rate": 0.01, "lora": {}}, {"lora": None}),
    **{
        (f"--{name}", "--model_impl hf"): (PRETRAIN, {name: 0.01, "model_impl": "hf"}, {"model_impl": "native"})
        for name in ("router_balance_loss", "router_z_loss", "router_bias_rate")
    },
    ("--gradient_wire, --deterministic", "each other"): (
        PRETRAIN,
        {"gradient_wire": "int8", "deterministic": True},
        {"gradient_wire": "exact"},
    ),
    ("--gradient_wire", "one process"): (PRETRAIN, {"gradient_wire": "int8"}, {"gradient_wire": "exact"}),
    ("--reshard_after_forward", "one process"): (
        PRETRAIN,
        {"reshard_after_forward": "always"},
        {"reshard_after_forward": "auto"},
    ),
    ("--sequence_parallel", "no --tp"): (PRETRAIN, {"sequence_parallel": False}, {"sequence_parallel": True}),
    ("--gradient_accumulation", "--deterministic"): (
        PRETRAIN,
        {"deterministic": True, "gradient_accumulation": 2},
        {"gradient_accumulation": 0, "micro_batch_size": 2},
    ),
    ("--max_hours", "--keep_ckpts 0"): (PRETRAIN, {"max_hours": 1, "keep_ckpts": 0}, {"keep_ckpts": 1}),
    ("--keep_best", "--keep_ckpts 0"): (
        PRETRAIN,
        {"keep_best": True, "keep_ckpts": 0, "eval_ds": TEXT},
        {"keep_ckpts": 1},
    ),
    ("--on_spike", "--keep_ckpts 0"): (PRETRAIN, {"on_spike": "rewind", "keep_ckpts": 0}, {"on_spike": "skip"}),
    ("--on_spike", "--ckpt_interval 0"): (PRETRAIN, {"on_spike": "rewind", "ckpt_interval": 0}, {"on_spike": "stop"}),
    ("--on_spike", "--optimizer_in_backward"): (PRETRAIN, {"on_spike": "skip", **ALONE}, {"on_spike": "rewind"}),
    ("--spike_threshold", "no --on_spike"): (PRETRAIN, {"spike_threshold": 5.0}, {"on_spike": "stop"}),
    ("--keep_best", "no --eval_ds"): (PRETRAIN, {"keep_best": True}, {"eval_ds": TEXT}),
    ("--early_stopping", "no --eval_ds"): (PRETRAIN, {"early_stopping": 2}, {"eval_ds": TEXT}),
    ("--hellaswag_file", "no --hellaswag"): (PRETRAIN, {"hellaswag_file": "x"}, {"hellaswag": True}),
    ("--hellaswag_limit", "no --hellaswag"): (PRETRAIN, {"hellaswag_limit": 5}, {"hellaswag": True}),
    ("--eval_images", "no --eval_ds"): (
        VisionSettings,
        {"n_steps": 1, "eval_images": 5},
        {"eval_ds": {"type": "synthetic"}},
    ),
    ("--eval_sequences", "no --eval_ds"): (PRETRAIN, {"eval_sequences": 5}, {"eval_ds": TEXT}),
    ("--final_eval all", "no --eval_ds"): (PRETRAIN, {"final_eval": "all"}, {"eval_ds": TEXT}),
    ("--sample_tokens", "no --sample_prompts"): (PRETRAIN, {"sample_tokens": 5}, {"sample_prompts": ("a",)}),
    ("--answer_tokens", "no --accuracy"): (FINETUNE, {"answer_tokens": 5}, {"accuracy": 1}),
    ("--lm_eval", "--no_export"): (FINETUNE, {"lm_eval": "x", "export": False}, {"export": True}),
    ("--lm_eval", "--export_format without hf"): (
        PRETRAIN,
        {"lm_eval": "base", "export_format": ("ct_int8",)},
        {"export_format": ("ct_int8", "hf")},
    ),
    ("--push_to_hub", "--no_export"): (PRETRAIN, {"push_to_hub": "me/x", "export": False}, {"export": True}),
    ("--export_format", "--no_export"): (PRETRAIN, {"export_format": ("ct_int8",), "export": False}, {"export": True}),
    ("--export_format", "--model_impl hf"): (
        PRETRAIN,
        {"export_format": ("hf", "ct_int8"), "model_impl": "hf"},
        {"export_format": ("hf",)},
    ),
    ("--export_format", "--lora merge original"): (
        FINETUNE,
        {"export_format": ("ct_int8",), "lora": {"base": "nf4", "merge": "original"}},
        {"lora": {"base": "nf4"}},
    ),
    ("--export_format", "--tp"): (PRETRAIN, {"export_format": ("ct_int8",), "tp": 2}, {"tp": 1}),
    ("--export_format", "--ep"): (PRETRAIN, {"export_format": ("ct_int8",), "ep": 2}, {"ep": 1}),
    ("--augment.mixup_prob", "neither mixup nor cutmix"): (
        VisionSettings,
        {"n_steps": 1, "augment": {"mixup_prob": 0.5}},
        {"augment": {"mixup_prob": 0.5, "cutmix": 1.0}},
    ),
    ("--lr_schedule_kwargs.decay_type", '"decay":0'): (
        PRETRAIN,
        {"lr_schedule_kwargs": {**DECAYLESS, "decay_type": "sqrt"}},
        {"lr_schedule_kwargs": {"decay_type": "sqrt"}},
    ),
    ("--lr_schedule_kwargs.final", '"decay":0'): (
        PRETRAIN,
        {"lr_schedule_kwargs": {**DECAYLESS, "final": 0.1}},
        {"lr_schedule_kwargs": {"final": 0.1}},
    ),
    ("--quantize", "bf16 for all GEMMs"): (
        PRETRAIN,
        {"quantize": "int8", "quantize_kwargs": BF16},
        {"quantize_kwargs": {**BF16, "output": "int8"}},
    ),
    ("--quantize_kwargs.fast_accum", "a CPU"): (
        PRETRAIN,
        {"quantize": "fp8_rowwise", "quantize_kwargs": {"fast_accum": True}},
        {"quantize_kwargs": {}},
    ),
    ("--optim", "--quantize that stores weights"): (
        PRETRAIN,
        {"optim": "torch.AdamW", "quantize": "int8_weight"},
        {"optim": "adamw"},
    ),
    ("--quantize_lm_head", "--quantize bf16"): (
        FINETUNE,
        {"quantize_lm_head": True, "lora": {"base": "dense"}},
        {"lora": {"base": "fp8"}},  # its head is one of the frozen linears
    ),
    ("--optim_kwargs.master", "fp32 weights"): (PRETRAIN, {"optim_kwargs": {"master": "fp32"}}, {"dtype": "bf16"}),
    ("--optim_kwargs.sr", "fp32 weights"): (PRETRAIN, {"optim_kwargs": {"sr": True}}, {"dtype": "bf16"}),
    ("--lr_schedule_kwargs.decay", "--optim adamw_schedule_free"): (
        PRETRAIN,
        {"optim": "adamw_schedule_free"},
        {"lr_schedule_kwargs": DECAYLESS},
    ),
    ("--health_fallback", "--health 0"): (PRETRAIN, {"health_fallback": 3, "health": 0}, {"health": 50}),
    ("--optimizer_in_backward", "--deterministic"): (
        PRETRAIN,
        {**ALONE, "deterministic": True},
        {"deterministic": False},
    ),
    ("--optimizer_in_backward", "--gradient_accumulation"): (
        PRETRAIN,
        {**ALONE, "gradient_accumulation": 2},
        {"gradient_accumulation": 1},
    ),
    ("--optimizer_in_backward", "--clip_grad_norm"): (PRETRAIN, {**ALONE, "clip_grad_norm": 0.5}, ALONE),
    ("--optimizer_in_backward", "--optim that updates all parameters at once"): (
        PRETRAIN,
        {**ALONE, "optim": "torch.AdamW"},
        {"optim": "adamw"},
    ),
    ("--tp", "models of timm"): (VisionSettings, {"tp": 2}, {"tp": 1}),
    ("--tp", "--model_impl hf"): (PRETRAIN, {"tp": 2, "model_impl": "hf"}, {"model_impl": "native"}),
    ("--tp", "--lora"): (FINETUNE, {"tp": 2, "lora": {}}, {"lora": None}),
    ("--tp", "--quantize auto --quantize_lm_head"): (
        PRETRAIN,
        {"tp": 2, "quantize": "auto", "quantize_lm_head": True},
        {"quantize_lm_head": False},
    ),
    ("--tp", "--quantize qat with a scale per row or tensor"): (
        PRETRAIN,
        {"tp": 2, "quantize": "qat", "quantize_kwargs": {"weight": "int8"}},
        {"quantize_kwargs": {"weight": "int4_g128"}},
    ),
    ("--tp", "--optimizer_in_backward"): (PRETRAIN, {"tp": 2, **ALONE}, {"optimizer_in_backward": False}),
    ("--tp", "--optim of whole matrices"): (PRETRAIN, {"tp": 2, "optim": "muon"}, {"optim": "adamw"}),
    ("--cp", "models of timm"): (VisionSettings, {"cp": 2}, {"cp": 1}),
    ("--cp", "--model_impl hf"): (PRETRAIN, {"cp": 2, "model_impl": "hf"}, {"model_impl": "native"}),
    ("--cp", "--tp"): (PRETRAIN, {"cp": 2, "tp": 2}, {"tp": 1}),
    ("--cp", "--ep"): (PRETRAIN, {"cp": 2, "ep": 2}, {"ep": 1}),
    ("--cp", "--seq_len_multiple that it does not divide"): (
        FINETUNE,
        {"cp": 4, "seq_len_multiple": 6},
        {"seq_len_multiple": 8},
    ),
    ("--ep", "models of timm"): (VisionSettings, {"ep": 2}, {"ep": 1}),
    ("--ep", "--model_impl hf"): (PRETRAIN, {"ep": 2, "model_impl": "hf"}, {"model_impl": "native"}),
    ("--ep", "--deterministic --lora of experts"): (
        FINETUNE,
        {"ep": 2, "deterministic": True, "lora": EXPERTS},
        {"deterministic": False},
    ),
    ("--ep", "--lora that merges elsewhere"): (FINETUNE, {"ep": 2, "lora": {"merge": "original"}}, {"lora": {}}),
    ("--ep", "--seq_len_multiple"): (FINETUNE, {"ep": 2, "seq_len_multiple": 8}, {"seq_len_multiple": 0}),
    ("--ep", "--optimizer_in_backward"): (PRETRAIN, {"ep": 2, **ALONE}, {"optimizer_in_backward": False}),
    ("--ep", "--deterministic --quantize nvfp4"): (
        PRETRAIN,
        {"ep": 2, "deterministic": True, "quantize": "nvfp4"},
        {"quantize": "mxfp8"},
    ),
    ("--ep", "--quantize qat in nvfp4"): (
        PRETRAIN,
        {"ep": 2, "quantize": "qat", "quantize_kwargs": {"weight": "nvfp4"}},
        {"quantize_kwargs": {"weight": "int8"}},
    ),
    ("--ep", "--optim of whole matrices"): (PRETRAIN, {"ep": 2, "optim": "q_galore_adamw"}, {"optim": "muon"}),
}


def test_every_row_has_a_case():
    assert [(row.option, row.other) for row in EXCLUSIONS] == list(CASES)


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: f"{row.option}, {row.other}")
def test_what_excludes_what(row):
    """A row applies to both options together, says so in one sentence, and not to one of them alone."""
    cls, both, one = CASES[row.option, row.other]
    settings = {"device": "cpu", "train_ds": TEXT, "n_steps": 1, **both}
    script = "llm_finetune" if row.other == "llm_finetune.py" else "llm_pretrain"
    base = KEPT_BASE if row.other == KEPT else None
    options = Options(cls(**settings), script, base)
    assert row.applies(options)
    message = row.message(options)
    assert message.startswith(f"{row.option}: ") and "{" not in message.replace('{"decay"', "") and message[-1] != "."
    if row.refused:
        with pytest.raises(UserError) as raised:
            check_exclusions(options, [row])
        assert str(raised.value) == f"{message}."
    else:
        assert check_exclusions(options, [row]) == (f"note    {message}",)
    assert not row.applies(Options(cls(**{**settings, **one}), script, base))
    # Without the kept codes --quantize reads its own options.
    without = replace(options.settings, quantize_kwargs=None, quantize_schedule=None)
    assert base is None or not row.applies(Options(without, script))


@pytest.mark.parametrize("cls", [PRETRAIN, FINETUNE, VisionSettings])
def test_defaults_and_a_runs_whole_config_are_silent(cls, tmp_path, monkeypatch):
    """The config.json of a run spells every default out, and is a recipe."""
    monkeypatch.chdir(tmp_path)
    settings = cls(device="cpu", train_ds=TEXT, n_steps=1)
    again = cls(**{**as_dict(settings), **json.loads(json.dumps(as_dict(settings)))})
    assert check_settings(again, "script").notes == ()


def test_a_stored_low_bit_weight_multiplies_in_bf16_as_it_should(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_settings(PRETRAIN(device="cpu", quantize="int8_weight"), "script")


def test_the_scripts_answer_before_anything_else():
    from tests.system import call, flags

    for module, settings in (
        (llm_pretrain, {"quantize": "int8", "quantize_kwargs": BF16}),
        (timm_finetune, {"train_ds": {"type": "x"}, "eval_images": 5}),
    ):
        done = call(module.main, flags(device="cpu", **settings))
        assert done.code == 2 and done.err.count("\n") == 1 and "leave it out" in done.err
