"""Where the time of the start went: parts add up from the start of the process, and are told once."""

from types import SimpleNamespace

import pytest

from qtrain.train.log import start_clock
from qtrain.train.log.start_clock import StartClock


@pytest.fixture
def clock(monkeypatch):
    """A clock of a process that started at 100 s, and the function that lets seconds pass."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(start_clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(start_clock, "STARTED", 100.0)
    return StartClock(), sleep


def test_parts_add_up_to_the_time_since_the_process_started(clock):
    start, sleep = clock
    for part, seconds in (("imports", 4.0), ("plan", 0.25), ("data", 0.5), ("plan", 0.5), ("evaluation", 0.01)):
        sleep(seconds)
        start.mark(part)
    sleep(2.0)
    assert start.end()
    assert start.seconds == pytest.approx(
        {"imports": 4.0, "plan": 0.75, "data": 0.5, "evaluation": 0.01, "first step": 2.0}
    )
    assert start.describe() == "7.3 s: imports 4.0, plan 0.8, data 0.5, first step 2.0"
    assert start_clock.seconds_since_start() == pytest.approx(7.26)


def test_a_run_that_returns_to_its_first_checkpoint_has_started_once(clock):
    start, sleep = clock
    sleep(1.0)
    assert start.end()
    before = dict(start.seconds)
    sleep(5.0)
    assert not start.end() and start.seconds == before


def test_metrics_have_the_parts_in_one_record(clock):
    start, sleep = clock
    sleep(1.23456)
    start.mark("imports")
    assert start.metrics() == {"start": {"imports": 1.235}}
    assert start.metrics() == {}
