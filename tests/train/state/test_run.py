"""The run folder: a new one, or that of the checkpoint to resume from; and all state restored together."""

import itertools
import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qtrain import __version__
from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state import run_folder
from qtrain.train.state.checkpoint import Checkpoints
from qtrain.train.state.restore import restore
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import RunFolder, find_run_folder, resume_command
from qtrain.train.state.state_dict import TrainState
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled
from tests.system import TINY, tree
from tests.train.state.test_checkpoint import flip, rewrite
from tests.train.step.test_step import masked_batch


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


def settings(**changes) -> LanguageSettings:
    return LanguageSettings(**{"n_steps": 10, "run_name": "small", **changes})


def new_run(folder: RunFolder, seed: int = 0, **changes) -> Run:
    """A run whose codes are rounded stochastically: they depend on more than the weights."""
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=seed)
    scheme = SCHEMES.make("int8", {"stochastic_rounding": True}, "--quantize")
    quantized = quantize_linears(model, scheme, seed=3)
    chosen = settings(**changes)
    spec = OPTIMIZERS.make("adamw", chosen.optim_kwargs or {}, "--optim")
    optimizer = spec.build(parameter_groups(model, chosen.weight_decay), lr=0.01)
    quantized.track_versions(optimizer)
    return Run(chosen, "script", folder, torch.device("cpu"), model, quantized, optimizer, TrainState())


def train(run: Run, steps: int) -> list[float]:
    """Train some steps. Returns their losses."""
    losses = []
    for _ in range(steps):
        batch = masked_batch(seed=run.state.step)
        forward = language_forward(run.model, None)
        gradients = compute_gradients(run.model, forward, run.quantized, [batch, batch], run.state.step)
        apply_gradients(run.optimizer, run.quantized, gradients, lr=0.01, clip_grad_norm=1.0)
        run.state.step += 1
        run.state.data = {"sample": run.state.step}
        losses.append(gradients.loss)
    return losses


def trained_run(**changes) -> Run:
    run = new_run(find_run_folder(settings(**changes), "script"), **changes)
    with run.opened_folder():
        train(run, 3)
        run.save()
    return run


# ---- which folder ----------------------------------------------------------------------------------------------------


def test_a_new_run_has_a_folder_named_by_time_and_name_and_nothing_is_made_yet():
    folder = find_run_folder(settings(), "script")
    assert folder.path.parent == Path("runs/script") and folder.path.name.endswith("_small")
    assert folder.resumed_from is None and not Path("runs").exists()


def test_a_second_run_in_the_same_second_gets_another_name_that_sorts_after():
    names = []
    for _ in range(4):
        run = new_run(find_run_folder(settings(), "script"))
        with run.opened_folder():
            names.append(run.folder.path.name)
    assert len(set(names)) == 4 and names == sorted(names)


def test_two_runs_that_chose_a_name_in_the_same_second_get_a_folder_each():
    one, other = (new_run(find_run_folder(settings(), "script")) for _ in range(2))
    other.folder = one.folder  # as chosen before the other had made it
    with one.opened_folder(), other.opened_folder():
        assert one.folder.path != other.folder.path
        assert all((run.folder.path / "config.json").exists() for run in (one, other))
    assert len(list(Path("runs/script").iterdir())) == 2


def test_a_run_that_another_process_trains_is_not_resumed():
    path = str(trained_run().folder.path)
    found = find_run_folder(settings(resume=path), "script")
    run = new_run(found)
    restore(run)
    with run.opened_folder():
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
            find_run_folder(settings(resume=path), "script")
        before = tree(Path("runs"))
        late = new_run(found)  # it looked before the other one took the folder
        restore(late)
        with pytest.raises(UserError, match="is in use"), late.opened_folder():
            pass
        assert tree(Path("runs")) == before
    assert find_run_folder(settings(resume=path), "script") == found


@pytest.mark.parametrize(("steps", "error"), [(0, UserError), (1, UserError), (0, ValueError)])
def test_a_mistake_before_the_first_step_leaves_no_folder(steps, error):
    """Another error leaves its traceback there."""
    run = new_run(find_run_folder(settings(), "script"))
    with pytest.raises(error), run.opened_folder():
        train(run, steps)
        raise error("a broken file")
    assert run.folder.path.exists() is (steps > 0 or error is ValueError)


