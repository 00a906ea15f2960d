"""Optimizers and learning-rate schedules. Importing this package registers every optimizer."""

from qtrain.optim import adamw  # noqa: F401  (registers itself)
from qtrain.optim.optimizer import OPTIMIZERS, OptimizerSpec, parameter_groups
from qtrain.optim.schedule import LRSchedule, make_schedule

__all__ = ["OPTIMIZERS", "LRSchedule", "OptimizerSpec", "make_schedule", "parameter_groups"]
