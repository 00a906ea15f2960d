"""The benchmarks of optimizers run on a CPU, count what there is, and leave out libraries that are missing."""

import json
import sys

import pytest
import torch

from qtrain.bench import optim_accuracy, optim_step
from tests.system import write_model


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    for package in ("torchao", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.optim", None)


def test_steps_are_timed_over_a_models_shapes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optim_step, "copy_bandwidth", lambda device: 1.0)
    names = ["adamw", "adamw_8bit", "torch.AdamW", "bnb.AdamW8bit"]
    argv = [
        "--model",
        write_model(tmp_path / "tiny.json"),
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--json",
        str(tmp_path / "r"),
    ]
    optim_step.main([*argv, "--names", *names])
    shown = capsys.readouterr()
    found = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert [r["name"] for r in found] == names[:3] and "pip install bitsandbytes" in shown.err
    assert shown.out.count("\n|") == 5
    by_name = {r["name"]: r for r in found}
    assert by_name["adamw"]["state_bytes"] == pytest.approx(by_name["torch.AdamW"]["state_bytes"], rel=0.01)
    assert by_name["adamw"]["moved"] == pytest.approx(28, rel=0.01) and by_name["adamw_8bit"]["moved"] < 24


def test_accuracy_is_zero_for_fp32_itself_and_small_for_low_bits(capsys):
    recording = optim_accuracy.record(20, 0.95, torch.device("cpu"))
    assert max(optim_accuracy.distances("adamw", recording)) < 1e-4
    assert 1e-4 < max(optim_accuracy.distances("adamw_8bit", recording)) < 0.05
    optim_accuracy.main(
        ["--steps", "2", "--beta2", "0.9", "--names", "adamw_4bit", "torchao.AdamW4bit", "--device", "cpu"]
    )
    shown = capsys.readouterr()
    assert "| adamw_4bit |" in shown.out and "pip install torchao" in shown.err
