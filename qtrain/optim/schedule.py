"""Learning rate as a pure function of the step: warm-up, constant, decay, each a fraction of the run.

warmup 0.02, decay 0.2 is WSD (Hu et al. 2024, arXiv:2404.06395); warmup 0.02, decay 0.98, decay_type cosine is the
cosine schedule; decay 0 is constant. The last warm-up step runs at exactly the peak and the last step of the run at
exactly the final rate.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from qtrain.core.checks import Range, check_fields
from qtrain.core.errors import UserError


@dataclass(frozen=True)
class LRSchedule:
    """The keys of `--lr_schedule_kwargs`."""

    warmup: Annotated[float, Range(0, 1)] = 0.02
    """fraction of the steps over which the learning rate rises linearly to its peak"""
    decay: Annotated[float, Range(0, 1)] = 0.2
    """fraction of the steps, at the end, over which it falls to its final value"""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """shape of the decay: linear, half a cosine, or 1 - sqrt(progress)"""
    final: Annotated[float, Range(0, 1)] = 0.0
    """learning rate of the last step as a fraction of the peak"""

    def factor(self, step: int, n_steps: int) -> float:
        """The learning rate at `step` (counted from 0) of `n_steps`, as a multiple of the peak."""
        warmup, decay = round(self.warmup * n_steps), round(self.decay * n_steps)
        warmup = min(warmup, n_steps - decay)  # both were rounded: together they may be a step too long
        if step < warmup:
            return (step + 1) / warmup
        if step < n_steps - decay:
            return 1.0
        # + 1: the last step, n_steps - 1, is at progress 1, exactly the final rate.
        progress = min((step - (n_steps - decay) + 1) / decay, 1.0)
        remaining = {
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "sqrt": 1 - math.sqrt(progress),
        }[self.decay_type]
        return self.final + (1 - self.final) * remaining


def make_schedule(options: dict[str, Any] | None, flag: str = "--lr_schedule_kwargs") -> LRSchedule:
    """The schedule that the flag's JSON describes. UserError naming `flag` for options that are not allowed."""
    schedule = LRSchedule(**check_fields(LRSchedule, options or {}, flag))
    if schedule.warmup + schedule.decay > 1:
        raise UserError(
            f"{flag}: warmup {schedule.warmup:g} + decay {schedule.decay:g} is more than the whole run; "
            "their sum may be at most 1."
        )
    return schedule
