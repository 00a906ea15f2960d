"""Milliseconds of a step by kind of work, on the device's own clock.

A CUDA event is recorded where one kind of work ends and the next begins, between what a step launches: also around the
replay of a recorded step, which is no longer for it. Events of a step are read a step later, after its own
synchronization, so reading them waits for nothing. On a CPU the marks are times of the host.
"""

import time
from collections import Counter
from typing import Any

import torch


class StepClock:
    """`begin`, `mark` after each kind of work, `end`; then `read` the mean over the steps that counted.

    The host's waits within a step count for the kind during which the device waited."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[tuple[str, Any]] = []
        self._unread: list[tuple[str, Any]] = []
        """Marks of the step before, whose events may not have been reached yet."""
        self._seconds: Counter[str] = Counter()
        self._steps = 0

    def begin(self) -> None:
        self._spare += [mark for _, mark in self._marks] if self._on_gpu else []  # of a step that did not end
        self._marks = [("", self._now())]

    def mark(self, kind: str) -> None:
        """What was launched since the last mark is of this kind."""
        self._marks.append((kind, self._now()))

    def end(self, *, counts: bool) -> None:
        """The step has been launched. counts: False where it compiles."""
        self._take_unread()
        if counts:
            self._unread, self._marks = self._marks, []

    def read(self) -> dict[str, float]:
        """Milliseconds per step by kind, over the steps since the last `read`. A GPU may still be at the last of them,
        which counts in the next `read`; empty where that was the only one."""
        if not self._on_gpu:
            self._take_unread()
        found = {kind: 1000 * seconds / self._steps for kind, seconds in self._seconds.items()}
        self._seconds, self._steps = Counter(), 0
        return found

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        # Events are reused, so a step in steady state creates none.
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _take_unread(self) -> None:
        # A mark ends its kind of work, which the mark before it began.
        for (_, before), (kind, mark) in zip(self._unread, self._unread[1:], strict=False):
            self._seconds[kind] += before.elapsed_time(mark) / 1000 if self._on_gpu else mark - before
        self._steps += bool(self._unread)  # no marks: the step did not count
        self._spare += [mark for _, mark in self._unread] if self._on_gpu else []
        self._unread = []
