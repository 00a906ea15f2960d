"""Which runs add up gradients in the products that compute them: those of one process whose autograd would add them."""

from pathlib import Path

import pytest

import llm_pretrain
import timm_finetune
from qtrain.quant import gemm_table
from tests.data.corpora import write_jsonl
from tests.system import call, flags, losses, only_run, write_model

LANGUAGE = {
    "model": "tiny.json",
    "train_ds": {"type": "text", "paths": "jsonl", "tokenizer": "byte"},
    "seq_len": 16,
    "quantize": "int8",
    "quantize_lm_head": True,
}
IMAGES = {
    "model": "vit_tiny_patch16_224",
    "pretrained": False,
    "model_kwargs": {"img_size": 32, "patch_size": 8, "depth": 2},
    "train_ds": {"type": "sklearn:digits", "split": "train"},
    "n_epochs": 0,
    "quantize": "int8",
}
FOUR = {"batch_size": 8, "micro_batch_size": 2, "n_steps": 2, "device": "cpu", "export": False, "keep_ckpts": 0}


def products(main, **settings) -> int:
    """That a run of two steps adds."""
    added, add = [], gemm_table.add_scaled_mm

    def count(total, *operands):
        added.append(total.shape)
        add(total, *operands)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_table, "add_scaled_mm", count)
        done = call(main, flags(**FOUR | settings))
    assert done.code == 0, done.err
    return len(added)


@pytest.fixture
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))


def test_four_micro_batches_add_what_one_computes(here):
    """But for the head, whose gradient the loss takes."""
    assert products(llm_pretrain.main, **LANGUAGE, runs_dir="four") == 2 * 4 * 8
    assert products(llm_pretrain.main, **LANGUAGE, runs_dir="one", micro_batch_size=8) == 0
    four, one = ([row[1] for row in losses(only_run(Path(name)))] for name in ("four", "one"))
    assert four == pytest.approx(one, rel=1e-3)  # a step's gradient does not depend on how it is split


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 4},
        {"deterministic": True},
        {"mlp_chunks": 2, "activation_checkpointing": "full"},
        {"quantize": "fp8_blockwise", "quantize_lm_head": False},
        {"optimizer_in_backward": True, "micro_batch_size": 8, "clip_grad_norm": 0},
    ],
    ids=str,
)
def test_autograd_adds_or_nothing_is_added(here, changes):
    assert products(llm_pretrain.main, **LANGUAGE | changes) == 0


def test_models_of_libraries_too(here):
    assert products(llm_pretrain.main, **LANGUAGE, model_impl="hf") > 0
    assert products(timm_finetune.main, **IMAGES) > 0
