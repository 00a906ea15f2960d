"""When the loop evaluates, logs and saves, and what a signal does at each moment."""

import html
import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import llm_pretrain
import qtrain.train.signals as signals
from qtrain.data.files import text_files
from qtrain.data.text import text_datasets
from qtrain.data.text.documents import DocumentOrder, Documents
from qtrain.train.log.metrics import read_metrics
from qtrain.train.loop import Training
from qtrain.train.saves import Saves
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import resolve_resume
from tests.cases import sampled
from tests.data.corpora import functions, write_jsonl
from tests.system import call, flags, losses, only_run, write_model

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    return tmp_path


def argv(**settings) -> list[str]:
    chosen = {"model": "tiny.json", "train_ds": TEXT, "eval_ds": TEXT, "eval_sequences": 4, "seq_len": 32, "n_steps": 7}
    return flags(**{**chosen, "eval_interval": 3, "ckpt_interval": 0, "export": False, "device": "cpu", **settings})


def steps(runs: str = "runs") -> tuple[list[int], list[int], list[int]]:
    """Steps that are logged, evaluated and saved."""
    run = only_run(Path(runs))
    records = read_metrics(run / "metrics.jsonl")
    trained = [r["step"] for r in records if "loss" in r]
    evaluated = [r["step"] for r in records if "eval_loss" in r]
    return trained, evaluated, sorted(int(p.name) for p in (run / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ([1, 2, 3, 4, 5, 6, 7], [0, 3, 6, 7], [7])),
        ({"eval_interval": 0, "ckpt_interval": 2, "keep_ckpts": 2}, ([1, 2, 3, 4, 5, 6, 7], [0, 7], [6, 7])),
        ({"eval_interval": 7, "ckpt_interval": 7, "log_interval": 3}, ([3, 6, 7], [0, 7], [7])),
        ({"eval_interval": 100, "ckpt_interval": 100, "log_interval": 100, "n_steps": 1}, ([1], [0, 1], [1])),
        ({"keep_ckpts": 0, "ckpt_interval": 1}, ([1, 2, 3, 4, 5, 6, 7], [0, 3, 6, 7], [])),
    ],
)
def test_intervals_mean_what_they_say(settings, expected):
    done = call(llm_pretrain.main, argv(**settings))
    assert done.code == 0, done.err
    assert steps() == expected


def test_the_learning_rate_follows_the_schedule_to_its_end():
    schedule = {"warmup": 0.4, "decay": 0.4, "final": 0.1}
    assert call(llm_pretrain.main, argv(n_steps=10, lr=1e-3, lr_schedule_kwargs=schedule)).code == 0
    rates = [row[3] for row in losses(only_run(Path("runs"))) if row[3] is not None]
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3]) and rates[4:6] == [1e-3, 1e-3]
    assert rates[-1] == pytest.approx(1e-4) and rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)


def test_accumulating_gives_the_losses_of_the_whole_batch():
    """Through the loader: micro-batches of a step are the rows of the batch, in order."""
    found = []
    for micro in (8, 2):
        runs = f"runs{micro}"
        assert call(llm_pretrain.main, argv(batch_size=8, micro_batch_size=micro, runs_dir=runs, lr=0.01)).code == 0
        found.append(losses(only_run(Path(runs))))
    for one, other in zip(*found, strict=True):
        assert one[0] == other[0] and one[3:6] == other[3:6]
        assert (
            one[1:3] == pytest.approx(other[1:3], rel=1e-4) if one[1] is not None else one[6] == pytest.approx(other[6])
        )


# ---- signals at every moment -----------------------------------------------------------------------------------------


def interrupt(patch: pytest.MonkeyPatch, method: str, at_step: int, number: int = signal.SIGTERM) -> None:
    """Send a signal at the end of Training's `method`, or of a save, at a step."""
    owner, original = owner_of(method)

    def interrupted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if run_of(self).state.step == at_step:
            os.kill(os.getpid(), number)

    patch.setattr(owner, method, interrupted)


def owner_of(method: str) -> tuple[type, Callable]:
    """The class that has it, and the method."""
    owner = Saves if method == "save" else Training
    return owner, getattr(owner, method)


