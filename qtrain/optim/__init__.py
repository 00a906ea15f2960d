"""Optimizers and learning-rate schedules. Importing this package registers every optimizer and library."""

# Imported to register themselves.
from qtrain.optim import adamw, apollo, galore, library, momentum, muon, schedule_free  # noqa: F401
from qtrain.optim.optimizer import Optimizer, PartitionedOptimizer, adapted
from qtrain.optim.registry import OPTIMIZERS, OptimizerSpec, ParameterShape, parameter_groups
from qtrain.optim.schedule import LRSchedule, make_schedule

__all__ = [
    "OPTIMIZERS",
    "LRSchedule",
    "Optimizer",
    "OptimizerSpec",
    "ParameterShape",
    "PartitionedOptimizer",
    "adapted",
    "make_schedule",
    "parameter_groups",
]
