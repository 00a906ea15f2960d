"""Every option that needs another one: refused or answered by a line without it, silent with it."""

import json

import pytest

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.core.config import as_dict
from qtrain.core.errors import UserError
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.exclusions import DEPENDENCES
from qtrain.train.settings.settings import VisionSettings

PRETRAIN, FINETUNE = llm_pretrain.PretrainSettings, llm_finetune.FinetuneSettings
TEXT = {"type": "text", "paths": "x", "tokenizer": "byte"}
BF16 = dict.fromkeys(("output", "grad_input", "grad_weight"), "bf16")
DECAYLESS = {"decay": 0}

# option: (settings, what makes it idle, what gives it an effect)
CASES = {
    "--gradient_wire, --deterministic": (
        PRETRAIN,
        {"gradient_wire": "int8", "deterministic": True},
        {"gradient_wire": "exact"},
    ),
    "--gradient_wire": (PRETRAIN, {"gradient_wire": "int8"}, {"gradient_wire": "exact"}),
    "--reshard_after_forward": (PRETRAIN, {"reshard_after_forward": "always"}, {"reshard_after_forward": "auto"}),
    "--sequence_parallel": (PRETRAIN, {"sequence_parallel": False}, {"sequence_parallel": True}),
    "--gradient_accumulation": (
        PRETRAIN,
        {"deterministic": True, "gradient_accumulation": 2},
        {"gradient_accumulation": 0, "micro_batch_size": 2},
    ),
    "--hellaswag_file": (PRETRAIN, {"hellaswag_file": "x"}, {"hellaswag": True}),
    "--hellaswag_limit": (PRETRAIN, {"hellaswag_limit": 5}, {"hellaswag": True}),
    "--eval_images": (VisionSettings, {"n_steps": 1, "eval_images": 5}, {"eval_ds": {"type": "synthetic"}}),
    "--eval_sequences": (PRETRAIN, {"eval_sequences": 5}, {"eval_ds": TEXT}),
    "--sample_tokens": (PRETRAIN, {"sample_tokens": 5}, {"sample_prompts": ("a",)}),
    "--answer_tokens": (FINETUNE, {"answer_tokens": 5}, {"accuracy": 1}),
    "--augment.mixup_prob": (
        VisionSettings,
        {"n_steps": 1, "augment": {"mixup_prob": 0.5}},
        {"augment": {"mixup_prob": 0.5, "cutmix": 1.0}},
    ),
    "--lr_schedule_kwargs.decay_type": (
        PRETRAIN,
        {"lr_schedule_kwargs": {**DECAYLESS, "decay_type": "sqrt"}},
        {"lr_schedule_kwargs": {"decay_type": "sqrt"}},
    ),
    "--lr_schedule_kwargs.final": (
        PRETRAIN,
        {"lr_schedule_kwargs": {**DECAYLESS, "final": 0.1}},
        {"lr_schedule_kwargs": {"final": 0.1}},
    ),
    "--quantize": (
        PRETRAIN,
        {"quantize": "int8", "quantize_kwargs": BF16},
        {"quantize_kwargs": {**BF16, "output": "int8"}},
    ),
    "--quantize_kwargs.fast_accum": (
        PRETRAIN,
        {"quantize": "fp8_rowwise", "quantize_kwargs": {"fast_accum": True}},
        {"quantize_kwargs": {}},
    ),
    "--freeze_embedding_layer": (FINETUNE, {"freeze_embedding_layer": True, "lora": {}}, {"lora": None}),
    "--router_bias_rate": (FINETUNE, {"router_bias_rate": 0.01, "lora": {}}, {"lora": None}),
    "--optim": (PRETRAIN, {"optim": "torch.AdamW", "quantize": "int8_weight"}, {"optim": "adamw"}),
    "--quantize_lm_head": (PRETRAIN, {"quantize_lm_head": True}, {"quantize": "int8"}),
    "--optim_kwargs.master": (PRETRAIN, {"optim_kwargs": {"master": "fp32"}}, {"dtype": "bf16"}),
    "--optim_kwargs.sr": (PRETRAIN, {"optim_kwargs": {"sr": True}}, {"dtype": "bf16"}),
    "--lr_schedule_kwargs.decay": (
        PRETRAIN,
        {"optim": "adamw_schedule_free"},
        {"lr_schedule_kwargs": DECAYLESS},
    ),
}


def test_every_row_has_a_case():
    assert [row.option for row in DEPENDENCES] == list(CASES)


@pytest.mark.parametrize("row", DEPENDENCES, ids=lambda row: row.option)
def test_an_option_without_the_one_that_it_needs_is_answered(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cls, idle, needed = CASES[row.option]
    settings = {"device": "cpu", "train_ds": TEXT, **idle}
    line = f"{row.option}: {row.why}"
    if row.refused:
        with pytest.raises(UserError) as raised:
            check_settings(cls(**settings), "script")
        assert str(raised.value) == f"{line}{row.fix}."
    else:
        assert f"note    {line}" in check_settings(cls(**settings), "script").notes
    assert not any(row.option + ":" in note for note in check_settings(cls(**{**settings, **needed}), "script").notes)


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
