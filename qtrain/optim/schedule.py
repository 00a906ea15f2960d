"""Learning rate as a pure function of the step: warm-up, stable, decay.

warmup 0.02, decay 0.2 is WSD (warmup-stable-decay, Hu et al. 2024, arXiv:2404.06395); warmup 0.02, decay 0.98,
decay_type cosine is the cosine schedule; decay 0 is constant; stable inverse_sqrt, decay 0 is the inverse square root
(Vaswani et al. 2017), and with a decay that of Zhai et al. 2021 (arXiv:2106.04560). The last warm-up step runs at
exactly the peak and the last step of the run, where it decays, at exactly the final rate.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from qtrain.core.checks import Range, check_fields, shown
from qtrain.core.errors import UserError


@dataclass(frozen=True)
class LRSchedule:
    """The keys of `--lr_schedule_kwargs`."""

    warmup: Annotated[float, Range(0)] = 0.02
    """over which the learning rate rises linearly to its peak: a fraction of the steps (1: all of them), or above 1
    a number of steps"""
    decay: Annotated[float, Range(0)] = 0.2
    """over which, at the end, it falls to its final value; a fraction or a number of steps like warmup"""
    decay_type: Literal["linear", "cosine", "sqrt"] = "linear"
    """shape of the decay: linear, half a cosine, or 1 - sqrt(progress)"""
    final: Annotated[float, Range(0, 1)] = 0.0
    """learning rate of the last step as a fraction of the peak"""
    stable: Literal["constant", "inverse_sqrt"] = "constant"
    """between warm-up and decay: constant, or the peak x sqrt(warm-up steps / step)"""

    def factor(self, step: int, n_steps: int) -> float:
        """The learning rate at `step` (counted from 0) of `n_steps`, as a multiple of the peak."""
        warmup, decay = _steps(self.warmup, n_steps), _steps(self.decay, n_steps)
        warmup = min(warmup, n_steps - decay)  # both were rounded: together they may be a step too long
        if step < warmup:
            return (step + 1) / warmup
        stable = self._stable(min(step, n_steps - decay - 1), warmup)
        if step < n_steps - decay:
            return stable
        # + 1: the last step, n_steps - 1, is at progress 1, exactly the final rate.
        progress = min((step - (n_steps - decay) + 1) / decay, 1.0)
        remaining = {
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "sqrt": 1 - math.sqrt(progress),
        }[self.decay_type]
        return self.final + (stable - self.final) * remaining

    def _stable(self, step: int, warmup: int) -> float:
        """The factor after the warm-up; never below the final one."""
        if self.stable == "constant" or step < warmup:
            return 1.0
        return max(math.sqrt(max(warmup, 1) / (step + 1)), self.final)

    def check(self, n_steps: int, flag: str = "--lr_schedule_kwargs") -> None:
        """UserError for a warm-up and a decay that are longer than a run of `n_steps`."""
        warmup, decay = _steps(self.warmup, n_steps), _steps(self.decay, n_steps)
        if max(self.warmup, self.decay) > 1 and warmup + decay > n_steps:
            raise UserError(
                f"{flag}: warmup and decay are {warmup:,} + {decay:,} steps of a run of {n_steps:,}; give fewer, or "
                "more --n_steps."
            )


def _steps(given: float, n_steps: int) -> int:
    """The steps of a fraction of the run, or of a number above 1, which is one of steps."""
    return round(given * n_steps) if given <= 1 else int(given)


def make_schedule(options: dict[str, Any] | None, flag: str = "--lr_schedule_kwargs") -> LRSchedule:
    """The schedule that the flag's JSON describes. UserError naming `flag` for options that are not allowed."""
    schedule = LRSchedule(**check_fields(LRSchedule, options or {}, flag))
    for name in ("warmup", "decay"):
        value = getattr(schedule, name)
        if value > 1 and not value.is_integer():
            raise UserError(
                f"{flag}.{name}: {shown(value)} is neither a fraction of the steps, at most 1, nor a whole number of "
                "steps."
            )
    if schedule.warmup <= 1 and schedule.decay <= 1 and schedule.warmup + schedule.decay > 1:
        raise UserError(
            f"{flag}: warmup {schedule.warmup:g} + decay {schedule.decay:g} is more than the whole run; "
            "their sum may be at most 1."
        )
    if schedule.stable == "inverse_sqrt" and not schedule.warmup:
        raise UserError(f'{flag}.stable: inverse_sqrt counts in steps of the warm-up; give a "warmup" above 0.')
    return schedule
