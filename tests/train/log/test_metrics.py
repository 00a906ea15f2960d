"""metrics.jsonl survives kills and resumes; throughput excludes everything but training."""

import errno
import json
import logging
import time
from types import SimpleNamespace

import pytest
import torch

from qtrain.core.hardware import rates
from qtrain.train.log import metrics
from qtrain.train.log.metrics import MetricsLog, Throughput, read_metrics

CPU = torch.device("cpu")


def write_steps(path, steps, resumed_step=None):
    log = MetricsLog(path, resumed_step)
    for step in steps:
        log.write({"step": step, "loss": 1 / step})
    log.close()


def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path):
    write_steps(tmp_path / "whole.jsonl", range(1, 41))
    write_steps(tmp_path / "resumed.jsonl", range(1, 21))
    with (tmp_path / "resumed.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')  # killed while writing
    write_steps(tmp_path / "resumed.jsonl", range(14, 41), resumed_step=13)
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_full_disk_costs_no_line(tmp_path, monkeypatch):
    """The lines are kept, and written when there is space again, also the rest of one that was written in part."""
    log, room = MetricsLog(tmp_path / "metrics.jsonl"), [0]

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = self.file.write(data[: room[0]])
            room[0] -= written
            return written

        def close(self):
            self.file.close()

    monkeypatch.setattr(log, "_file", Full(log._file))
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("qtrain"), "warning", lambda text, *parts: said.append(text % parts))
    for step, free in ((1, 0), (2, 20), (3, 0), (4, 10_000)):
        room[0] = free
        log.write({"step": step, "loss": 1 / step})
        assert log.unwritten == (0 if step == 4 else step)
    log.close()
    write_steps(tmp_path / "whole.jsonl", range(1, 5))
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [text.count("cannot be written (No space") for text in said] == [1]


def test_a_line_of_thousands_of_brackets_and_a_folder_are_no_records(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + '\n{"step": 2}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2}]
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_truncated_line_is_dropped_and_the_rest_kept(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3])
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last)])
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write_steps(path, [3], resumed_step=3)
    assert path.read_bytes() == whole


def test_records_of_the_resumed_step_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for record in ({"step": 1, "loss": 3.0}, {"step": 1, "eval_loss": 3.5}, {"step": 2, "loss": 2.0}):
        log.write(record)
    MetricsLog(path, resumed_step=1).close()
    assert read_metrics(path) == [{"step": 1, "loss": 3.0}, {"step": 1, "eval_loss": 3.5}]


def test_resuming_a_run_without_a_log_starts_one(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [5], resumed_step=4)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [5]


def test_each_line_is_readable_at_once_and_is_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 1e-3})
    line = path.read_text()

    def refuse(constant):
        raise AssertionError(constant)

    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "grad_norm": None, "lr": 1e-3}
    log.close()


def test_a_missing_log_has_no_records(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_speed_excludes_the_first_steps_and_pauses():
    meter = Throughput(CPU, skip_steps=1)
    time.sleep(0.3)  # compilation
    meter.step(10_000)
    for _ in range(4):
        time.sleep(0.02)
        meter.step(100)
    with meter.pause():
        time.sleep(0.3)  # evaluation
    rate = meter.read()
    # 400 tokens in 4 x 20 ms; a pause counted, or the skipped step's tokens, would be far outside
    assert 400 / 0.2 < rate.tok_s <= 400 / 0.08
    assert rate.step_s == pytest.approx(100 / rate.tok_s)


def test_there_is_no_speed_before_a_step_is_counted():
    meter = Throughput(CPU, skip_steps=1)
    assert meter.read() is None
    meter.step(100)
    assert meter.read() is None


def test_windows_are_separate():
    meter = Throughput(CPU, skip_steps=0)
    time.sleep(0.05)
    meter.step(1000)
    slow = meter.read()
    time.sleep(0.01)
    meter.step(1000)
    fast = meter.read()
    assert fast.tok_s > slow.tok_s
    assert meter.read() is None  # no step since


def test_the_fraction_of_time_spent_waiting_for_data():
    meter = Throughput(CPU, skip_steps=0)
    for _ in range(5):
        with meter.waiting():
            time.sleep(0.03)
        time.sleep(0.01)
        meter.step(10)
    assert 0.5 < meter.read().data_wait < 0.9


def test_energy_counts_where_time_counts_and_is_averaged_over_seconds(monkeypatch):
    """50 W in training, other powers in compilation and an evaluation; a shorter time keeps the mean before it."""
    now, joules, reads = [0.0], [0.0], []
    for module in (metrics, rates):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds: float, used: float) -> None:
        now[0] += seconds
        joules[0] += used

    meter = Throughput(CPU, skip_steps=1, joules=lambda: reads.append(1) or joules[0])
    with meter.pause():  # the evaluation before the first step
        passes(3, 900)
    passes(10, 1000)
    meter.step(7)
    for _ in range(10):
        passes(0.2, 10)
        meter.step(100)
        short = meter.read()
        assert short.tok_s == pytest.approx(500) and short.power is None and short.joules_token is None
    assert len(reads) == 1, "the counter is slow to read"
    with meter.pause():
        passes(5, 500)
    passes(4, 200)
    meter.step(2000)
    rate = meter.read()
    assert rate.power == pytest.approx(50) and rate.joules_token == pytest.approx(300 / 3000)
    passes(0.1, 80)
    meter.step(100)
    assert meter.read().power == pytest.approx(50)


def test_without_a_counter_there_is_no_energy():
    meter = Throughput(CPU, skip_steps=0)
    time.sleep(0.01)
    meter.step(100)
    rate = meter.read()
    assert rate.power is None and rate.joules_token is None and rate.ms == {}


def test_numbers_within_objects_are_strict_json_too(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "gpu": {"power": float("nan"), "util": 3, "throttled": ["power cap"]}})
    log.close()
    found = {"power": None, "util": 3, "throttled": ["power cap"]}
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "gpu": found}]


@pytest.mark.gpu
def test_queued_gpu_work_counts_as_training_not_as_pause():
    device = torch.device("cuda")
    x = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        y = x @ x
    torch.cuda.synchronize()
    alone = time.perf_counter() - begin
    meter = Throughput(device, skip_steps=0)
    for _ in range(20):
        y = x @ x
    meter.step(1000)
    with meter.pause():
        y.sum().item()
    assert meter.read().step_s > 0.3 * alone  # as a pause it would be some launches; others may use the GPU meanwhile
