"""The optimizers' registry, and which parameters are decayed."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from qtrain.registry import Registry


class OptimizerSpec(ABC):
    """A choice of `--optim`; its fields are the keys of `--optim_kwargs`."""

    @abstractmethod
    def state_bytes(self, weight_bytes: int) -> float:
        """Bytes of optimizer state per parameter, for weights of `weight_bytes` each."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """The optimizer over torch parameter groups."""


OPTIMIZERS: Registry[OptimizerSpec] = Registry("optimizer")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices are decayed, norms and biases (one dimension) are not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
