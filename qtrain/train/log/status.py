"""Progress output: a status that redraws in place in a terminal, plain lines elsewhere; everything goes to train.log.

No output fails a run: text that the console's encoding lacks is escaped, and a console that is gone gets nothing more.
"""

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

FILE_ONLY = {"file_only": True}
"""Pass as `extra` to write to train.log only."""


class TolerantStream:
    """A text stream whose `write` and `flush` never raise."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # Characters that the encoding lacks are escaped rather than refused.
        self._attempt(lambda: self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding)))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError):  # a closed terminal or pipe; a closed stream
            with contextlib.suppress(OSError, ValueError):  # what is buffered must not fail at exit either
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def safe_console() -> Console:
    """A console on stdout that never raises."""
    stream: Any = TolerantStream(sys.stdout)
    return Console(file=stream)


class _LogFile(logging.FileHandler):
    """train.log. A full disk or a deleted folder costs lines, not the run, and prints no traceback."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _ConsoleHandler(logging.Handler):
    """Prints through rich's console, above the live line."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        # soft_wrap: a pipe has no width to wrap at; Text: brackets in messages are not markup
        self._console.print(Text(text), soft_wrap=True)


def setup_log(run_dir: Path | None, console: Console | None = None, rank: int = 0) -> logging.Logger:
    """The logger "qtrain": writes to the console and, with a run folder, appends to its train.log.

    Calling it again replaces the handlers. Ranks other than 0 show only warnings, and write train.rank<N>.log.
    """
    logger = logging.getLogger("qtrain")
    # Called again when the run folder is known, and when it has moved.
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    shown = _ConsoleHandler(console or safe_console())
    logger.addHandler(shown)
    logger.setLevel(logging.INFO)
    if rank != 0:
        shown.setLevel(logging.WARNING)
        shown.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    if run_dir is not None:
        file = _LogFile(Path(run_dir) / (f"train.rank{rank}.log" if rank else "train.log"))
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)
    return logger


def short_number(value: float) -> str:
    """Three significant digits and a suffix: 1.23M for 1234567."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def three_digits(value: float) -> str:
    """Three significant digits, or all digits before the point; integers as they are."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value) or value == 0:
        return str(value)
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def epochs(number: float) -> str:
    """Passes over the data: 2.5 epochs, 0.02% of an epoch."""
    return f"{number:.3g} epochs" if number >= 0.01 else f"{100 * number:.2g}% of an epoch"


def duration(seconds: float) -> str:
    """A duration in its two largest units: 1h 02m, 3m 05s, 12s, 0.25s."""
    if 0 < seconds < 1:
        return f"{seconds:.2f}s" if seconds >= 0.01 else "under 0.01s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {whole % 60:02}s" if minutes else f"{whole}s"


def _folded(parts: list[str], width: int) -> str:
    """The parts in as few lines as hold them, since a terminal of 80 columns would lose the end of one line."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} | {part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


ETA_SECONDS = 120.0
"""The ETA is that of the mean speed of this many last seconds of training: one slow step changes it little."""


class StatusLine:
    """A context that shows progress: redrawn in place in a terminal, else a plain line every `interval_s` seconds.

    total: the last step. In a terminal the plain lines go to train.log only.
    """

    def __init__(
        self,
        total: int,
        logger: logging.Logger,
        console: Console | None = None,
        interval_s: float = 10.0,
        unit: str = "tok/s",
    ):
        self._total = total
        self._logger = logger
        self._interval = interval_s
        self._unit = unit
        self._written_at: float | None = None
        self._not_logged = ""
        self._last_step = 0
        self._window: deque[tuple[int, float]] = deque()
        """Steps and their seconds between updates, the newest last."""
        console = console or console_of(logger)
        self._live = (
            Live(Text(""), console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> "StatusLine":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
        if self._not_logged:
            self._logger.info("%s", self._not_logged)

    def _mean_step_s(self, step: int, step_s: float) -> float:
        """Seconds per step over the window that ends with the steps since the last update."""
        steps = max(step - self._last_step, 1)
        self._window.append((steps, steps * step_s))
        # At least the newest entry stays, however long it took.
        while sum(seconds for _, seconds in self._window) - self._window[0][1] > ETA_SECONDS:
            self._window.popleft()
        return sum(seconds for _, seconds in self._window) / sum(steps for steps, _ in self._window)

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        tok_s: float | None = None,
        sol: float | None = None,
        memory: int | None = None,
        power: float | None = None,
        step_s: float | None = None,
    ) -> None:
        """Show `step`; values that are None are omitted.

        tok_s: in the run's unit; sol: a fraction; memory: bytes; power: watts of the GPU;
        step_s: seconds per step."""
        parts = [f"step {step:,}/{self._total:,} {100 * step / max(self._total, 1):.1f}%"]
        parts += [f"loss {loss:.4f}"] if loss is not None else []
        parts += [f"norm {grad_norm:.3g}"] if grad_norm is not None else []
        parts += [f"{short_number(tok_s)} {self._unit}"] if tok_s is not None else []
        parts += [f"{three_digits(1000 * step_s)} ms"] if step_s is not None else []
        parts += [f"sol {100 * sol:.1f}%"] if sol is not None else []
        parts += [f"{memory / 1024**3:.1f} GiB"] if memory is not None else []
        parts += [f"{power:,.0f} W"] if power is not None else []
        parts += (
            [f"ETA {duration((self._total - step) * self._mean_step_s(step, step_s))}"] if step_s is not None else []
        )
        self._last_step = step
        line = " | ".join(parts)
        if self._live:
            self._live.update(Text(_folded(parts, self._live.console.width), no_wrap=True, overflow="ellipsis"))
        now = time.monotonic()
        due = self._written_at is None or now - self._written_at >= self._interval
        if due:
            self._written_at = now
            self._logger.info("%s", line, extra=FILE_ONLY if self._live else None)
        self._not_logged = "" if due and not self._live else line


def console_of(logger: logging.Logger) -> Console:
    """The console of the logger, which the live line must share: two consoles would overwrite each other."""
    for handler in logger.handlers:
        if isinstance(handler, _ConsoleHandler):
            return handler._console
    return safe_console()
