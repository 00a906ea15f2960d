"""SIGTERM, SIGUSR1 and Ctrl-C end a run at the end of its current step, in time to save."""

import os
import signal
import time
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_PRESS_SECONDS = 0.5


class StopSignals:
    """While open, a stop signal only sets `requested` (its name); the loop looks at it after each step.

        with StopSignals() as stop:
            for step in ...:
                train(step)
                if stop.requested:
                    save(); break

    SIGUSR1 is what schedulers send ahead of a preemption. A second Ctrl-C ends the process at once. To be opened in the
    main thread; the handlers that were there come back at the end.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._pid = os.getpid()
        self._first_interrupt: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(number)
            return
        now = time.monotonic()
        if number == signal.SIGINT and self._first_interrupt is not None:
            # A launcher passes Ctrl-C on to processes that the terminal has told already.
            if now - self._first_interrupt > SAME_PRESS_SECONDS:
                _die(number)
            return
        if number == signal.SIGINT:
            self._first_interrupt = now
        if self.requested is None:
            self.requested = signal.Signals(number).name
            # Not print: a handler may interrupt a print that holds the stream.
            text = f"\n{self.requested}: stopping after this step, then saving. Ctrl-C (again) stops at once.\n"
            os.write(2, text.encode())

    def _handle_in_child(self, number: int) -> None:
        """A forked data worker inherits the handler: it must die when told to, but work on while the step finishes."""
        if number == signal.SIGTERM:
            _die(number)


def _die(number: int) -> None:
    """End this process as if it had no handler, so that the parent sees which signal ended it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
