"""Spikes of the loss or of the gradient's norm, and what a run does about them (`--on_spike`).

A value is a spike where it is far above the median of the last WINDOW steps, in robust standard deviations: 1.4826
median absolute deviations (MAD), which a few earlier spikes do not change. Norms are compared by their logarithms. What
has hardly varied has a deviation of nearly zero, so there is a least one. A value that is not finite is a spike too.

Both values of a step are known before its update, and are the same numbers on all ranks, which so decide alike.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtrain.comm.ranks import from_rank_0
from qtrain.core.errors import TrainingStopped, UserError
from qtrain.parallel.sharding.data_parallel import Gradients
from qtrain.train.settings.settings import TrainSettings
from qtrain.train.state.restore import rewind
from qtrain.train.state.run import Run

WINDOW, WARM_UP = 128, 32
"""Steps that a value is compared with, and the fewest before any is a spike."""
LEAST_LOSS_DEVIATION, LEAST_LOG_DEVIATION = 0.01, 0.1
"""Least deviation of the loss, as a fraction of its median, and of the norm's natural logarithm."""
MAX_SKIPS_IN_ROW, MAX_REWINDS = 10, 3
"""After as many batches skipped in a row, or returns to one checkpoint, the next spike stops the run: so does a change
of the data that stays, such as of their language."""

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its MAD."""


@dataclass(frozen=True)
class Spike:
    """A value far above those before it."""

    what: str
    """loss or gradient norm."""
    value: float
    median: float
    """Of the steps before."""
    score: float
    """How many robust standard deviations lie between them; infinite for a value that is not finite."""

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"the {self.what} is {self.value}"
        return (
            f"the {self.what} {self.value:.4g} is {self.score:.3g} deviations above {self.median:.4g}, the median of "
            "the steps before"
        )


class SpikeDetector:
    """Compares each step's loss and gradient norm with those of the steps before it."""

    def __init__(self, threshold: float, records: Iterable[Mapping[str, Any]] = ()):
        """records: of metrics.jsonl, of a run that is resumed."""
        self.threshold = threshold
        self._window: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        for record in records:
            loss, norm, spike = record.get("loss"), record.get("grad_norm"), record.get("spike") or {}
            # A spike was not in the window when it happened, so a resumed run leaves it out too.
            was_one = spike.get("step") == record["step"]
            if isinstance(loss, int | float) and isinstance(norm, int | float) and not was_one:
                self._add(record["step"], loss, norm)

    def check(self, step: int, loss: float, norm: float) -> Spike | None:
        """The spike in this step's values; without one they count in the window of the steps that follow."""
        found = self._spike(loss, norm)
        if found is None:
            self._add(step, loss, norm)
        return found

    def forget_after(self, step: int) -> None:
        """The run is back at `step`."""
        self._window = deque((row for row in self._window if row[0] <= step), maxlen=WINDOW)

    def _add(self, step: int, loss: float, norm: float) -> None:
        self._window.append((step, loss, _log(norm)))

    def _spike(self, loss: float, norm: float) -> Spike | None:
        for what, value in (("loss", loss), ("gradient norm", norm)):
            # Also in the warm-up: it needs no comparison.
            if not math.isfinite(value):
                return Spike(what, value, math.nan, math.inf)
        if len(self._window) < WARM_UP:
            return None
        _, losses, norms = zip(*self._window, strict=True)
        loss_median, loss_score = _score(loss, losses, lambda median: LEAST_LOSS_DEVIATION * abs(median))
        norm_median, norm_score = _score(_log(norm), norms, lambda _: LEAST_LOG_DEVIATION)
        spikes = [Spike("loss", loss, loss_median, loss_score)]
        # The median of logarithms, as a norm again.
        spikes.append(Spike("gradient norm", norm, math.exp(norm_median), norm_score))
        worst = max(spikes, key=lambda spike: spike.score)
        return worst if worst.score > self.threshold else None


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))  # a step without trained tokens has no gradient