def run_of(owner: Training | Saves) -> Run:
    return owner._run if isinstance(owner, Saves) else owner.run


def resume_arguments(out: str) -> list[str]:
    """The arguments of the printed resume command."""
    return out.split("resume with:\n")[1].split("llm_pretrain.py ")[1].splitlines()[0].split()


def test_a_run_whose_time_is_up_saves_and_ends_well():
    """After the step, without the evaluation that is due and without an export; what it prints resumes it."""
    settings = {"eval_interval": 1, "max_hours": 2}
    assert call(llm_pretrain.main, argv(**settings, runs_dir="whole")).code == 0
    with pytest.MonkeyPatch.context() as patch:
        step = Training._step
        up = SimpleNamespace(monotonic=lambda: math.inf)
        patch.setattr(Training, "_step", lambda *args: (step(*args), patch.setattr(signals, "time", up)))
        done = call(llm_pretrain.main, argv(**settings, export=True))
    assert done.code == 0 and "stopped at step 1 after --max_hours 2; resume with:" in done.out, done.err
    run = only_run(Path("runs"))
    assert steps() == ([1], [0], [1]) and not (run / "hf").exists()
    resumed = call(llm_pretrain.main, [*resume_arguments(done.out), "--no_export"])
    assert resumed.code == 0 and losses(run) == losses(only_run(Path("whole"))), resumed.err


SCRIPTED = {0: 5.0, 1: 4.0, 2: 3.0, 3: 3.5, 4: 3.2, 5: 3.0, 6: 2.0, 7: 1.0}
"""Evaluation losses by step."""


@pytest.fixture
def scripted(monkeypatch) -> None:
    """Evaluations find these losses."""
    compare = Training._compare
    monkeypatch.setattr(Training, "_compare", lambda self, _: compare(self, SCRIPTED[self.run.state.step]))


def saved_state(step: int) -> dict:
    meta = only_run(Path("runs")) / "checkpoints" / f"{step:08d}" / "meta.json"
    return json.loads(meta.read_text())["state"]


def test_the_best_checkpoint_stays_beside_the_newest(scripted):
    """Saved at the evaluation itself, whatever --ckpt_interval; replaced by a better one."""
    common = {"eval_interval": 1, "keep_best": True, "keep_ckpts": 1}
    done = call(llm_pretrain.main, argv(**common, n_steps=5))
    assert done.code == 0 and steps()[2] == [2, 5], done.err
    assert "00000002: evaluation loss 3.0000" in done.out
    assert [saved_state(5)[key] for key in ("best_eval_loss", "best_step", "evals_since_best")] == [3.0, 2, 3]
    done = call(llm_pretrain.main, argv(**common, n_steps=7, resume=only_run(Path("runs"))))
    assert done.code == 0 and steps()[2] == [7], done.err


@pytest.mark.parametrize("stopped_at", [None, 3, 4])
def test_early_stopping_ends_the_run_and_counts_on_after_resuming(scripted, stopped_at):
    """Three evaluations after step 2 are no better: the run ends well and exports, also where a signal came between."""
    settings = {"eval_interval": 1, "early_stopping": 3, "export": True}
    done = None
    if stopped_at:
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, "_step" if stopped_at == 3 else "_evaluate", stopped_at)
            done = call(llm_pretrain.main, argv(**settings))
        assert done.code == 128 + signal.SIGTERM
    done = call(llm_pretrain.main, resume_arguments(done.out) if done else argv(**settings))
    assert done.code == 0, done.err
    assert "step 5: --early_stopping: 3 evaluations without a lower loss than 3.0000, of step 2" in done.out
    assert steps()[0][-1] == steps()[1][-1] == steps()[2][-1] == 5
    run = only_run(Path("runs"))
    assert (run / "hf/model.safetensors").exists()
    # Resumed once more, it is at its end; without the flag it goes on.
    again = call(llm_pretrain.main, argv(**settings, resume=run))
    assert again.code == 0 and steps()[0][-1] == 5
    assert call(llm_pretrain.main, argv(eval_interval=1, resume=run)).code == 0 and steps()[0][-1] == 7


