"""Runs with weights stored in low bits, and runs with timed schemes: saved and resumed bit for bit."""

import dataclasses
import sys

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model, empty_model
from qtrain.optim import Optimizer
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.schemes import auto
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.plan.checked_settings import CheckedSettings, check_settings
from qtrain.train.plan.linears import resolve_auto_scheme
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.restore import restore
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import find_run_folder
from qtrain.train.state.state_dict import TrainState, model_tensors
from tests.system import TINY
from tests.train.state.test_run import train

SOURCE = ModelSource("tiny", TINY, "--model")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


class Momentum(Optimizer):
    """A minimal optimizer with a state that rounds stored weights stochastically."""

    @torch.no_grad()
    def step(self):
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = torch.tensor(0), torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                if isinstance(p, StoredWeight):
                    key = torch.tensor([5, int(state["step"]), number])
                    p.store_(p.dequantize() - group["lr"] * state["momentum"], key)
                else:
                    p.sub_(group["lr"] * state["momentum"])


def new_run(scheme: str, options: dict | None = None, seed: int = 0, **changes) -> Run:
    settings = LanguageSettings(n_steps=10, run_name="small", quantize=scheme, quantize_kwargs=options, **changes)
    model = build_model(SOURCE, seed=seed)
    quantized = quantize_linears(model, SCHEMES.make(scheme, options or {}, "--quantize"), seed=3, head=model.lm_head)
    optimizer = Momentum(model.parameters(), {"lr": 0.01})
    folder = find_run_folder(settings, "script")
    return Run(settings, "script", folder, CPU, model, quantized, optimizer, TrainState())


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int8_weight", {}),
        ("int8_weight", {"activations": "int8_sr"}),
        ("int4_weight", {}),
        ("bitnet", {}),
        ("binary", {}),
        ("qat", {"activations": "int8"}),
    ],
)
def test_a_resumed_run_continues_bit_for_bit(scheme, options):
    run = new_run(scheme, options)
    with run.opened_folder():
        train(run, 2)
        run.save()
        losses = train(run, 3)
    again = new_run(scheme, options, seed=1, resume="auto")
    restore(again)
    assert train(again, 3) == losses
    one, other = model_tensors(run.model), model_tensors(again.model)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_codes_and_scales_and_nothing_else():
    tensors = model_tensors(new_run("int8_weight").model)
    assert tensors["layers.0.attn.qkv.weight.codes"].dtype == torch.int8
    assert tensors["layers.0.attn.qkv.weight.scale"].shape == (64,)
    assert "layers.0.attn.qkv.weight" not in tensors
    assert all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors.values())


def test_weights_of_another_format_do_not_load():
    run = new_run("int8_weight")
    with run.opened_folder():
        run.save()
    with pytest.raises(UserError, match="Resume with the settings of the run"):
        restore(new_run("int4_weight", resume="auto"))
    with pytest.raises(UserError, match="lacks"):
        restore(new_run("int8", resume="auto"))


# ---- measured --------------------------------------------------------------------------------------------------------


def resolved(settings: LanguageSettings) -> CheckedSettings:
    model = empty_model(SOURCE)
    return resolve_auto_scheme(check_settings(settings, "script"), model, model.lm_head, tokens=16)[0]


def test_a_resumed_run_keeps_its_schemes(monkeypatch):
    """Independent of new timings, and of whether the flags contain the choice."""
    fastest = {"int8": 1.0, "bf16": 2.0}
    monkeypatch.setattr(auto, "time_linear", lambda scheme, *_: fastest[SCHEMES.name_of(scheme)])
    options = {"candidates": ["bf16", "int8"]}
    flags = LanguageSettings(n_steps=10, run_name="small", quantize="auto", quantize_kwargs=options)
    empty = empty_model(SOURCE)
    checked, lines = resolve_auto_scheme(check_settings(flags, "script"), empty, empty.lm_head, tokens=16)
    chosen = {"32 -> 64": "int8", "32 -> 32": "int8", "32 -> 128": "int8", "64 -> 32": "int8"}
    settings = checked.settings
    assert settings.quantize_kwargs == {**options, "chosen": chosen} and len(lines) == 5

    model = build_model(SOURCE)
    quantized = quantize_linears(model, checked.scheme, seed=3, head=model.lm_head)
    assert len(quantized.linears) == 8
    folder = find_run_folder(settings, "script")
    optimizer = Momentum(model.parameters(), {"lr": 0.01})
    run = Run(settings, "script", folder, CPU, model, quantized, optimizer, TrainState())
    with run.opened_folder():
        path = run.save()
    assert read_meta(path)["quantize_kwargs"]["chosen"] == chosen

    fastest["bf16"] = 0.5
    assert resolved(flags).settings.quantize_kwargs["chosen"]["32 -> 32"] == "bf16"
    again = dataclasses.replace(flags, resume="auto")
    assert resolved(again).settings == dataclasses.replace(settings, resume="auto")
    assert resolved(again).folder.resumed_from == path
    assert resolved(settings).settings == settings  # config.json as a recipe