def test_a_mistake_leaves_the_folder_of_a_resumed_run():
    saved = trained_run()
    resumed = new_run(find_run_folder(settings(resume=str(saved.folder.path)), "script"))
    restore(resumed)
    with pytest.raises(UserError), resumed.opened_folder():
        raise UserError("a broken file")
    assert "a broken file" in (saved.folder.path / "train.log").read_text()


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 101, "字" * 34, "ü" * 3, "a\n"])
def test_names_that_make_no_folder_are_refused(name):
    if name in ("..", "ü" * 3):  # harmless behind the time
        assert find_run_folder(settings(run_name=name), "script").path.parent == Path("runs/script")
        return
    with pytest.raises(UserError, match=r"--run_name: .* cannot name a folder"):
        find_run_folder(settings(run_name=name), "script")


def test_a_run_is_found_by_every_way_of_naming_it():
    run = trained_run()
    checkpoint = run.folder.path / "checkpoints" / "00000003"
    for resume in ("auto", str(run.folder.path), str(run.folder.checkpoints), str(checkpoint)):
        found = find_run_folder(settings(resume=resume), "script")
        assert found == RunFolder(run.folder.path, checkpoint), resume


def test_auto_without_a_run_of_that_name_starts_a_new_one(capsys):
    trained_run(run_name="other")
    assert find_run_folder(settings(resume="auto"), "script").resumed_from is None
    assert "--resume auto: no complete checkpoint of a run named 'small'" in capsys.readouterr().out


def test_a_checkpoint_that_lies_elsewhere_starts_a_run_of_its_own():
    run = trained_run()
    shutil.copytree(run.folder.checkpoints / "00000003", "copied/00000003")
    found = find_run_folder(settings(resume="copied/00000003"), "script")
    assert found.resumed_from == Path("copied/00000003") and found.path != run.folder.path
    resumed = new_run(found, seed=5)
    restore(resumed)
    with resumed.opened_folder():
        pass
    assert resumed.state.step == 3 and (found.path / "config.json").exists()


def test_the_config_of_a_resumed_run_does_not_resume():
    run = trained_run()
    resumed = new_run(RunFolder(run.folder.path, run.checkpoints.latest()), resume=str(run.folder.path))
    restore(resumed)
    with resumed.opened_folder():
        pass
    config = json.loads((run.folder.path / "config.json").read_text())
    assert config["resume"] is None and config["run_name"] == "small" and config["_command"] == ["script.py"]


def resume(run: Run, **changes) -> Run:
    """The run, resumed with other settings; its folder has been opened and closed."""
    resumed = new_run(find_run_folder(settings(resume=str(run.folder.path)), "script"), **changes)
    restore(resumed)
    with resumed.opened_folder():
        pass
    return resumed


def test_every_configuration_of_a_run_is_kept():
    run = trained_run()
    for changes in ({}, {"n_steps": 20}, {"n_steps": 20}, {"n_steps": 20, "lr": 0.5}):
        resume(run, **changes)
    names = sorted(path.name for path in run.folder.path.glob("config*.json"))
    assert names == ["config.0.json", "config.1.json", "config.json"]
    found = [json.loads((run.folder.path / name).read_text()) for name in names]
    assert [(config["n_steps"], config["lr"]) for config in found] == [(10, 3e-4), (20, 3e-4), (20, 0.5)]


def test_a_resumed_run_says_what_differs_and_which_side_holds(capsys):
    run = trained_run()
    capsys.readouterr()
    resumed_line = f"resumed at step 3 from {run.folder.path}/checkpoints/00000003"
    assert resume(run).notes == [resumed_line]
    out = capsys.readouterr().out
    assert out.startswith(f"{resumed_line}\n") and "--resume:" not in out
    changes = {"lr": 0.5, "weight_decay": 0.3, "optim_kwargs": {"betas": [0.8, 0.9]}, "train_ds": {"type": "x"}}
    resumed = resume(run, **changes)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--resume:")]
    no_effect = "has no effect: the checkpoint's optimizer options hold"
    assert (
        said
        == resumed.notes[1:]
        == [
            "--resume: lr 0.0003 > 0.5",
            f"--resume: optim_kwargs.betas [0.9, 0.95] > [0.8, 0.9] {no_effect}",
            "--resume: train_ds.type None > 'x'",
            f"--resume: weight_decay 0.1 > 0.3 {no_effect}",
        ]
    )
    assert {group["weight_decay"] for group in resumed.optimizer.param_groups} == {0.0, 0.1}
    assert {group["betas"] for group in resumed.optimizer.param_groups} == {(0.9, 0.95)}
    assert no_effect in (run.folder.path / "train.log").read_text()


