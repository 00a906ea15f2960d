"""Recorded and compiled steps on a GPU under health samples and --on_spike: they replay what was recorded, and what
watches them must change none of it."""

from pathlib import Path

import pytest
import torch

import llm_pretrain
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl
from tests.system import call, contents, flags, losses, write_model
from tests.train.health.test_faults import outlier_channel, warnings
from tests.train.test_spikes import DRAW, LOWER, spoil

pytestmark = pytest.mark.gpu

COMMON = {
    "model": "tiny.json", "train_ds": {"type": "text", "paths": "jsonl", "tokenizer": "byte"}, "seq_len": 64,
    "batch_size": 16, "micro_batch_size": 8, "n_steps": 16, "lr": 1e-2, "eval_interval": 0, "ckpt_interval": 0,
    "export": False, "device": "cuda", "compile": True, "lr_schedule_kwargs": {"warmup": 0, "decay": 0},
}  # fmt: skip
DELAYED = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}}
INT8 = {"quantize": "int8", "quantize_lm_head": True}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"), hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    write_jsonl(Path("jsonl"))


def run(name: str, **settings) -> Path:
    done = call(llm_pretrain.main, flags(**{**COMMON, "run_name": name, **settings}))
    assert done.code == 0, done.err
    return next(Path("runs").glob(f"*/*_{name}"))


def state(folder: Path) -> dict[str, torch.Tensor]:
    saved = contents(max((folder / "checkpoints").iterdir()))
    return {name: tensor for name, tensor in saved.items() if not name.startswith("rng.")}


@pytest.mark.parametrize("settings", [DELAYED, INT8], ids=["delayed", "int8"])
def test_samples_change_no_bit_of_recorded_steps(settings):
    off, on = run("off", health=0, **settings), run("on", health=3, **settings)
    assert losses(off) == losses(on)
    saved, also = state(off), state(on)
    assert [name for name in saved if not torch.equal(saved[name], also[name])] == []
    lines = [row for row in read_metrics(on / "health.jsonl") if row.get("scheme")]
    assert {row["step"] for row in lines} == {3, 6, 9, 12, 15}
    for row in lines:
        assert row["x"]["error"] > 0 and row["products"]["output"] > 0, row
    assert any(row["gradient"]["cosine"] > 0.9 for row in lines if "gradient" in row)


def test_a_fallback_records_the_steps_again():
    with outlier_channel():
        folder = run("moved", quantize="int8", health=3, health_fallback=2, n_steps=18, lr=1e-3)
    (moved,) = (row for row in warnings(folder) if "moved_to" in row)
    assert moved["linear"] == "layers.1.attn.qkv"
    found = [row[1] for row in losses(folder)]
    assert len(found) == 18 and found[-1] < found[0]


def test_a_skipped_batch_leaves_no_trace_in_recorded_steps(monkeypatch, tmp_path):
    settings = {**DELAYED, **LOWER, "n_steps": 44, "health": 0}
    spoil({DRAW}, monkeypatch)
    skipped = run("skipped", on_spike="skip", **settings)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    spoil({DRAW}, monkeypatch, leave_out=True)
    never = run("never", **settings)
    rows = {row["step"]: row for row in read_metrics(skipped / "metrics.jsonl") if "loss" in row}
    expected = {row["step"]: row for row in read_metrics(never / "metrics.jsonl") if "loss" in row}
    assert rows[DRAW]["spike"]["action"] == "skip"
    for step, row in rows.items():
        if step != DRAW:
            assert row["loss"] == expected[step - (step > DRAW)]["loss"]


def test_a_run_that_goes_back_never_saw_the_batch(monkeypatch):
    settings = {**DELAYED, **LOWER, "n_steps": 44, "health": 5, "ckpt_interval": 17}
    spoil({DRAW}, monkeypatch)
    folder = run("rewound", on_spike="rewind", **settings)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 45)) and any("spike" in row for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
