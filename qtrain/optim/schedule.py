"""Learning rate as a pure function of the step: warm-up, constant, decay, each a fraction of the run.

warmup 0.02, decay 0.2 is WSD (Hu et al. 2024, arXiv:2404.06395); warmup 0.02, decay 0.98, decay_type cosine is the
cosine schedule; decay 0 is constant. The last step of the warm-up runs at the peak, the last step of the run at the
final rate: both ends are reached, whatever the rounding.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from qtrain.checks import Range, check_fields
from qtrain.errors import UserError


@dataclass(frozen=True)
class LRSchedule:
    """The keys of `--lr_schedule_kwargs`."""

    warmup: Annotated[float, Range(0, 1)] = 0.02
    """Share of the steps over which the rate rises linearly to its peak."""
    decay: Annotated[float, Range(0, 1)] = 0.2
    """Share of the steps, at the end, over which the rate falls to its final value."""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """Shape of the fall: linear, half a cosine, or 1 - sqrt(progress)."""
    final: Annotated[float, Range(0, 1)] = 0.0
    """The last step's rate, as a share of the peak."""

    def factor(self, step: int, n_steps: int) -> float:
        """What the peak rate is multiplied with at `step` (counted from 0) of `n_steps`."""
        warmup, decay = round(self.warmup * n_steps), round(self.decay * n_steps)
        warmup = min(warmup, n_steps - decay)
        if step < warmup:
            return (step + 1) / warmup
        if step < n_steps - decay:
            return 1.0
        progress = min((step - (n_steps - decay) + 1) / decay, 1.0)
        left = {
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "sqrt": 1 - math.sqrt(progress),
        }[self.decay_type]
        return self.final + (1 - self.final) * left


def make_schedule(options: dict[str, Any] | None, flag: str = "--lr_schedule_kwargs") -> LRSchedule:
    """A checked schedule from the flag's JSON."""
    schedule = LRSchedule(**check_fields(LRSchedule, options or {}, flag))
    if schedule.warmup + schedule.decay > 1:
        raise UserError(
            f"{flag}: warmup {schedule.warmup:g} + decay {schedule.decay:g} is more than the whole run; "
            "their sum may be at most 1."
        )
    return schedule