@pytest.mark.parametrize("blocked", ["runs", "runs/script"])
def test_a_folder_that_cannot_be_made_is_a_message(blocked):
    Path(blocked).parent.mkdir(exist_ok=True)
    Path(blocked).touch()
    run = new_run(find_run_folder(settings(), "script"))
    with (
        pytest.raises(UserError, match=r"--runs_dir: cannot write runs/script/.*: Not a directory"),
        run.opened_folder(),
    ):
        pass


def test_the_resume_command_is_quoted_and_names_the_script_as_it_was_called(monkeypatch):
    folder = RunFolder(Path("my runs/it's"), None)
    quoted = """--config 'my runs/it'"'"'s/config.json' --resume 'my runs/it'"'"'s'"""
    assert resume_command(folder, "script") == f"python script.py {quoted}"
    monkeypatch.setattr(sys, "argv", ["../there/script.py", "--x"])
    assert resume_command(folder, "script") == f"python ../there/script.py {quoted}"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert resume_command(folder, "script") == f"python script.py {quoted}"


# ---- all state together ----------------------------------------------------------------------------------------------


def test_a_restored_run_equals_an_uninterrupted_one():
    run = trained_run()
    folder = find_run_folder(settings(resume="auto"), "script")
    drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    expected = train(run, 3)
    resumed = new_run(folder, seed=7)
    torch.manual_seed(99)
    restore(resumed)
    assert resumed.state.step == 3 and resumed.state.data == {"sample": 3} and resumed.state.run_id == run.state.run_id
    assert [torch.rand(2).tolist(), random.random(), np.random.rand()] == drawn
    resumed.quantized.assert_fresh()
    assert train(resumed, 3) == expected
    weights = zip(run.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    codes = zip(run.quantized.linears, resumed.quantized.linears, strict=True)
    assert all(torch.equal(a.weight_codes.output_codes, b.weight_codes.output_codes) for a, b in codes)


def test_without_a_checkpoint_restoring_changes_nothing():
    run = new_run(find_run_folder(settings(), "script"))
    before = [p.clone() for p in run.model.parameters()]
    restore(run)
    assert run.state.step == 0 and all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


KEPT = property(lambda run: Checkpoints(run.folder.checkpoints, 9))
"""The checkpoints of a run that keeps them all."""


def run_of_three() -> Run:
    """A run with checkpoints of the steps 3, 5 and 7."""
    run = trained_run()
    for _ in range(2):
        train(run, 2)
        run.save()
    (run.folder.path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 9)))
    return run


@pytest.fixture(scope="module")
def saved_three(tmp_path_factory) -> tuple[Run, Path]:
    """A run of three checkpoints, and the folder that its relative path begins in."""
    folder = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["script.py"])
        patch.setattr(Run, "checkpoints", KEPT)
        return run_of_three(), folder


@pytest.fixture
def three(saved_three, here, monkeypatch) -> Run:
    """That run, whose folder is a copy in this test's own."""
    run, folder = saved_three
    monkeypatch.setattr(Run, "checkpoints", KEPT)
    shutil.copytree(folder / "runs", "runs")
    return run


@pytest.mark.parametrize("step", [3, 5])
def test_resuming_an_older_checkpoint_starts_a_run_that_names_its_parent_and_changes_nothing_there(three, step, capsys):
    before = tree(three.folder.path)
    path = three.folder.checkpoints / f"{step:08d}"
    chosen = settings(resume=str(path))
    found = find_run_folder(chosen, "script")
    fork = new_run(found, seed=9)
    fork.settings = chosen
    restore(fork)
    with fork.opened_folder():
        train(fork, 1)
        fork.save()
    assert fork.folder.path != three.folder.path and tree(three.folder.path) == before
    config = json.loads((fork.folder.path / "config.json").read_text())
    assert config["_parent"] == {"run": str(three.folder.path), "step": step}
    out = capsys.readouterr().out
    assert f"resumed at step {step} from {path}\n" in out and f"{three.folder.path} stays as it is" in out
    assert (fork.folder.path / "metrics.jsonl").exists()
    again = new_run(find_run_folder(settings(resume=str(fork.folder.path)), "script"), n_steps=20)
    restore(again)
    with again.opened_folder():
        pass
    assert again.state.step == step + 1 and again.folder.path == fork.folder.path
    assert json.loads((fork.folder.path / "config.json").read_text())["_parent"] == config["_parent"]


