"""--lm_eval against a stand-in for the harness, with the interface of lm_eval 0.4: tasks are checked before training,
and results reach the log, the report and the command that repeats a failed one."""

import fnmatch
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

import llm_finetune
import llm_pretrain
from qtrain.commands import evaluate
from qtrain.core.errors import TrainingStopped, UserError
from qtrain.train.eval.lm_eval import check_lm_eval, run_lm_eval
from qtrain.train.log import trackers
from qtrain.train.log.metrics import read_metrics
from tests.system import call, flags, only_run
from tests.test_llm_finetune import GOOD, command, write_all
from tests.train.log.report.pages import Page

TASKS = ["arc_challenge", "arc_easy", "gsm8k", "offline"]


class TaskManager:
    all_tasks = TASKS

    def match_tasks(self, names):
        return sorted(task for name in names for task in fnmatch.filter(TASKS, name))


@pytest.fixture(autouse=True)
def harness(monkeypatch):
    package, tasks = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.tasks")

    def get_task_dict(names, manager):
        if "offline" in names:
            raise ConnectionError("the hub cannot be reached\nby any way")

    def simple_evaluate(model, model_args, tasks, device):
        if "gsm8k" in tasks:
            raise RuntimeError("no answer\nat all")
        package.asked = (model, model_args, tasks, device)
        package.exported = Path(model_args.removeprefix("pretrained=").partition(",")[0], "model.safetensors").exists()
        metrics = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": 0.01, "f1,strict": 1, "n": "N/A"}
        return {"results": {task: metrics for task in tasks}}

    package.simple_evaluate, tasks.TaskManager, tasks.get_task_dict = simple_evaluate, TaskManager, get_task_dict
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    package.__spec__ = importlib.machinery.ModuleSpec("lm_eval", None)
    return package


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("nope_task", "--lm_eval: unknown task 'nope_task'.*Allowed: arc_challenge, "),
        ("arc_easy, arc_esy", "--lm_eval: unknown task 'arc_esy'. Did you mean 'arc_easy'"),
        ("base", "--lm_eval: unknown task 'boolq'"),  # the eight of that name; the harness here has two of them
        ("wino*", r"--lm_eval: unknown task 'wino\*'"),
        ("arc_easy,offline", r"the data of arc_easy,offline cannot be loaded \(the hub cannot be reached\)"),
    ],
)
def test_tasks_that_cannot_run_are_refused_before_training(tasks, message):
    with pytest.raises(UserError, match=message) as raised:
        check_lm_eval(tasks)
    assert "\n" not in str(raised.value)


def test_results_are_numbers_by_task_and_metric(harness):
    check_lm_eval("arc_*, arc_easy")
    found = run_lm_eval("arc_easy ,", "RUN/hf", "cpu")
    assert found == {f"lm_eval/arc_easy/{k}": v for k, v in (("acc", 0.25), ("acc_stderr", 0.01), ("f1,strict", 1))}
    assert harness.asked == ("hf", "pretrained=RUN/hf,dtype=auto", ["arc_easy"], "cpu")


def test_a_task_that_fails_is_one_line_with_the_command_that_repeats_it():
    with pytest.raises(TrainingStopped, match=r"gsm8k failed \(no answer\)\. .* --tasks gsm8k$"):
        run_lm_eval("gsm8k", "RUN/hf", "cpu")


class ListTracker(trackers.Tracker):
    package = "json"  # any that is installed
    logged: ClassVar[list] = []

    def __init__(self, *_):
        pass

    def log(self, values, step, time):
        self.logged.append((step, dict(values)))

    def log_samples(self, samples, step):
        pass

    def close(self):
        pass


def test_results_are_in_the_metrics_the_trackers_and_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    monkeypatch.setitem(trackers.TRACKERS, "list", ListTracker)
    done = call(llm_finetune.main, command(n_steps=2, lm_eval="arc_easy", export=True, trackers=["list"]))
    assert done.code == 0, done.err
    run, found = only_run(Path("runs"), "llm_finetune"), {"lm_eval/arc_easy/acc": 0.25}
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["step"] == 2 and found.items() <= last.items()
    assert ListTracker.logged[-1][0] == 2 and found.items() <= ListTracker.logged[-1][1].items()
    assert "lm_eval/arc_easy/acc" in Page((run / "report.html").read_text()).text
    assert "lm_eval/arc_easy/acc 0.2500" in done.out


def test_pretraining_has_it_and_a_checkpoint_is_exported_for_it(tmp_path, monkeypatch, harness):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    settings = {**GOOD, "batch_size": 2}
    done = call(llm_pretrain.main, flags(**settings, lm_eval="arc_easy"))
    assert done.code == 0, done.err
    run = only_run(Path("runs"))
    assert harness.exported and read_metrics(run / "metrics.jsonl")[-1]["lm_eval/arc_easy/acc"] == 0.25
    done = call(evaluate.main, [str(run / "checkpoints/00000002"), "--tasks", "arc_*", "--device", "cpu"])
    assert done.code == 0, done.err
    folder = Path(harness.asked[1].removeprefix("pretrained=").partition(",")[0])
    assert harness.exported and not folder.exists()
    assert [line.split() for line in done.out.splitlines() if "/acc " in line] == [
        ["|", f"{task}/acc", "|", "0.2500", "|", "0.0100", "|"] for task in ("arc_challenge", "arc_easy")
    ]


def test_a_mistake_in_tasks_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    done = call(llm_finetune.main, command(lm_eval="nope_task"))
    assert done.code == 2 and done.err.count("\n") == 1 and not Path("runs").exists()
