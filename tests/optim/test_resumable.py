"""A run stopped and gone on with is the run that was not, for every optimizer; and for one whose process was killed."""

import signal
import sys
from pathlib import Path

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import RunFolder
from qtrain.train.state.state_dict import TrainState
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.system import TINY, contents, flags, last_step, only_run, serving, write_model
from tests.train.step.test_step import masked_batch

SMALL = {"small": 500}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


def new_run(name: str, folder: RunFolder, seed: int = 0, dtype=torch.bfloat16) -> Run:
    """A tiny model in bf16, where the weights too are rounded stochastically."""
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=seed, dtype=dtype)
    quantized = quantize_linears(model, SCHEMES.make("bf16", {}, ""), seed=3)
    options = SMALL if name.startswith("adamw") and "schedule" not in name else {}
    optimizer = OPTIMIZERS.make(name, options, "--optim").build(parameter_groups(model, 0.1), 0.01, seed=7)
    quantized.watch(optimizer)
    settings = LanguageSettings(n_steps=30, run_name="small")
    return Run(settings, "script", folder, torch.device("cpu"), model, quantized, optimizer, TrainState())


def train(run: Run, until: int) -> list[float]:
    losses = []
    while run.state.step < until:
        batch = masked_batch(seed=run.state.step)
        forward = language_forward(run.model, None)
        gradients = compute_gradients(run.model, forward, run.quantized, [batch], run.state.step)
        apply_gradients(run.optimizer, run.quantized, gradients, lr=0.003, clip_grad_norm=0.5)
        run.state.step += 1
        run.state.data = {"sample": run.state.step}
        losses.append(gradients.loss)
    return losses


def saved_run(name: str, steps: int) -> Run:
    run = new_run(name, RunFolder(Path("runs/script/x"), None))
    with run.opened_folder():
        train(run, steps)
        run.save()
    return run


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_a_resumed_run_is_the_same_bit_for_bit(name):
    run = saved_run(name, 4)
    expected = train(run, 8)
    resumed = new_run(name, RunFolder(run.folder.path, run.checkpoints.latest()), seed=9)
    resumed.restore()
    assert train(resumed, 8) == expected
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), resumed.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("first", "then"), [("adamw_8bit", "adamw"), ("adamw", "adamw_8bit"), ("adamw_4bit", "adamw_fp8")]
)
def test_another_of_the_family_goes_on_and_says_what_it_converted(first, then, capsys):
    run = saved_run(first, 12)
    expected = train(run, 16)
    resumed = new_run(then, RunFolder(run.folder.path, run.checkpoints.latest()), seed=9)
    capsys.readouterr()
    resumed.restore()
    out = capsys.readouterr().out
    assert (
        out.count("\n") == 2
        and "resumed at step 12" in out
        and "--resume: optimizer states converted: exp_avg " in out
        and " -> " in out
    )
    assert train(resumed, 16) == pytest.approx(expected, rel=0.02)


def test_states_of_another_kind_are_refused():
    run = saved_run("adamw_8bit", 1)
    resumed = new_run("lion", RunFolder(run.folder.path, run.checkpoints.latest()))
    with pytest.raises(UserError, match="--resume: the checkpoint's optimizer keeps other states"):
        resumed.restore()


def test_nan_in_a_checkpoint_is_refused_and_nothing_is_written():
    run = saved_run("adamw_8bit", 2)
    for state in run.optimizer.state.values():
        state[next(key for key in state if key.endswith("scale") or key == "exp_avg")].fill_(torch.nan)
    path = run.save()
    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    resumed = new_run("adamw_8bit", RunFolder(run.folder.path, path))
    with pytest.raises(UserError, match=r"--resume: the optimizer state exp_avg of \S+ holds NaN"):
        resumed.restore()
    assert {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")} == before
    assert read_meta(path)["optim"]["class"] == "AdamWOptimizer"


def test_thirty_steps_are_eleven_and_a_kill_and_the_rest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    write_model(folder / "tiny.json")
    data = {"type": "text", "paths": [str(Path(__file__))], "tokenizer": "byte"}
    with serving(folder) as server:

        def command(runs: str, **more) -> list[str]:
            settings = {
                "model": "tiny.json",
                "train_ds": data,
                "seq_len": 32,
                "batch_size": 4,
                "n_steps": 30,
                "lr": 0.01,
            }
            settings |= {"optim": "adamw_8bit", "optim_kwargs": SMALL, "dtype": "bf16", "device": "cpu"}
            settings |= {"ckpt_interval": 11, "export": False, "runs_dir": folder / runs, **more}
            return flags(**settings)

        whole = server.start("llm_pretrain", command("whole"))
        killed = server.start("llm_pretrain", command("killed"), hang_at=15)
        killed.until(lambda: last_step(folder / "killed") == 15)
        run = only_run(folder / "killed")
        assert killed.kill(signal.SIGKILL).code == -signal.SIGKILL
        resumed = server.start("llm_pretrain", command("killed", resume=run))
        assert resumed.wait().code == 0, resumed.errors.read_text()
        assert whole.wait().code == 0, whole.errors.read_text()
        a, b = (contents(r / "checkpoints" / "00000030") for r in (run, only_run(folder / "whole")))
        assert a.keys() == b.keys() and any("int8" in name for name in a)
        assert all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a if a[name].ndim)
