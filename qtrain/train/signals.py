"""SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C stop a run after its current step, so that it can save; so does --max_hours.

After a signal the run exits with 128 + its number, as a shell reports a process that the signal ended: `train && next`
does not go on without a finished model. Time that is up was asked for: the exit code is 0.
"""

import contextlib
import math
import os
import signal
import time
from types import FrameType
from typing import Any

from qtrain.core.process import GROUP_SIGNALS

SAME_PRESS_SECONDS = 0.5
TIME_UP, TIME_UP_NUMBER = "--max_hours", 100
"""What stops a run whose time is up, in place of a signal's name and number."""


class StopSignals:
    """Inside, a stop signal only sets `requested` (its name), which the training loop checks after each step.

        with StopSignals() as stop:
            for step in ...:
                train(step)
                if stop.requested:
                    save(); break

    Schedulers send SIGUSR1 before a preemption, a terminal that closes SIGHUP, unless nohup has it ignored. A second
    Ctrl-C ends the process at once. To be entered in the main thread; on exit the previous handlers are restored.
    collective: stop only on what all ranks `agree` on. deadline: of time.monotonic(), after which the time is up.
    """

    def __init__(self, *, collective: bool = False, deadline: float = math.inf) -> None:
        self._collective, self._deadline = collective, deadline
        self._received: str | None = None
        self._agreed: str | None = None
        self._pid = os.getpid()
        self._first_interrupt: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        hang_up = getattr(signal, "SIGHUP", None)
        # nohup has SIGHUP ignored: it stays so.
        for number in GROUP_SIGNALS:
            if number != hang_up or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def requested(self) -> str | None:
        """The name of the signal to stop on, or `TIME_UP`."""
        return self._agreed if self._collective else self._own

    @property
    def _own(self) -> str | None:
        """What this process has to stop on."""
        return self._received or (TIME_UP if time.monotonic() > self._deadline else None)

    @property
    def number(self) -> int:
        """The number of the signal that this process has received, or `TIME_UP_NUMBER`; 0 without either."""
        own = self._own
        return TIME_UP_NUMBER if own == TIME_UP else int(signal.Signals[own]) if own else 0

    def agree(self, number: int) -> None:
        """Stop on `number`, the highest that any rank had in a step; 0: go on."""
        if number:
            self._agreed = TIME_UP if number == TIME_UP_NUMBER else signal.Signals(number).name

    @property
    def exit_code(self) -> int:
        """0 without a signal."""
        name = self.requested
        return 128 + signal.Signals[name] if name not in (None, TIME_UP) else 0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked data worker inherits this handler: SIGTERM ends it, other signals let the current step finish.
            if number == signal.SIGTERM:
                _die(number)
            return
        now = time.monotonic()
        if number == signal.SIGINT and self._first_interrupt is not None:
            # A launcher forwards Ctrl-C to processes that have received it from the terminal already.
            if now - self._first_interrupt > SAME_PRESS_SECONDS:
                _die(number)
            return
        if number == signal.SIGINT:
            self._first_interrupt = now
        if self._received is None:
            self._received = signal.Signals(number).name
            # os.write, as the signal may have interrupted a print that holds the stream's lock.
            text = f"\n{self._received}: stopping after this step, then saving. Ctrl-C (again) stops at once.\n"
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, text.encode())


def _die(number: int) -> None:
    """End this process by the signal's default action, so that its parent sees the signal in the exit status."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