def test_a_checkpoint_that_was_renamed_inside_its_run_starts_a_run_of_its_own(three):
    (three.folder.checkpoints / "00000007").rename(three.folder.checkpoints / "best")
    found = find_run_folder(settings(resume=str(three.folder.checkpoints / "best")), "script")
    assert found.path != three.folder.path and found.parent == three.folder.path


DAMAGE = {
    "a flipped bit": (lambda path: flip(path / "__0_0.distcp"), "its file __0_0.distcp is damaged (checksum)"),
    "a flipped bit of the meta": (lambda path: flip(path / "meta.json"), "its file meta.json is damaged"),
    "a flipped bit of the index": (lambda path: flip(path / ".metadata"), "its file .metadata is damaged (checksum)"),
    "a missing file": (lambda path: (path / "__0_0.distcp").unlink(), "its file __0_0.distcp is missing"),
    "a truncated file": (lambda path: os.truncate(path / "__0_0.distcp", 9), "its file __0_0.distcp has 9 of"),
    "no marker": (lambda path: (path / "COMPLETE").unlink(), "it has no COMPLETE file"),
}


@pytest.mark.parametrize(
    ("case", "how"),
    sampled(
        list(itertools.product(DAMAGE, ["run", "auto", "checkpoints"])),
        lambda case, how: how != "run" and case != "a flipped bit",
    ),
)
def test_a_damaged_newest_checkpoint_is_skipped_with_a_line_and_kept(three, case, how, capsys):
    break_it, why = DAMAGE[case]
    newest, older = three.folder.checkpoints / "00000007", three.folder.checkpoints / "00000005"
    break_it(newest)
    value = {"auto": "auto", "run": str(three.folder.path), "checkpoints": str(three.folder.checkpoints)}[how]
    resumed = new_run(find_run_folder(settings(resume=value), "script"), seed=9, resume=value)
    restore(resumed)
    out = capsys.readouterr().out
    (skipped,) = [line for line in out.splitlines() if "is skipped" in line]
    assert skipped.startswith(f"--resume: {newest} is skipped: {why}")
    assert f"resumed at step 5 from {older}\n" in out and "lines of steps 6 to 8 in metrics.jsonl are replaced" in out
    assert newest.exists() and resumed.state.step == 5
    with resumed.opened_folder():
        expected = train(resumed, 2)
        resumed.save()
    reference = new_run(RunFolder(three.folder.path, older), seed=4)
    restore(reference)
    assert train(reference, 2) == expected
    names = sorted(path.name for path in three.folder.checkpoints.iterdir())
    assert names == ["00000003", "00000005", "00000007", "damaged-00000007"]
    assert find_run_folder(settings(resume=value), "script").resumed_from == newest


def test_a_damaged_checkpoint_that_is_named_is_refused_with_a_whole_one(three):
    newest, older = three.folder.checkpoints / "00000007", three.folder.checkpoints / "00000005"
    for path in (newest, older):
        flip(path / "__0_0.distcp")
    resumed = new_run(find_run_folder(settings(resume=str(newest)), "script"), resume=str(newest))
    with pytest.raises(UserError, match=r"00000007 .*checksum.*newest whole one beside it is .*00000003\."):
        restore(resumed)
    flip(three.folder.checkpoints / "00000003/__0_0.distcp")
    resumed = new_run(find_run_folder(settings(resume="auto"), "script"), resume="auto")
    with pytest.raises(UserError, match=r"checksum.*No checkpoint beside it is whole"):
        restore(resumed)


def test_a_checkpoint_of_another_script_is_refused():
    folder = RunFolder(Path("runs/other/x"), trained_run().checkpoints.latest())
    run = new_run(folder)
    run.script = "llm_finetune"
    with pytest.raises(UserError, match=r"was not saved by llm_finetune\.py; resume with the script that saved it"):
        restore(run)


def test_the_script_that_saved_a_checkpoint_is_named():
    trained = trained_run()
    trained.script = "llm_finetune"
    train(trained, 1)
    trained.save()
    run = new_run(RunFolder(Path("runs/other/x"), trained.checkpoints.latest()))
    with pytest.raises(UserError, match=r"was not saved by script\.py; resume with llm_finetune\.py"):
        restore(run)


