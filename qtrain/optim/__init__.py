"""Optimizers and learning-rate schedules. Importing this package registers every optimizer and library."""

# Imported to register themselves.
from qtrain.optim import adamw, apollo, galore, library, lion, muon, schedule_free, sgd  # noqa: F401
from qtrain.optim.optimizer import Optimizer, adapted
from qtrain.optim.parameter_groups import parameter_groups
from qtrain.optim.partitioned_optimizer import PartitionedOptimizer
from qtrain.optim.registry import OPTIMIZERS, OptimizerSpec, ParameterShape
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
