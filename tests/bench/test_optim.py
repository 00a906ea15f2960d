"""The benchmarks of optimizers run on a CPU, count what there is, and say which libraries are missing."""

import json
import sys

import pytest
import torch

from qtrain.bench import optim_accuracy, optim_step
from qtrain.core.errors import UserError
from tests.system import write_model


@pytest.fixture(autouse=True)
def no_peers(monkeypatch):
    for package in ("torchao", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.optim", None)


def figures(path) -> list[dict]:
    """Row name -> column -> value or reason, of each table of a JSON file."""
    tables = json.loads(path.read_text())["tables"]
    return [
        {r["name"]: {c: v.get("reason", v.get("value")) for c, v in r["cells"].items()} for r in t["rows"]}
        for t in tables
    ]


def test_steps_are_timed_over_a_models_shapes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optim_step, "copy_bandwidth", lambda device: 1.0)
    names = ["adamw", "adamw_8bit", "torch.AdamW", "bnb.AdamW8bit"]
    model = write_model(tmp_path / "tiny.json")
    argv = ["--model", model, "--device", "cpu", "--dtype", "fp32", "--json", str(tmp_path / "r.json")]
    optim_step.main([*argv, "--names", *names])
    shown = capsys.readouterr()
    (found,) = figures(tmp_path / "r.json")
    assert list(found) == names and "pip install bitsandbytes" in found["bnb.AdamW8bit"]["ms"]
    assert shown.out.count("\n|") == 6 and "pip install bitsandbytes" in shown.out
    states = {name: found[name]["state bytes per parameter"] for name in names[:3]}
    moved = {name: found[name]["bytes per parameter"] for name in names[:3]}
    assert states["adamw"] == pytest.approx(states["torch.AdamW"], rel=0.01)
    assert moved["adamw"] == pytest.approx(28, rel=0.01) and moved["adamw_8bit"] < 24


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kwargs", '{"m":'], "--kwargs: not valid JSON"),
        (["--model", "qwen9"], "--model: unknown model 'qwen9'"),
        (["--named", "adamw"], "Did you mean --names"),
    ],
)
def test_a_users_mistake_is_one_message(argv, message):
    with pytest.raises(UserError) as raised:
        optim_step.main(["--device", "cpu", *argv])
    assert message in str(raised.value)


def test_accuracy_is_zero_for_fp32_itself_and_small_for_low_bits(tmp_path, capsys):
    recording = optim_accuracy.record(20, 0.95, torch.device("cpu"))
    assert max(optim_accuracy.distances("adamw", recording)) < 1e-4
    assert 1e-4 < max(optim_accuracy.distances("adamw_8bit", recording)) < 0.05
    argv = ["--steps", "2", "--beta2", "0.9", "--device", "cpu", "--json", str(tmp_path / "a.json")]
    optim_accuracy.main([*argv, "--names", "adamw_4bit", "torchao.AdamW4bit"])
    (found,) = figures(tmp_path / "a.json")
    assert found["adamw_4bit"]["embedding"] > 0 and "pip install torchao" in found["torchao.AdamW4bit"]["embedding"]
    assert "| adamw_4bit " in capsys.readouterr().out
