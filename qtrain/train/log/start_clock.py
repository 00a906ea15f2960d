"""Where the seconds from the start of the process to the end of the first step went."""

import time
from typing import Any

from qtrain.core.process import STARTED

FIRST_STEP = "first step"


class StartClock:
    """`mark` after each part of the start; the first part begins with the process."""

    def __init__(self) -> None:
        self._last = STARTED
        self._told = False
        self.seconds: dict[str, float] = {}
        """By part, in the order of the first marks."""

    def mark(self, part: str) -> None:
        """The time since the last mark went to this part, which may come again."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def end(self) -> bool:
        """The first step has run. False, and nothing is counted, where it had run before: a run can return to its
        first checkpoint."""
        if FIRST_STEP in self.seconds:
            return False
        self.mark(FIRST_STEP)
        return True

    def describe(self) -> str:
        """'12.4 s: imports 4.1, plan 0.3, ...', without what took less than 50 ms."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items() if seconds >= 0.05)
        return f"{sum(self.seconds.values()):.1f} s: {parts}"

    def metrics(self) -> dict[str, Any]:
        """For the first record of a process in metrics.jsonl: the seconds by part; empty from then on."""
        if self._told:
            return {}
        self._told = True
        return {"start": {part: round(seconds, 3) for part, seconds in self.seconds.items()}}


def seconds_since_start() -> float:
    """Since this process started."""
    return time.monotonic() - STARTED
