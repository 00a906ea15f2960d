"""metrics.jsonl, and the throughput: tokens or images per second without compile, evaluation and checkpoint time."""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from qtrain.core.hardware.rates import synchronized_time
from qtrain.train.log.energy import EnergyMeter
from qtrain.train.log.jsonl import read_records, record_of
from qtrain.train.log.step_clock import StepClock

log = logging.getLogger("qtrain")

# ---- the log --------------------------------------------------------------------------------------------------------


def _finite(value: Any) -> Any:
    """None for NaN and Inf, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in order, without a line truncated by a kill; none of a file that is missing or
    cannot be read."""
    return read_records(Path(path))[0]


class MetricsLog:
    """Appends one JSON object per line to `path`, each written at once. Every record has a `step`.

    Lines that cannot be written, as on a full disk, are kept and written with the next ones; `unwritten` counts them.

    On resuming after `resumed_step`, lines of later steps and a line truncated by a kill are removed: the log of a
    resumed run equals that of an uninterrupted one, if a step's records are written before its checkpoint.
    """

    def __init__(self, path: Path, resumed_step: int | None = None):
        self.path = Path(path)
        if resumed_step is not None and self.path.is_file():
            # Steps after the checkpoint are trained again, and logged again.
            self._truncate(resumed_step)
        self._file = self.path.open("ab+", buffering=0)
        self._pending = b""

    def _truncate(self, last_step: int) -> None:
        with self.path.open("rb") as file:
            # A copy that replaces the log at once: a kill in between loses nothing.
            kept = [line for line in file if (record := record_of(line)) and record["step"] <= last_step]
        shorter = self.path.with_name(f".{self.path.name}.tmp")
        with shorter.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(shorter, self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record of numbers, strings, flat lists and objects of these. NaN and Inf become null."""
        assert isinstance(record.get("step"), int), "a record without a step could not be removed on resume"
        line = json.dumps({key: _finite(value) for key, value in record.items()}) + "\n"
        self._append(line.encode())

    def _append(self, data: bytes) -> None:
        # One write of whole lines: a kill leaves at most the last one truncated.
        first, self._pending = not self._pending, self._pending + data
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            if first:
                log.warning("%s cannot be written (%s); its lines are kept until it can", self.path, error.strerror)

    @property
    def unwritten(self) -> int:
        """Lines that could not be written yet."""
        return self._pending.count(b"\n")

    def move(self, path: Path) -> None:
        """Continue in the new file `path`, which begins with the lines so far, also where the file is deleted."""
        lines = b""
        with contextlib.suppress(OSError):  # a network file system may not give a deleted file's content
            self._file.seek(0)
            lines = self._file.read()
            self._file.close()
        self.path = Path(path)
        self._file = self.path.open("ab+", buffering=0)
        lines, self._pending = lines + self._pending, b""
        self._append(lines)

    def close(self) -> None:
        self._append(b"")
        if self.unwritten:
            log.warning("%d lines of %s are lost: they could not be written", self.unwritten, self.path)
        with contextlib.suppress(OSError):
            self._file.close()


# ---- speed ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """Speed over some steps: tokens per second, seconds per step, fraction of the time spent waiting for data."""

    tok_s: float
    step_s: float
    data_wait: float
    ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds per step by kind of work (`StepClock`), and those spent waiting for data."""
    power: float | None = None
    """Mean watts of this rank's device while it trained; None without an energy counter."""
    joules_token: float | None = None
    """Its joules over the tokens of all ranks."""


@dataclass
class _Sums:
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    data_wait: float = 0.0

    def rate(self) -> Rate | None:
        if not self.steps or self.seconds <= 0:
            return None
        return Rate(self.tokens / self.seconds, self.seconds / self.steps, min(self.data_wait / self.seconds, 1.0))


class Throughput:
    """Tokens over the time spent training.

    The first `skip_steps` steps (compilation, first allocations) and everything inside `pause()` (evaluation,
    checkpoints, samples) do not count. A GPU is synchronized where counted time begins or ends, so that queued work
    counts on the right side; neither `step` nor `read` synchronizes. joules: reads the device's energy counter.
    """

    def __init__(self, device: torch.device, skip_steps: int = 2, joules: Callable[[], float | None] = lambda: None):
        self._device = device
        self._to_skip = skip_steps
        self._since = time.perf_counter()
        self._window = _Sums()
        self._energy = EnergyMeter(joules)
        if not skip_steps:
            self._energy.begin()
        self.clock = StepClock(device)

    def skip(self, steps: int) -> None:
        """Do not count the next steps either: what they run is compiled anew."""
        self._count_time()
        if not self._to_skip:
            self._energy.end()
        self._to_skip = max(self._to_skip, steps)

    def _count_time(self, now: float | None = None) -> None:
        now = synchronized_time(self._device) if now is None else now
        if not self._to_skip:
            self._window.seconds += now - self._since
            self._energy.count(seconds=now - self._since)
        self._since = now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside does not count as training."""
        self._count_time()
        counts = not self._to_skip
        if counts:
            self._energy.end()
        try:
            yield
        finally:
            self._since = synchronized_time(self._device)
            if counts:
                self._energy.begin()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside is spent waiting for data: it counts as training time, and into `data_wait`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if not self._to_skip:
                self._window.data_wait += time.perf_counter() - begin

    def step(self, tokens: int) -> None:
        """An optimizer step over `tokens` tokens (of all ranks) has been issued."""
        self.clock.end(counts=not self._to_skip)
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._since = synchronized_time(self._device)
                self._energy.begin()
            return
        self._window.tokens += tokens
        self._energy.count(tokens=tokens)
        self._window.steps += 1

    def read(self) -> Rate | None:
        """Speed since the last `read`; None if no step has been counted since."""
        # The host has waited for the gradients of the last step, whose update the device may still be at: in every
        # step alike. A pause, which ends the count, waits for that too.
        self._count_time(time.perf_counter())
        window, self._window = self._window, _Sums()
        ms, rate = self.clock.read(), window.rate()
        if rate is None:
            return None
        self._energy.update()
        ms = {"data": 1000 * rate.data_wait * rate.step_s, **ms} if ms else {}
        return replace(rate, ms=ms, power=self._energy.watts, joules_token=self._energy.joules_token)


@dataclass(frozen=True)
class SampleUnit:
    """What a run counts: tokens or images."""

    one: str
    """Words for one of them."""
    many: str
    """The word for several, and the key of the total in metrics.jsonl."""
    rate: str
    """The key of the speed in metrics.jsonl."""
    per_second: str
    """The unit of the speed."""
    batch: str
    """What a batch consists of."""


TOKENS = SampleUnit("a token", "tokens", "tok_s", "tok/s", "sequences")
IMAGES = SampleUnit("an image", "images", "img_s", "img/s", "images")
