"""Milliseconds of a step by kind: host times on a CPU, events on a GPU that nothing waits for."""

import time

import pytest
import torch

from qtrain.train.log import step_clock
from qtrain.train.log.step_clock import StepClock


def step(clock: StepClock, *, counts: bool = True, **seconds: float) -> None:
    clock.begin()
    for kind, slept in seconds.items():
        time.sleep(slept)
        clock.mark(kind)
    clock.end(counts=counts)


def test_means_over_the_counted_steps_by_kind():
    clock = StepClock(torch.device("cpu"))
    step(clock, counts=False, forward_backward=0.2)  # compiles
    step(clock, forward_backward=0.04, optimizer=0.01)
    step(clock, forward_backward=0.02, optimizer=0.01)
    found = clock.read()
    assert list(found) == ["forward_backward", "optimizer"]
    assert 30 <= found["forward_backward"] < 60 and 10 <= found["optimizer"] < 25
    assert clock.read() == {}


class Event:
    """An event of a device on which a kind of work takes a second; fails when asked before the device is there."""

    now, reached, made = 0, 0, 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

    def record(self):
        Event.now += 1
        self.time = Event.now

    def elapsed_time(self, other):
        assert other.time <= Event.reached, "the device has not been there yet: this would wait"
        return 1000.0 * (other.time - self.time)


def test_events_are_read_a_step_later_and_used_again(monkeypatch):
    monkeypatch.setattr(step_clock.torch.cuda, "Event", Event)
    monkeypatch.setattr(step_clock.torch, "cuda", step_clock.torch.cuda)
    clock = StepClock(torch.device("cuda"))
    for _ in range(20):
        clock.begin()
        clock.mark("forward_backward")
        Event.reached = Event.now  # the step's synchronization
        clock.mark("optimizer")
        clock.end(counts=True)
    clock.begin()  # a step that fails: its events are used again too
    clock.mark("forward_backward")
    clock.begin()
    Event.reached = Event.now
    assert clock.read() == {"forward_backward": 1000.0, "optimizer": 1000.0}
    assert Event.made <= 9


@pytest.mark.gpu
def test_the_device_is_timed_not_the_launches():
    device = torch.device("cuda")
    x, clock = torch.randn(8192, 8192, device=device), StepClock(device)
    for _ in range(3):
        clock.begin()
        for _ in range(10):
            x @ x
        clock.mark("forward_backward")
        x @ x
        clock.mark("optimizer")
        torch.cuda.synchronize()
        clock.end(counts=True)
    found = clock.read()
    assert found["forward_backward"] > 4 * found["optimizer"] > 0
