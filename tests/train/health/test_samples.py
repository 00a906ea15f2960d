"""Health samples of real runs: they change no bit of the training, resume with it, and see every kind of linear."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.data.batch import Batch
from qtrain.train.health import monitor
from qtrain.train.health.sample import TOKENS, piece_of
from qtrain.train.log.metrics import read_metrics
from qtrain.train.state.checkpoint_files import newest_complete
from tests.data.corpora import write_jsonl
from tests.data.images.pictures import write_folder
from tests.system import call, contents, flags, losses, write_model
from tests.test_mixture_runs import DEEPSEEK, WIDE

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("jsonl"))
    return tmp_path


def run(name: str, main=llm_pretrain.main, shape: dict[str, Any] | None = None, **settings) -> Path:
    """Train with these settings into runs/name; returns the run folder."""
    base = {"train_ds": TEXT, "seq_len": 32, "n_steps": 6, "batch_size": 4, "lr": 0.01, "device": "cpu"}
    if "model" not in settings:
        base["model"] = write_model(Path("tiny.json"), **(shape or {}))
    done = call(main, flags(**{**base, "export": False, "run_name": name, **settings}))
    assert done.code == 0, done.err
    return next(Path("runs").glob(f"*/*_{name}"))


def state(folder: Path) -> dict[str, torch.Tensor]:
    return contents(newest_complete(folder / "checkpoints")[0])


def same(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    load = [[row.get("expert_entropy") for row in read_metrics(run / "metrics.jsonl")] for run in (one, other)]
    assert load[0] == load[1], "a sample's routes are no training's"
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(second[name])), name


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "health.jsonl")


LORA = {"r": 4, "dropout": 0.1}


@pytest.mark.parametrize(
    ("main", "settings"),
    [
        (llm_finetune.main, {"quantize": "int8", "lora": LORA, "pretrained": False}),
        (llm_pretrain.main, {"quantize": "fp8_rowwise", "shape": {**DEEPSEEK, "vocab_size": 258},
                             "router_bias_rate": 0.01}),
        (llm_pretrain.main, {"quantize": "int8", "quantize_lm_head": True, "gradient_accumulation": 2}),
        (llm_pretrain.main, {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}}),
        (llm_pretrain.main, {"quantize": "fp8_blockwise", "activation_checkpointing": "full", "mlp_chunks": 2,
                             "seq_len": 256}),
        (llm_pretrain.main, {"quantize": "int8", "model_impl": "hf"}),
        (llm_pretrain.main, {"quantize": "nvfp4", "optimizer_in_backward": True, "clip_grad_norm": 0}),
        (llm_pretrain.main, {"quantize": "int8", "shape": WIDE, "router_balance_loss": 0.01}),
        (llm_finetune.main, {"quantize": "fp8_rowwise", "lora": {**LORA, "base": "nf4"}, "pretrained": False}),
    ],
    ids=["lora", "mla", "int8", "delayed", "recomputed", "hf", "in_backward", "experts", "qlora"],
)  # fmt: skip
def test_a_run_with_samples_is_that_without_bit_for_bit(main, settings):
    if settings.get("mlp_chunks"):
        settings = {**settings, "recompute": '["block"]', "activation_checkpointing": "none"}
    off, on = (run(f"health{n}", main, **settings, health=n) for n in (0, 2))
    same(off, on)
    assert not (off / "health.jsonl").exists()
    lines = [row for row in rows(on) if "linear" in row and row.get("scheme")]
    assert {row["step"] for row in lines} == {2, 4, 6}
    assert not any("warning" in row for row in rows(on) if "load" not in row.get("causes", ()))
    for row in lines:
        assert all(value is not None for value in row["x"].values()), row
        assert "dy" in row or ("lora" in settings and "layers.0.attn.qkv" in row["linear"]), "it gets no gradient"
    assert any("gradient" in row for row in lines) and any("what_if" in row for row in lines)


@pytest.mark.parametrize(
    ("share", "settings", "steps"),
    [
        (1e-9, {}, {2, 4}),  # the first one, which compiles, does not count
        (1e9, {}, {2, 4, 6}),
        (1e-9, {"health": 2}, {2, 4, 6}),
        (1e-9, {"health_fallback": 5}, {1, 2, 4, 6}),
    ],
)
def test_samples_are_further_apart_where_they_would_take_too_long(monkeypatch, share, settings, steps):
    monkeypatch.setattr(monitor, "INTERVAL", 2)
    monkeypatch.setattr(monitor, "SHARE", share)
    folder = run("own", quantize="int8", keep_ckpts=0, **settings)
    assert {row["step"] for row in rows(folder)} == steps
    assert ("a sample takes" in (folder / "train.log").read_text()) == (steps == {2, 4})


def test_images():
    write_folder(Path("images"))
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_rate": 0.1}
    data = {"type": "image_folder", "path": "images"}
    settings = {"model": "vit_tiny_patch16_224", "model_kwargs": shape, "pretrained": False, "train_ds": data}
    common = {"n_steps": 4, "batch_size": 4, "quantize": "int8", "device": "cpu", "export": False}
    folders = []
    for n in (0, 2):
        done = call(timm_finetune.main, flags(**settings, **common, run_name=f"health{n}", health=n))
        assert done.code == 0, done.err
        folders.append(next(Path("runs").glob(f"*/*_health{n}")))
    same(*folders)
    assert {row["step"] for row in rows(folders[1])} == {2, 4}
    assert all({"x", "w", "dy", "products"} <= row.keys() for row in rows(folders[1]))


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one():
    """Also those of the steps after the checkpoint, which are sampled again."""
    settings = {"quantize": "int8", "health": 2, "ckpt_interval": 4, "n_steps": 8}
    whole = run("whole", **settings)
    run("cut", **{**settings, "n_steps": 6})
    cut = next(Path("runs").glob("*/*_cut"))
    (checkpoint,) = (cut / "checkpoints").glob("*4")
    (newest,) = (cut / "checkpoints").glob("*6")
    shutil.rmtree(newest)
    done = call(
        llm_pretrain.main,
        flags(model="tiny.json", train_ds=TEXT, seq_len=32, batch_size=4, lr=0.01, device="cpu", export=False,
              run_name="cut", resume=str(checkpoint), **settings),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (cut / "health.jsonl").read_text() == (whole / "health.jsonl").read_text()


DAMAGED = [
    '{"step": 1, "over": ["x"]}', '{"step": 1, "linear": ["a"], "over": ["x"]}', '{"step": 1, "linear": 7, "over": 3}',
    '{"step": 1, "linear": ["a"]}', '{"step": 1, "warning": 3}', '{"step": 1, "warning": "w", "linear": {}}',
    '{"step": 1, "warning": "w", "linear": "a", "causes": 7}', '{"step": 1, "warning": "w", "causes": [["x"]]}',
    '{"step": 1, "warning": "w", "linear": ["a"], "moved_to": "int8"}', '{"step": 1, "warning": "w", "moved_to": 7}',
    '{"step": 1, "warning": "w", "linear": "a", "balance_loss": "much"}', '{"step": 1, "linear": null}',
    '{"step": 1, "warning": "w", "linear": "a", "balance_loss": [1]}', '{"step": 1, "epoch": 2}', "step,linear", "[1]",
    '{"step": 1, "linear": "lm_h',
]  # fmt: skip
"""Lines of health.jsonl that were edited, damaged, or are of another tool."""


def test_a_run_resumes_whatever_health_jsonl_holds():
    settings = {"quantize": "int8", "health": 2, "ckpt_interval": 4, "health_fallback": 2}
    settings["lr_schedule_kwargs"] = {"warmup": 0, "decay": 0}  # the same of any number of steps
    whole = run("whole", **settings, n_steps=8)
    cut = run("cut", **settings, n_steps=4)
    with (cut / "health.jsonl").open("a") as file:
        file.write("\n".join(DAMAGED))
    again = run("cut", **settings, n_steps=8, resume=str(cut))
    assert [row for row in rows(again) if row["step"] > 4] == [row for row in rows(whole) if row["step"] > 4]


def test_experts_load_and_drift_of_the_routing():
    folder = run("experts", shape=WIDE, quantize="int8", health=3)
    routers = [row for row in rows(folder) if "experts" in row]
    assert routers and all(row["linear"].endswith("router") and row["scheme"] is None for row in routers)
    for row in routers:
        assert sum(row["experts"]["load"]) == pytest.approx(1, abs=1e-3) and 0 <= row["experts"]["drift"] <= 1


def test_the_gradient_in_high_precision_is_that_of_the_model_without_low_bits():
    """Where nothing is lost in low bits the two passes agree."""
    folder = run("close", quantize="int8", quantize_kwargs={"stochastic_rounding": False}, health=1, n_steps=4)
    directions = [row["gradient"] for row in rows(folder) if "gradient" in row]
    assert directions and all(0.97 < d["cosine"] <= 1.0001 and 0.9 < d["norm_ratio"] < 1.1 for d in directions)


def test_the_default_takes_no_sample_in_a_short_run_and_none_without_low_bits():
    assert not (run("short", quantize="int8") / "health.jsonl").exists()
    assert not (run("plain", quantize="bf16", health=1) / "health.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "takes more memory than is free"),
        (RuntimeError("no kernel\nfor this"), "failed (no kernel)"),
    ],
)
def test_a_sample_that_fails_ends_the_samples_and_not_the_run(monkeypatch, error, why):
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(monitor.Sampler, "sample", fail)
    folder = run("full", quantize="int8", health=2)
    assert not (folder / "health.jsonl").exists()
    assert (folder / "train.log").read_text().count(f"health      off from step 2 on: a sample {why}") == 1


def test_the_piece_of_a_batch_is_the_sequence_with_the_most_to_learn():
    ids = torch.arange(3 * 2 * TOKENS).view(3, 2 * TOKENS)
    labels = torch.full_like(ids, -100)
    labels[0, TOKENS:], labels[2, :9] = 5, 5  # row 0 has more, but not at its start
    assert torch.equal(piece_of(Batch(ids, labels)).input_ids, ids[2:, :TOKENS])
    short = Batch(ids[:, :400], labels[:, :400])
    assert torch.equal(piece_of(short).input_ids, ids[[2, 0], :400])
    assert torch.equal(piece_of(Batch(ids, labels), 3).input_ids, ids[2:, :1023])  # which three ranks share


def test_lines_are_json_without_nan():
    folder = run("json", quantize="mxfp8", health=2)
    for line in (folder / "health.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
