"""Every optimizer, of this project or adapted from a library, answers what training asks; nothing probes attributes."""

import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, Optimizer, adapted, parameter_groups
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.restore import restore
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import RunFolder
from qtrain.train.state.state_dict import TrainState
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.optim.problems import Small, make
from tests.system import ROOT, TINY, contents, flags, last_step, only_run, serving, write_model
from tests.train.step.test_step import masked_batch

NAMES = [*OPTIMIZERS.names(), "torch.AdamW", "torch.SGD"]
OPTIONS = {name: {"rank": 3, "update_proj_gap": 2} for name in ("galore_adamw", "q_galore_adamw")}


def with_gradients(seed: int = 0) -> Small:
    model = Small()
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_clipping_is_that_of_torch(name):
    ours, theirs = with_gradients(), with_gradients()
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
    optimizers = [make(name, model, 0.01, **OPTIONS.get(name, {})) for model in (ours, theirs)]
    optimizers[0].clip_gradients(norm.item(), 0.25)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25)
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_step_takes_the_gradients_of_its_time(name):
    """Those that are there when it is prepared, unless they are freed; then those of the step."""
    models = [with_gradients() for _ in range(3)]
    optimizers = [make(name, model, 0.01, **OPTIONS.get(name, {})) for model in models]
    optimizers[1].prepare_step()
    optimizers[2].prepare_step()
    optimizers[2].zero_grad()
    for p, q in zip(models[2].parameters(), with_gradients().parameters(), strict=True):
        p.grad = q.grad
    for optimizer in optimizers:
        optimizer.step()
    for p, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(p, q) for q in others)


@pytest.mark.parametrize("name", NAMES)
def test_train_restores_what_eval_changed(name):
    model = with_gradients()
    optimizer = make(name, model, 0.01, **OPTIONS.get(name, {}))
    for _ in range(3):
        optimizer.step()
    trained = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))
    assert isinstance(optimizer, Optimizer) and same != optimizer.averages_weights
    optimizer.train()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))


def test_a_librarys_states_are_checked_and_restored_where_they_were():
    model = with_gradients()
    optimizer = adapted(torch.optim.AdamW)(model.parameters(), lr=0.01)
    optimizer.step()
    p = model.embed.weight
    assert type(optimizer).__name__ == "AdamW"  # as checkpoints name it
    assert optimizer.state_device("step", p, True).type == "cpu" and optimizer.state_device("x", p, False) == p.device
    names = {q: name for name, q in model.named_parameters()}
    assert optimizer.adopt_states(names) == []
    optimizer.state[p]["exp_avg"][0, 0] = torch.inf
    with pytest.raises(UserError, match=r"--resume: the optimizer state exp_avg of embed\.weight holds NaN or Inf"):
        optimizer.adopt_states(names)


def test_nothing_probes_an_optimizer_for_attributes():
    probe = re.compile(r"\b(?:has|get)attr\(\s*(?:self\.|run\.)?_?optimizer\b")
    files = [*(ROOT / "qtrain").rglob("*.py"), *ROOT.glob("*.py")]
    assert [str(path) for path in files if probe.search(path.read_text())] == []


PARTITIONED_OPTIONS = {name: {"rank": 3, "update_proj_gap": 2} for name in ("galore_adamw", "q_galore_adamw")}


def give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_partitions_in_any_order_are_one_step(name):
    """Partitioned in the middle of a run: states are kept."""
    models = [Small(torch.bfloat16) for _ in range(2)]
    whole, partitioned = (make(name, model, 0.01, seed=4, **PARTITIONED_OPTIONS.get(name, {})) for model in models)
    for step in range(5):
        for model in models:
            give_gradients(model, step)
        whole.step()
        if step == 2:
            layers = [list(layer.parameters()) for layer in models[1].layers]
            inside = {id(p) for layer in layers for p in layer}
            rest = [p for p in models[1].parameters() if id(p) not in inside]
            partitioned.partition([rest, [], *layers])
        if step < 2:
            partitioned.step()
        else:
            partitioned.begin_step()
            for number in (3, 1, 0, 2):
                partitioned.step_partition(number)
    for (name_, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name_


def test_every_parameter_is_in_one_partition():
    model = Small()
    optimizer, parameters = make("adamw", model, 0.01), list(model.parameters())
    for partitions in ([parameters[1:]], [parameters, parameters[:1]], [[*parameters, torch.ones(2)]]):
        with pytest.raises(AssertionError, match="not a partition"):
            optimizer.partition(partitions)


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
    quantized.track_versions(optimizer)
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
    restore(resumed)
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
    restore(resumed)
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
        restore(resumed)


def test_nan_in_a_checkpoint_is_refused_and_nothing_is_written():
    run = saved_run("adamw_8bit", 2)
    for state in run.optimizer.state.values():
        state[next(key for key in state if key.endswith("scale") or key == "exp_avg")].fill_(torch.nan)
    path = run.save()
    before = {p: p.stat().st_mtime_ns for p in Path("runs").rglob("*")}
    resumed = new_run("adamw_8bit", RunFolder(run.folder.path, path))
    with pytest.raises(UserError, match=r"--resume: the optimizer state exp_avg of \S+ holds NaN"):
        restore(resumed)
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