def _score(value: float, window: Sequence[float], least: Callable[[float], float]) -> tuple[float, float]:
    """The window's median, and how many robust standard deviations `value` is above it."""
    median = statistics.median(window)
    deviation = NORMAL_MAD * statistics.median(abs(other - median) for other in window)
    # 1e-12: with a median of exactly 0 the least deviation is 0 too.
    return median, (value - median) / max(deviation, least(median), 1e-12)


class SpikeGuard:
    """What a run does about spikes; with --on_spike off nothing, and then `check` finds none.

    records: of metrics.jsonl, as far as rank 0 has read them."""

    def __init__(self, settings: TrainSettings, records: Iterable[Mapping[str, Any]]):
        self.action = settings.on_spike
        self._detector = None if self.action == "off" else SpikeDetector(settings.spike_threshold, records)
        self._skipped_in_row, self._rewinds = 0, Counter()
        self._untold: dict[str, Any] | None = None

    def check(self, step: int, gradients: Gradients) -> Spike | None:
        """The spike in the values of `step`, which has not been counted yet."""
        if self._detector is None:
            return None
        spike = self._detector.check(step, gradients.loss, gradients.norm)
        if spike is None:
            self._skipped_in_row = 0
        return spike

    def record(self) -> dict[str, Any]:
        """What the next record of metrics.jsonl says of a spike since the last one."""
        told, self._untold = self._untold, None
        return {} if told is None else {"spike": told}

    def skip(self, run: Run, spike: Spike) -> str | None:
        """Drop the gradients of a step before its update. Returns the line to log; None if too many were in a row."""
        self._skipped_in_row += 1
        if self._skipped_in_row > MAX_SKIPS_IN_ROW:
            return None
        drop_gradients(run)
        step = run.state.step + 1
        self._note(step, spike, "skip")
        return f"step {step}: --on_spike: {spike}; the batch is skipped"

    def rewind(self, run: Run, spike: Spike, path: Path) -> str | None:
        """Return to the checkpoint `path`, but not in the data. Returns the line to log; None if it was returned to too
        often. Raises TrainingStopped where it cannot be loaded."""
        # A checkpoint's folder is named after its step.
        step, drawn = run.state.step + 1, int(path.name)
        self._rewinds[drawn] += 1
        if self._rewinds[drawn] > MAX_REWINDS:
            return None
        drop_gradients(run)
        try:
            rewind(run, path)
        except UserError as error:
            raise TrainingStopped(f"step {step}: {spike}; --on_spike rewind cannot go back: {error}") from None
        # The steps after it are trained again, and would be in the window twice.
        assert self._detector is not None  # it found the spike
        self._detector.forget_after(run.state.step)
        self._note(step, spike, "rewind")
        back = f"back to step {run.state.step} ({path}), and on with the data after this batch"
        return f"step {step}: --on_spike: {spike}; {back}"

    def _note(self, step: int, spike: Spike, action: str) -> None:
        numbers = {key: value for key, value in asdict(spike).items() if key != "what"}
        self._untold = {"step": step, "action": action, "what": spike.what, **numbers}


def drop_gradients(run: Run) -> None:
    """Forget a step that has been computed but not applied: its gradients, and the absmax that delayed scaling saw."""
    run.optimizer.zero_grad(set_to_none=True)
    # Else the spike's absmax would be in the next delayed scales.
    run.quantized.discard_step()


def newest_checkpoint(run: Run) -> Path | None:
    """The run's newest checkpoint, as rank 0 sees it."""
    return from_rank_0(lambda: run.checkpoints.latest())


def stopped(step: int, spike: Spike, saved: Path | None, *, why: str = "", updated: bool = False) -> TrainingStopped:
    """The error that ends a run at a spike. saved: the checkpoint to resume from; why: why it is not skipped or
    rewound; updated: the weights have been updated with it (--optimizer_in_backward)."""
    state = (
        "The weights have been updated with it, and are not saved." if updated else "The weights are those before it."
    )
    resume = f"Resume with --resume {saved}" if saved else "There is no checkpoint; start again"
    return TrainingStopped(
        f"step {step}: {spike}.{f' {why}.' if why else ''} {state} {resume} and a lower --lr, a smaller "
        "--clip_grad_norm, a higher --spike_threshold, or --on_spike skip, which passes over such batches."
    )
