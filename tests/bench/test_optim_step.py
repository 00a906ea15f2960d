"""The benchmark of optimizer steps runs on a CPU, counts what there is, and says which libraries are missing."""

import json
import sys

import pytest

from qtrain.bench import optim_step
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
