"""SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C stop a run after its current step, so that it can save.

Such a run exits with 128 + the signal's number, as a shell reports a process that the signal ended: `train && next`
does not go on without a finished model.
"""

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
"""Those that the platform has: Windows lacks SIGHUP and SIGUSR1."""
SAME_PRESS_SECONDS = 0.5


class StopSignals:
    """Inside, a stop signal only sets `requested` (its name), which the training loop checks after each step.

        with StopSignals() as stop:
            for step in ...:
                train(step)
                if stop.requested:
                    save(); break

    Schedulers send SIGUSR1 before a preemption, a terminal that closes SIGHUP, unless nohup has it ignored. A second
    Ctrl-C ends the process at once. To be entered in the main thread; on exit the previous handlers are restored.
    collective: stop only on what all ranks `agree` on.
    """

    def __init__(self, *, collective: bool = False) -> None:
        self._collective = collective
        self._received: str | None = None
        self._agreed: str | None = None
        self._pid = os.getpid()
        self._first_interrupt: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        hang_up = getattr(signal, "SIGHUP", None)
        # nohup has SIGHUP ignored: it stays so.
        for number in STOP_SIGNALS:
            if number != hang_up or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def requested(self) -> str | None:
        """The name of the signal to stop on."""
        return self._agreed if self._collective else self._received

    @property
    def number(self) -> int:
        """The number of the signal that this process has received; 0 without one."""
        return int(signal.Signals[self._received]) if self._received else 0

    def agree(self, number: int) -> None:
        """Stop on the signal `number`, the highest that any rank had received in a step; 0: go on."""
        if number:
            self._agreed = signal.Signals(number).name

    @property
    def exit_code(self) -> int:
        """0 without a signal."""
        return 128 + signal.Signals[self.requested] if self.requested else 0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(number)
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

    def _handle_in_child(self, number: int) -> None:
        """A forked data worker inherits this handler: SIGTERM ends it, other signals let the current step finish."""
        if number == signal.SIGTERM:
            _die(number)


def _die(number: int) -> None:
    """End this process by the signal's default action, so that its parent sees the signal in the exit status."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
