"""Faults that are put into real runs: the health names them within 20 steps, and a fallback moves what is at fault."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_pretrain
from benchmarks import faults
from qtrain.train.health import judged
from qtrain.train.health.monitor import HealthMonitor
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl
from tests.system import call, flags, losses, write_model
from tests.test_mixture_runs import WIDE

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("jsonl"))
    return tmp_path


def run(name: str, shape: dict[str, Any] | None = None, **settings) -> Path:
    model = write_model(Path("tiny.json"), **(SHAPE if shape is None else shape))
    base = {"model": model, "train_ds": TEXT, "seq_len": 64, "batch_size": 8, "lr": 0.01}
    common = {"device": "cpu", "export": False, "keep_ckpts": 0, "eval_interval": 0, "n_steps": 20, "health": 5}
    done = call(llm_pretrain.main, flags(**{**base, **common, "run_name": name, **settings}))
    assert done.code == 0, done.err
    return next(Path("runs").glob(f"*/*_{name}"))


def warnings(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "health.jsonl") if "warning" in row]


# ---- the faults ------------------------------------------------------------------------------------------------------


outlier_channel = partial(faults.outlier_channel, layers=[1], norms=["attn_norm"])
"""Of the input of layers.1.attn.qkv."""

INT8 = {"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": False}}
E5M2 = {"quantize": "fp8_rowwise", "quantize_kwargs": {"power_of_two": False}}

FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], dict[str, Any], str, str]] = {
    "outlier": (outlier_channel, {"quantize": "int8"}, "layers.1.attn.qkv output: ", "the product is off by 100%"),
    "e5m2": (faults.e5m2_activations, E5M2, "layers.0.attn.qkv output: ", "the codes of x are off by "),
    # At a rate at which no token is likely yet: their probabilities are below the step.
    "head": (
        faults.head_to_nearest,
        {**INT8, "quantize_lm_head": True, "lr": 1e-4, "shape": {**SHAPE, "vocab_size": 2048}},
        "lm_head grad_input: ",
        "50% of the sum of |dy| is flushed to zero",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_within_20_steps(fault):
    inject, settings, linear, words = FAULTS[fault]
    with inject():
        folder = run("faulty", **settings)
    (found,) = (row["warning"] for row in warnings(folder) if row["warning"].startswith(linear))
    override = f'--quantize_overrides \'{{"{linear.split()[0]}":"fp8_rowwise"}}\''
    assert found.startswith(linear + words) and f" since step 5; {override} has " in found
    assert f"health      {found}\n" in (folder / "train.log").read_text(), "in one line"


@pytest.mark.parametrize("fault", ["grows", "heavy batches"])
def test_delayed_scales_that_stay_too_old_are_named_and_single_batches_are_not(monkeypatch, fault):
    size, before_step = torch.tensor(10.0), HealthMonitor.before_step

    def grow(self: HealthMonitor, batches: Any, step: int) -> None:
        if fault == "grows":
            size.mul_(2.0)
        else:  # in two samples in a row, and what the scale remembers is forgotten between
            size.fill_(1000.0 if step in (10, 15) else 10.0)
        before_step(self, batches, step)

    monkeypatch.setattr(HealthMonitor, "before_step", grow)
    options = {"scaling": "delayed", "history": 16 if fault == "grows" else 2}
    with outlier_channel(size=size):
        folder = run("faulty", quantize="fp8_tensorwise", quantize_kwargs=options)
    if fault == "grows":
        told = [row for row in warnings(folder) if row["linear"] == "layers.1.attn.qkv"]
        assert [row["step"] for row in told] == [20] and " since step 5; " in told[0]["warning"]
    else:
        assert not warnings(folder)


@pytest.mark.parametrize("scheme", ["int8", "fp8_tensorwise", "fp8_blockwise", "bitnet", "nvfp4", "mxfp8", "qat"])
def test_a_run_without_a_fault_warns_of_nothing(scheme):
    kwargs = {"quantize_kwargs": {"scaling": "delayed"}} if scheme == "fp8_tensorwise" else {}
    folder = run("healthy", quantize=scheme, n_steps=60, lr=0.004, **kwargs)
    assert len(read_metrics(folder / "health.jsonl")) == 12 * 8 and not warnings(folder)


@pytest.mark.parametrize(
    ("balance", "advice"), [(0, "0.01"), pytest.param(0.02, "above 0.02", marks=pytest.mark.sweep)]
)
def test_a_collapsed_router_is_named(balance, advice):
    with faults.collapsed_router(offset=12.0):
        folder = run("faulty", WIDE, quantize="int8", router_balance_loss=balance)
    told = [row["warning"] for row in warnings(folder) if "router" in row["warning"]]
    assert len(told) == len({row["linear"] for row in read_metrics(folder / "health.jsonl") if "experts" in row})
    assert told[0].endswith(
        f"router: 2 of 4 experts get 100% of the routes since step 5; --router_balance_loss {advice} evens them out"
    )


def test_a_fallback_moves_the_linear_and_a_resumed_run_goes_on_with_it():
    """Saved before the move and after it: both resume to the losses and lines of the run that went on."""
    settings = {"quantize": "int8", "health_fallback": 2, "keep_ckpts": 9, "ckpt_interval": 4, "n_steps": 16}
    with outlier_channel():
        whole = run("whole", **settings)
    (moved,) = (row for row in warnings(whole) if "moved_to" in row)
    # At the first sample: the product is lost.
    assert moved["step"] == 1 and moved["linear"] == "layers.1.attn.qkv" and moved["moved_to"] == "fp8_rowwise"
    lines = [row for row in read_metrics(whole / "health.jsonl") if row.get("linear") == moved["linear"]]
    assert [row["scheme"] for row in lines if "scheme" in row] == ["int8", "fp8_rowwise", "fp8_rowwise", "fp8_rowwise"]
    for step in (4, 12):
        with outlier_channel():
            again = run(f"from{step}", resume=str(whole / f"checkpoints/{step:08d}"), **settings)
        assert losses(again) == losses(whole)
        assert (again / "health.jsonl").read_text() == (whole / "health.jsonl").read_text()


def test_a_fallback_is_taken_back_by_overrides():
    settings = {"quantize": "int8", "keep_ckpts": 9, "health_fallback": 2}
    back = {"quantize_overrides": {"layers.1.attn.qkv": "int8"}, "health_fallback": 0}
    with outlier_channel():
        moved = run("moved", **{**settings, "n_steps": 12})
        run("moved", resume=str(moved), **{**settings, **back, "n_steps": 15})
    last = [
        row
        for row in read_metrics(moved / "health.jsonl")
        if row.get("linear") == "layers.1.attn.qkv" and "scheme" in row
    ][-1]
    assert last["step"] == 15 and last["scheme"] == "int8"


@pytest.mark.sweep
def test_a_fallback_gives_collapsed_routers_a_balance_loss_also_when_the_run_is_resumed():
    settings = {"quantize": "int8", "health_fallback": 2, "keep_ckpts": 9, "ckpt_interval": 7, "n_steps": 9}
    settings["router_balance_loss"] = 0
    with faults.collapsed_router():
        plain = run("plain", WIDE, **settings | {"health_fallback": 0})
        whole = run("whole", WIDE, **settings)
        again = run("again", WIDE, resume=str(whole / "checkpoints/00000007"), **settings)
    told = [row for row in warnings(whole) if "balance_loss" in row]
    assert len(told) == len({row["linear"] for row in told}) > 0, "a line for each router"
    for row in told:
        assert row["step"] == 5 and row["warning"].endswith("since step 1; --router_balance_loss is now 0.01")
    assert losses(whole)[:4] == losses(plain)[:4] and losses(whole)[-1] != losses(plain)[-1], "it trains from step 5 on"
    assert losses(again) == losses(whole)


def test_a_fallback_leaves_a_linear_in_high_precision_that_no_scheme_mends():
    with outlier_channel(size=1e6):
        folder = run("faulty", quantize="int8", health_fallback=2, n_steps=10)
    (moved,) = (row for row in warnings(folder) if "moved_to" in row)
    assert (moved["step"], moved["linear"], moved["moved_to"]) == (1, "layers.1.attn.qkv", "bf16")


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_linear_at_fault_where_it_was_moved_to_goes_on_in_high_precision(monkeypatch, resumed):
    size, before_step = torch.tensor(1000.0), HealthMonitor.before_step

    def grow(self: HealthMonitor, batches: Any, step: int) -> None:
        size.fill_(1000.0 if step < 8 else 1e6)
        before_step(self, batches, step)

    monkeypatch.setattr(HealthMonitor, "before_step", grow)
    # Whichever scheme the sample says: a second fault in it is not answered by a third scheme.
    monkeypatch.setattr(judged, "remedy", lambda *_: "fp8_rowwise")
    settings = {"quantize": "int8", "health_fallback": 2, "keep_ckpts": 9}
    with outlier_channel(size=size):
        folder = run("faulty", **settings, n_steps=7 if resumed else 12)
        if resumed:
            run("faulty", resume=str(folder), **settings, n_steps=12)
    moves = [(row["step"], row["moved_to"]) for row in warnings(folder) if "moved_to" in row]
    assert moves == [(1, "fp8_rowwise"), (10, "bf16")]


def test_a_fallback_without_samples_is_refused():
    done = call(
        llm_pretrain.main, flags(model=write_model(Path("tiny.json")), train_ds=TEXT, health=0, health_fallback=2)
    )
    assert done.code == 2 and "--health_fallback: 2 samples in a row decide" in done.err and not Path("runs").exists()
