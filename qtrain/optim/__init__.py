"""Optimizers and learning-rate schedules. Importing this package registers every optimizer."""

from qtrain.optim import adamw, apollo, galore, lion, muon, schedule_free, sgd  # noqa: F401  (they register themselves)
from qtrain.optim.optimizer import OPTIMIZERS, OptimizerSpec, ParameterShape, parameter_groups
from qtrain.optim.partitioned_optimizer import PartitionedOptimizer
from qtrain.optim.schedule import LRSchedule, make_schedule

__all__ = [
    "OPTIMIZERS",
    "LRSchedule",
    "OptimizerSpec",
    "ParameterShape",
    "PartitionedOptimizer",
    "make_schedule",
    "parameter_groups",
]