@pytest.mark.parametrize(
    ("method", "at_step", "evaluated"),
    [
        ("_step", 3, [0]),  # where an evaluation is due: the signal does not wait for it
        ("_step", 4, [0, 3]),
        ("_evaluate", 3, [0, 3]),
        ("_evaluate", 0, [0]),  # before the first step
        ("save", 2, [0]),
    ],
)
def test_a_stopped_and_resumed_run_ends_the_same(method, at_step, evaluated):
    settings = {"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": True}}
    assert call(llm_pretrain.main, argv(**settings, runs_dir="whole")).code == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, method, at_step)
        done = call(llm_pretrain.main, argv(**settings, ckpt_interval=2 if method == "save" else 0))
    assert done.code == 128 + signal.SIGTERM, done.err
    assert steps() == ([*range(1, at_step + 1)], evaluated, [at_step])
    assert f"stopped at step {at_step}; resume with:" in done.out
    resumed = call(llm_pretrain.main, resume_arguments(done.out))
    assert resumed.code == 0, resumed.err
    assert losses(only_run(Path("runs"))) == losses(only_run(Path("whole")))


def test_unreadable_data_loses_no_step(monkeypatch):
    """Steps before a broken line are saved; once it is repaired, the run resumes as if nothing had happened."""
    file = Path("train.jsonl")
    good = [json.dumps({"text": text}).encode() + b"\n" for text in functions()]
    file.write_bytes(b"".join(good))
    settings = {"train_ds": {**TEXT, "paths": "train.jsonl"}, "seq_len": 256, "batch_size": 8, "n_steps": 12}
    assert call(llm_pretrain.main, argv(**settings, runs_dir="whole")).code == 0
    monkeypatch.setattr(text_datasets, "ESTIMATED_FROM", 10)  # else the plan finds it
    documents = Documents(text_files(str(file), "all", 0.05, "--train_ds"), "text", "--train_ds")
    late = DocumentOrder(documents, seed=42, shuffle=True)(0, 80)
    file.write_bytes(b"".join(b"!" + line[1:] if i == late else line for i, line in enumerate(good)))
    stopped = call(llm_pretrain.main, argv(**settings))
    assert stopped.code == 2 and "train.jsonl, line at byte" in stopped.err and "not valid JSON" in stopped.err
    trained, _, saved = steps()
    assert 0 < trained[-1] < 12 and saved == trained[-1:]
    file.write_bytes(b"".join(good))
    resumed = call(llm_pretrain.main, argv(**settings, resume="auto"))
    assert resumed.code == 0, resumed.err
    assert losses(only_run(Path("runs"))) == losses(only_run(Path("whole")))


def test_a_resumed_model_with_dropout_draws_the_same_masks():
    """They depend on --seed: a transformers model draws from the global generators."""
    write_model(Path("gpt.json"), model_type="gpt2", n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.3)
    foreign = {"model": "gpt.json", "model_impl": "hf", "dtype": "fp32"}
    for runs, seed in (("whole", 42), ("again", 42), ("other", 43)):
        assert call(llm_pretrain.main, argv(**foreign, runs_dir=runs, seed=seed)).code == 0
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, "_step", 4)
        done = call(llm_pretrain.main, argv(**foreign))
    assert call(llm_pretrain.main, resume_arguments(done.out)).code == 0
    whole, again, other, resumed = (losses(only_run(Path(p))) for p in ("whole", "again", "other", "runs"))
    assert resumed == whole == again != other


def test_a_signal_in_the_last_step_changes_nothing(monkeypatch):
    interrupt(monkeypatch, "_step", 7)
    done = call(llm_pretrain.main, argv(export=True))
    assert done.code == 0 and "resume with" not in done.out
    assert steps() == ([*range(1, 8)], [0, 3, 6, 7], [7]) and (only_run(Path("runs")) / "hf").exists()


def test_without_checkpoints_a_stopped_run_says_that_nothing_is_saved(monkeypatch):
    interrupt(monkeypatch, "_step", 2, signal.SIGUSR1)
    done = call(llm_pretrain.main, argv(keep_ckpts=0))
    assert done.code == 128 + signal.SIGUSR1 and "stopped at step 2; nothing is saved (--keep_ckpts 0)" in done.out
    assert "resume with" not in done.out