def test_fewer_steps_than_the_checkpoint_has_are_refused():
    run = new_run(RunFolder(Path("x"), trained_run().checkpoints.latest()), n_steps=2)
    with pytest.raises(UserError, match=r"--n_steps: 2 is less than the 3 steps of .*; give more steps"):
        restore(run)


def test_other_versions_than_those_that_saved_are_said(monkeypatch, capsys):
    trained_run()
    monkeypatch.setattr(
        run_folder, "versions", lambda: {"torch": "9.9", "triton": "3", "wandb": "1", "git": "x", "source": "feedbeef"}
    )
    resumed = new_run(find_run_folder(settings(resume="auto"), "script"))
    capsys.readouterr()
    restore(resumed)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "versions" in line]
    assert line.startswith(f"--resume: it was saved with other versions: qtrain {__version__} (source ")
    assert f"torch {torch.__version__} > 9.9" in line and "wandb" not in line and "git" not in line


def with_files(folder: RunFolder, *files: Path) -> Run:
    run = new_run(folder)
    run.data_files = files
    return run


def test_shards_with_other_contents_are_refused_and_moved_ones_are_not(capsys):
    shards = [Path(f"{n}.bin") for n in range(3)]
    for shard in shards:
        shard.write_bytes(os.urandom(50_000))
    run = with_files(find_run_folder(settings(), "script"), *shards)
    with run.opened_folder():
        train(run, 3)
        path = run.save()
    folder = find_run_folder(settings(resume="auto"), "script")
    Path("elsewhere").mkdir()
    moved = [Path(shutil.copyfile(shard, f"elsewhere/{shard}")) for shard in shards]
    restore(with_files(folder, *moved))
    assert "changed" not in capsys.readouterr().out
    shards[1].write_bytes(os.urandom(50_000))
    with pytest.raises(UserError, match=rf"--train_ds: cannot resume: 1\.bin is not the file .* of {path} read"):
        restore(with_files(folder, *shards))
    with pytest.raises(UserError, match=r"--train_ds: cannot resume: .* read 3 files, this one reads 2"):
        restore(with_files(folder, *moved[:2]))
    with pytest.raises(UserError, match=r"--train_ds: cannot read 9\.bin: No such file"):
        restore(with_files(folder, Path("9.bin")))


def test_files_of_text_that_have_changed_are_said(capsys):
    files = [Path(f"{n}.txt") for n in range(3)]
    for file in files:
        file.write_text("some text")
    run = with_files(find_run_folder(settings(), "script"), *files)
    with run.opened_folder():
        train(run, 1)
        run.save()
    files[2].write_text("more text")
    restore(with_files(find_run_folder(settings(resume="auto"), "script"), *files))
    assert "--resume: 1 of 3 files of --train_ds have changed since, first 2.txt\n" in capsys.readouterr().out


def test_the_setting_that_other_tensors_come_from_is_named():
    run = trained_run()
    run.settings = settings(quantize="int8")
    with run.opened_folder():
        run.save()
    other = new_run(find_run_folder(settings(resume="auto"), "script"), quantize="int8_weight")
    other.model.extra = torch.nn.Parameter(torch.zeros(1), requires_grad=True)
    other.optimizer.add_param_group({"params": [other.model.extra], "weight_decay": 0.0})
    with pytest.raises(UserError, match=r"only one of them\. .*That run had --quantize 'int8', not 'int8_weight'\."):
        restore(other)


ODD_META = {
    "a negative step": {"step": -3},
    "tokens as text": {"tokens": "5"},
    "data as a list": {"data": [1]},
    "another field": {"zzz": 1},
}


@pytest.mark.parametrize("case", ODD_META)
def test_a_meta_of_other_kinds_is_a_message(case):
    path = trained_run().checkpoints.latest()
    meta = json.loads((path / "meta.json").read_text())
    meta["state"] |= ODD_META[case]
    rewrite(path, "meta.json", json.dumps(meta).encode())
    with pytest.raises(UserError, match="the checkpoint's state is not one of this version"):
        restore(new_run(find_run_folder(settings(resume="auto"), "script")))


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "train.log", "run.lock"])
def test_a_device_or_a_fifo_in_place_of_a_file_of_the_run_is_refused(name):
    run = trained_run().folder.path
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name) if name == "run.lock" else (run / name).symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{name} is not a file; move it away"):
        find_run_folder(settings(resume="auto"), "script")
