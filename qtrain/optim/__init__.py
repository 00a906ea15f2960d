"""Optimizers and learning-rate schedules. Importing this package registers every optimizer and library."""

# Imported to register themselves.
from qtrain.optim import adamw, apollo, galore, library, momentum, muon, schedule_free  # noqa: F401
from qtrain.optim.optimizer import Optimizer, PartitionedOptimizer, adapted
from qtrain.optim.plain import optimizer_function
from qtrain.optim.registry import OPTIMIZERS, OptimizerSpec, ParameterShape, parameter_groups
from qtrain.optim.schedule import LRSchedule, make_schedule

# Those of a training loop of one's own (`plain.py`).
AdamW = optimizer_function("adamw", "AdamW")
AdamW4bit = optimizer_function("adamw_4bit", "AdamW4bit")
AdamW8bit = optimizer_function("adamw_8bit", "AdamW8bit")
AdamWBf16SR = optimizer_function("adamw_bf16_sr", "AdamWBf16SR")
AdamWFp8 = optimizer_function("adamw_fp8", "AdamWFp8")
AdamWScheduleFree = optimizer_function("adamw_schedule_free", "AdamWScheduleFree")
ApolloMini = optimizer_function("apollo_mini", "ApolloMini")
GaLoreAdamW = optimizer_function("galore_adamw", "GaLoreAdamW")
Lion = optimizer_function("lion", "Lion")
Muon = optimizer_function("muon", "Muon")
QGaLoreAdamW = optimizer_function("q_galore_adamw", "QGaLoreAdamW")
SGD = optimizer_function("sgd", "SGD")

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWBf16SR",
    "AdamWFp8",
    "AdamWScheduleFree",
    "ApolloMini",
    "GaLoreAdamW",
    "LRSchedule",
    "Lion",
    "Muon",
    "Optimizer",
    "OptimizerSpec",
    "ParameterShape",
    "PartitionedOptimizer",
    "QGaLoreAdamW",
    "adapted",
    "make_schedule",
    "parameter_groups",
]
