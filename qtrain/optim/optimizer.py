"""The optimizers' registry, and which parameters are decayed."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qtrain.optim.hidden_matrices import hidden_matrices
from qtrain.registry import Registry


@dataclass(frozen=True)
class ParameterShape:
    """`count` parameters of one shape. hidden, parts: as in `parameter_groups`."""

    shape: tuple[int, ...]
    count: int = 1
    hidden: bool = False
    parts: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count


class OptimizerSpec(ABC):
    """A choice of `--optim`; its fields are the keys of `--optim_kwargs`."""

    @abstractmethod
    def state_bytes(self, weight_bytes: int) -> float:
        """Bytes of optimizer state per parameter, for weights of `weight_bytes` each."""

    def total_state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        """Bytes on the device that the optimizer's states of a whole model take."""
        return self.state_bytes(weight_bytes) * sum(shape.elements for shape in shapes)

    def refuses_parts(self) -> str | None:
        """Why its optimizer cannot update a model part by part (`PartitionedOptimizer`), and the fix; None: it can."""
        if getattr(self, "offload", False):
            return "states on the host are moved for the whole model at once; leave offload out of --optim_kwargs."
        return None

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> torch.optim.Optimizer:
        """The optimizer over torch parameter groups. seed: of its stochastic rounding, where it rounds so."""


class OptimizerRegistry(Registry[OptimizerSpec]):
    """This project's optimizers by name; `make` also takes `torch.NAME`, `bnb.NAME` and `torchao.NAME`."""

    def make(self, name: str, options: Mapping[str, Any], flag: str) -> OptimizerSpec:
        from qtrain.optim.library import LIBRARIES, library_optimizer

        if name.partition(".")[0] in LIBRARIES and "." in name:
            return library_optimizer(name, options, flag)
        return super().make(name, options, flag)


OPTIMIZERS = OptimizerRegistry("optimizer")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in groups: matrices are decayed, norms and biases (one dimension) are not.

    `hidden` marks groups of matrices of hidden layers, and `parts` the rows of the projections that are fused in each
    (empty: one); other groups hold embeddings, the output head, and whatever is no matrix.
    """
    hidden = hidden_matrices(model)
    groups: dict[tuple[float, bool, tuple[int, ...]], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            kind = (weight_decay if p.ndim >= 2 else 0.0, id(p) in hidden, hidden.get(id(p), ()))
            groups.setdefault(kind, []).append(p)
    return [
        {"params": params, "weight_decay": decay, "hidden": is_hidden, "parts": parts}
        for (decay, is_hidden, parts), params in groups.items()
    ]