def test_a_finished_run_when_resumed_only_exports():
    assert call(llm_pretrain.main, argv()).code == 0
    run = only_run(Path("runs"))
    before = (run / "metrics.jsonl").read_text()
    done = call(llm_pretrain.main, argv(resume="auto", export=True))
    assert done.code == 0 and (run / "metrics.jsonl").read_text() == before and (run / "hf/config.json").exists()


def test_more_steps_than_planned_may_be_added():
    assert call(llm_pretrain.main, argv()).code == 0
    assert call(llm_pretrain.main, argv(resume="auto", n_steps=9)).code == 0
    assert steps() == ([*range(1, 10)], [0, 3, 6, 7, 9], [7, 9])


@pytest.mark.parametrize(
    ("method", "what"),
    sampled(
        [*itertools.product(["_step", "_evaluate", "save"], ["folder", "all runs", "moved"])],
        lambda *case: case not in [("_step", "folder"), ("_evaluate", "all runs"), ("save", "moved")],
    ),
)
def test_a_run_folder_that_disappears_is_replaced_by_one_beside_it(monkeypatch, method, what):
    """After step 6, where an evaluation and a checkpoint are due; nothing of the run is lost, and a line says so."""
    assert call(llm_pretrain.main, argv(runs_dir="whole")).code == 0
    (owner, original), gone = owner_of(method), []

    def disappears(self, *args, **kwargs):
        original(self, *args, **kwargs)
        run = run_of(self)
        if run.state.step == 6 and not gone:
            gone.append(run.folder.path)
            path = run.folder.path if what != "all runs" else Path("runs")
            path.rename("elsewhere") if what == "moved" else shutil.rmtree(path)

    monkeypatch.setattr(owner, method, disappears)
    done = call(llm_pretrain.main, argv(export=True, ckpt_interval=6, keep_ckpts=2))
    assert done.code == 0, done.err
    run = only_run(Path("runs"))
    assert run.name == f"{gone[0].name}-recovered"
    assert f"warning: the run folder {gone[0]} is gone; this run continues in {run}\n" in done.out
    assert losses(run) == losses(only_run(Path("whole")))
    assert {"config.json", "train.log", "report.html", "hf"} <= {path.name for path in run.iterdir()}
    assert "00000007" in [path.name for path in (run / "checkpoints").iterdir()]
    assert resolve_resume("auto", Path("runs/llm_pretrain"), "run") == run / "checkpoints/00000007"
    monkeypatch.undo()


def test_a_run_folder_that_disappears_while_a_signal_stops_the_run_is_saved_too(monkeypatch):
    def disappears(self, *args, original=Training._step):
        original(self, *args)
        if self.run.state.step == 4:
            shutil.rmtree("runs")
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Training, "_step", disappears)
    done = call(llm_pretrain.main, argv())
    assert done.code == 128 + signal.SIGTERM
    run = only_run(Path("runs"))
    assert run.name.endswith("-recovered") and steps() == ([1, 2, 3, 4], [0, 3], [4])
    assert f"--resume {run}" in done.out


def test_a_run_that_can_save_nowhere_says_so(monkeypatch):
    def disappears(self, *args, original=Training._step):
        original(self, *args)
        if self.run.state.step == 2:
            shutil.rmtree("runs")
            Path("runs").touch()

    monkeypatch.setattr(Training, "_step", disappears)
    done = call(llm_pretrain.main, argv())
    assert done.code == 1 and "is gone, and no other can be made beside it: Not a directory" in done.err


def test_an_error_leaves_the_log_complete():
    """Every line of metrics.jsonl is written before the stop, and the status line's last state too."""
    done = call(llm_pretrain.main, argv(lr=1e30, clip_grad_norm=0, n_steps=400))
    assert done.code == 1 and "Traceback" not in done.err
    run = only_run(Path("runs"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = max(line["step"] for line in lines)
    assert f"step {last + 1}: " in done.err and f"step {last}/400" in done.out
    message = done.err.removeprefix("error: ").strip()
    assert f"ERROR {message}" in (run / "train.log").read_text()
    assert html.escape(message) in (run / "report.html").read_text()
