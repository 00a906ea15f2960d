"""Mean power and joules per token while training, from the device's energy counter.

Reading the counter takes 5 ms of the host on an H100, where it moves ten times a second. So it is read where training
pauses and goes on, and otherwise only once in ENERGY_SECONDS.
"""

import math
from collections.abc import Callable

ENERGY_SECONDS = 5.0
"""Training time over which power is averaged, at least."""


class EnergyMeter:
    """counter: joules since some moment; None where the device has no counter."""

    def __init__(self, counter: Callable[[], float | None] = lambda: None):
        self._counter = counter
        # NaN propagates: energy from an unknown start is not reported.
        self._since = math.nan
        self._joules, self._seconds, self._tokens = 0.0, 0.0, 0
        self.watts: float | None = None
        """Mean of the last time that was averaged."""
        self.joules_token: float | None = None
        """Of this device alone, over the tokens of all ranks."""

    def begin(self) -> None:
        """Training goes on."""
        self._since = self._read()

    def end(self) -> None:
        """Training pauses."""
        now = self._read()
        self._joules += now - self._since
        self._since = now

    def count(self, seconds: float = 0.0, tokens: int = 0) -> None:
        """So much training has been done."""
        self._seconds += seconds
        self._tokens += tokens

    def update(self) -> None:
        """New means, if they are due."""
        if self._seconds < ENERGY_SECONDS or not self._tokens:
            return
        # Closes the current span, and begins the next one at the same reading.
        self.end()
        known = math.isfinite(self._joules)
        self.watts = self._joules / self._seconds if known else None
        self.joules_token = self._joules / self._tokens if known else None
        self._joules, self._seconds, self._tokens = 0.0, 0.0, 0

    def _read(self) -> float:
        joules = self._counter()
        return math.nan if joules is None else joules
