"""Trackers: opened by name, missing ones refused with the command that installs them, failing ones never fatal."""

import json
import logging
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest

from qtrain.core.errors import UserError
from qtrain.train.log import trackers
from qtrain.train.log.trackers import TRACKERS, Tracker, Trackers, check_trackers, open_trackers
from tests.system import ROOT
from tests.train.log.local_trackio import keep_locally, stored


class Recorder(Tracker):
    """Keeps what it is given; fails from the step `fails_at` on."""

    package = "json"

    def __init__(self, fails_at: float = math.inf):
        self.rows, self.closed, self.fails_at = [], False, fails_at

    def log(self, values, step, time=None):
        if step >= self.fails_at:
            raise ConnectionError("the server is gone\nand more")
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture
def warnings(caplog):
    logger = logging.getLogger("qtrain")
    before, logger.propagate = logger.propagate, True
    yield lambda: [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    logger.propagate = before


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"--trackers: unknown tracker 'tensorbord'\. Did you mean 'tensorboard'"):
        open_trackers(["tensorbord"], {}, tmp_path, "p", "r")


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_missing_package_is_named_with_its_command(monkeypatch, name):
    monkeypatch.setattr(TRACKERS[name], "package", "surely_not_installed")
    with pytest.raises(UserError, match=r"pip install surely_not_installed"):
        check_trackers([name])


def test_only_numbers_are_sent():
    recorder = Recorder()
    opened = Trackers({"a": lambda: recorder})
    opened.log({"step": 3, "loss": 1.5, "lr": None, "tokens": 7, "samples": [["a", "b"]], "note": "x", "ok": True}, 3)
    opened.close()
    assert recorder.rows == [(3, {"loss": 1.5, "tokens": 7})] and recorder.closed


def test_nested_numbers_have_names_with_a_slash_and_the_time_is_no_curve():
    recorder = Recorder()
    opened = Trackers({"a": lambda: recorder})
    gpu = {"util": 97, "power": 612.5, "throttled": ["power cap"], "memory_util": None}
    row = {"step": 3, "loss": 1.5, "gpu": gpu, "ms": {"optimizer": 3.5}, "time": 1_764_000_000.0}
    opened.log({**row, "data": {"epoch": 1, "shard": {"index": 5}}, "schemes": {"int8": 24}}, 3)
    opened.log({"step": 4, "time": 1.0}, 4)  # nothing to draw
    assert recorder.rows == [(3, {"loss": 1.5, "gpu/util": 97, "gpu/power": 612.5, "ms/optimizer": 3.5})]


def test_a_failing_tracker_is_reported_once_and_the_others_continue(warnings):
    bad, good = Recorder(fails_at=2), Recorder()
    opened = Trackers({"bad": lambda: bad, "good": lambda: good})
    for step in range(1, 6):
        opened.log({"loss": 1.0}, step)
    opened.close()
    assert [step for step, _ in bad.rows] == [1] and [step for step, _ in good.rows] == [1, 2, 3, 4, 5]
    assert good.closed and not bad.closed
    assert warnings() == ["tracker bad failed and is dropped: ConnectionError: the server is gone"]


def test_a_tracker_that_cannot_be_opened_does_not_stop_the_run(warnings, monkeypatch, tmp_path):
    class Unopened(Recorder):
        def __init__(self, *_):
            raise RuntimeError("not logged in")

    monkeypatch.setitem(trackers.TRACKERS, "unopened", Unopened)
    opened = open_trackers(["unopened"], {}, tmp_path, "p", "r")
    opened.log({"loss": 1.0}, 1)
    opened.close()
    assert len(warnings()) == 1 and "not logged in" in warnings()[0]


def test_tensorboard_files_hold_the_numbers_and_a_resumed_run_replaces_later_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = open_trackers(["tensorboard"], {"lr": 0.1}, tmp_path, "p", "r")
    for step in (1, 2, 3):
        first.log({"loss": float(step)}, step)
    first.close()
    second = open_trackers(["tensorboard"], {"lr": 0.1}, tmp_path, "p", "r", start_step=1)
    second.log({"loss": 20.0}, 2)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


