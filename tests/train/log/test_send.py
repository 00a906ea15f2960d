"""A finished run sent to a tracker: what a live run would have sent, from damaged and repeated lines too."""

import json
import time
from pathlib import Path

import pytest

from qtrain.core.errors import TrainingStopped, UserError
from qtrain.train.log import trackers
from qtrain.train.log.jsonl import in_order, read_records
from qtrain.train.log.send import send_run, timed
from tests.train.log.local_trackio import keep_locally, stored

SAMPLES = [["def f", "(x):"]]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run that was killed after step 4 and resumed at step 2, with a damaged line and keys missing here and there."""
    folder = tmp_path / "20261126_run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"project": "p", "run_name": "my run", "lr": 0.1}))
    rows = [
        {"step": 0, "eval_loss": 5.0, "samples": SAMPLES},
        *({"step": n, "loss": 4.0 + n, "time": 1000.0 + n} for n in (1, 2, 3, 4)),
        {"step": 4, "eval_loss": 9.0},
        {"step": 3, "loss": 0.3, "gpu": {"power": 600.0, "throttled": []}, "time": 2003.0},
        {"step": 4, "loss": None, "lr": 0.1, "time": "soon", "samples": [["a"], "b", [1, 2]]},
        {"step": 4, "eval_loss": 0.5},
    ]
    lines = [json.dumps(row) for row in rows]
    lines.insert(4, '{"step": 2, "lo')
    lines.insert(7, "\x00\x00")
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "loss": 1')
    return folder


EXPECTED = [(0, "eval_loss", 5.0), (1, "loss", 5.0), (2, "loss", 6.0), (3, "loss", 0.3), (3, "gpu/power", 600.0)]
EXPECTED += [(4, "lr", 0.1), (4, "eval_loss", 0.5)]


def test_the_records_after_a_resume_replace_those_before_it(run):
    found = timed(in_order(read_records(run / "metrics.jsonl")[0]))
    assert [(r["step"], r.get("loss", r.get("eval_loss"))) for r in found] == [
        (0, 5.0), (1, 5.0), (2, 6.0), (3, 0.3), (4, None), (4, 0.5)
    ]  # fmt: skip
    assert [r["time"] for r in found] == [1001.0, 1001.0, 1002.0, 2003.0, 2003.0, 2003.0]
    assert [r["time"] for r in timed([{"step": 1, "loss": 1.0}])] == [None]


def test_tensorboard_has_the_run_once_at_its_own_times(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):
        assert send_run(run, "tensorboard") == 6
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = ["eval_loss", "gpu/power", "loss", "lr"]
    assert sorted(events.Tags()["scalars"]) == tags
    found = {(e.step, tag, round(e.value, 5)) for tag in tags for e in events.Scalars(tag)}
    assert found == {(step, tag, value) for step, tag, value in EXPECTED}
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    assert [e.wall_time for e in events.Scalars("loss")] == [1001.0, 1002.0, 2003.0]
    assert {e.step for e in events.Tensors("sample 0/text_summary")} == {0}  # texts it does not purge


def test_wandb_gets_the_run_offline(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert send_run(run, "wandb") == 6
    (written,) = (run / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # a process of wandb's own writes the file
    while b"gpu/power" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"gpu/power" in written.read_bytes() and b"my run" in written.read_bytes()
    assert list((run / "wandb").glob("offline-run-*/files/media/table/samples*.json"))


def test_trackio_gets_the_run_locally(run, monkeypatch, tmp_path):
    keep_locally(monkeypatch, tmp_path / "trackio")
    (run / "config.json").write_text('{"project": "sent"}')
    assert send_run(run, "trackio") == 6
    rows = stored("sent")
    numbers = [(step, *item) for step, values in rows for item in values.items()]
    assert [row for row in numbers if row[1] != "samples"] == EXPECTED
    assert [(step, value["_value"]) for step, key, value in numbers if key == "samples"] == [
        (0, [{"prompt": "def f", "continuation": "(x):"}])
    ]


@pytest.mark.parametrize(
    ("metrics", "tracker", "said"),
    [
        (None, "tensorboard", "metrics.jsonl has no records; give the folder of a run"),
        ("no json\n{}\n", "tensorboard", "metrics.jsonl has no records"),
        ('{"step": 1, "loss": 1.0}\n', "tensorbord", r"--to: unknown tracker 'tensorbord'\. Did you mean 'tensorb"),
    ],
)
def test_what_is_no_run_is_refused_and_nothing_written(tmp_path, metrics, tracker, said):
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=said):
        send_run(tmp_path, tracker)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--to wandb: there is no run folder '.*none'"):
        send_run(tmp_path / "none", "wandb")


def test_a_run_without_a_config_is_sent(run):
    (run / "config.json").write_text("{damaged")
    assert send_run(run, "tensorboard") == 6


def test_a_tracker_that_fails_is_one_message(run, monkeypatch):
    class Offline(trackers.TensorBoardTracker):
        def log(self, values, step, time=None):
            raise ConnectionError("the server is gone\nand more")

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Offline)
    with pytest.raises(TrainingStopped, match=r"^--to tensorboard: ConnectionError: the server is gone$"):
        send_run(run, "tensorboard")