def test_wandb_offline_writes_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    opened = open_trackers(["wandb"], {"lr": 0.1}, tmp_path, "p", "my run")
    assert list(opened._open) == ["wandb"]
    opened.log({"loss": 1.0, "samples": [("def f", "(x):")]}, 1)
    opened.close()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # a process of wandb's own writes the file, on a busy machine after `finish`
    while b"loss" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"loss" in written.read_bytes()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["step", "prompt", "continuation"] and found["data"] == [[1, "def f", "(x):"]]


class FakeMlflow(SimpleNamespace):
    """The part of mlflow's interface that is used, as mlflow 3.17 has it."""

    def __init__(self):
        self.runs, self.active = {}, None

    def set_experiment(self, name):
        self.experiment = name

    def search_runs(self, *, filter_string, output_format):
        found = [key for key, run in self.runs.items() if f"tags.qtrain_run = '{run['tag']}'" == filter_string]
        return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in found]

    def start_run(self, run_id=None, run_name=None, tags=None):
        if run_id is None:
            run_id = str(len(self.runs))
            self.runs[run_id] = {"name": run_name, "tag": tags["qtrain_run"], "metrics": []}
        self.active = run_id

    def log_params(self, params):
        self.runs[self.active]["params"] = params

    def log_metrics(self, metrics, step):
        self.runs[self.active]["metrics"].append((step, metrics))

    def end_run(self):
        self.active = None


def test_mlflow_goes_on_with_the_page_of_a_resumed_run(tmp_path, monkeypatch):
    mlflow = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(TRACKERS["mlflow"], "package", "json")
    for folder, step in (("1_run", 1), ("1_run", 2), ("2_run", 1)):
        opened = open_trackers(["mlflow"], {"train_ds": "x" * 7000}, tmp_path / folder, "project", "run", step - 1)
        opened.log({"step": step, "loss": 1.0 / step}, step)
        opened.close()
    first, second = mlflow.runs.values()
    assert first["metrics"] == [(1, {"loss": 1.0}), (2, {"loss": 0.5})] and second["metrics"] == [(1, {"loss": 1.0})]
    assert mlflow.experiment == "project" and first["name"] == "run" and len(first["params"]["train_ds"]) == 6000


def test_trackio_keeps_the_run_locally(tmp_path, monkeypatch):
    keep_locally(monkeypatch, tmp_path / "trackio")
    opened = open_trackers(["trackio"], json.loads('{"lr": 0.1}'), tmp_path, "kept", "r")
    assert list(opened._open) == ["trackio"]
    opened.log({"step": 3, "loss": 1.5, "gpu": {"power": 600.0}, "samples": [("def f", "(x):")]}, 3)
    opened.close()
    (step, numbers), (_, table) = stored("kept")
    assert step == 3 and numbers == {"loss": 1.5, "gpu/power": 600.0}
    assert table["samples"]["_value"] == [{"prompt": "def f", "continuation": "(x):"}]


def test_samples_reach_tensorboard(tmp_path):
    """As code, so that a text's own Markdown and line breaks stay as they are; read back from the event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = open_trackers(["tensorboard"], {"lr": 0.1}, tmp_path, "p", "r")
    for step, text in ((3, "(x):\n  pass"), (6, "(y): *")):
        opened.log({"eval_loss": 1.0, "samples": [("def f", text), ("# a", "b")]}, step)
    opened.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    def texts(tag: str) -> list[tuple[int, str]]:
        return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(f"{tag}/text_summary")]

    assert texts("sample 0") == [(3, "    def f [>] (x):\n      pass"), (6, "    def f [>] (y): *")]
    assert texts("sample 1") == [(3, "    # a [>] b"), (6, "    # a [>] b")]
    assert texts("config") == [(0, "| setting | value |\n| --- | --- |\n| lr | 0.1 |")]


def test_requirements_name_what_the_scripts_stand_on():
    names = {re.split(r"[<>=;]", line)[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()}
    assert names >= {"torch", "triton", "transformers", "datasets", "timm", "sentencepiece", "wandb", "tyro"}
    development = (ROOT / "requirements-dev.txt").read_text()
    # mlflow is as large as all the others together.
    packages = {tracker.package for tracker in TRACKERS.values()} - {"mlflow"}
    assert all(package in names or package in development for package in packages)
