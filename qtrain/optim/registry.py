"""The optimizers by name: this project's, and other libraries' under a prefix such as `torch.`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qtrain.core.registry import Registry
from qtrain.optim.optimizer import Optimizer


@dataclass(frozen=True)
class ParameterShape:
    """`count` parameters of one shape. hidden, parts: as in `parameter_groups`. stored: in low bits."""

    shape: tuple[int, ...]
    count: int = 1
    hidden: bool = False
    parts: tuple[int, ...] = ()
    stored: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count


class OptimizerSpec(ABC):
    """A choice of `--optim`; its fields are the keys of `--optim_kwargs`."""

    @abstractmethod
    def state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        """Bytes of device memory that the states of a whole model take, for weights of `weight_bytes` each."""

    def step_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int, *, partitioned: bool) -> float:
        """Bytes of temporaries at the largest moment of a step, for gradients of `weight_bytes` each. partitioned: each
        layer is updated by itself. A fused update has none."""
        return 0.0

    def for_device(self, device: torch.device) -> tuple["OptimizerSpec", str | None]:
        """The spec that takes effect on `device`, and a note for the user where that is not this one."""
        return self, None

    def needs_whole(self, hidden: bool) -> bool:
        """Whether the optimizer needs all elements of a parameter on one rank, or only rows of it. hidden: whether it
        is a matrix of a hidden layer."""
        return True

    def takes_parts(self, hidden: bool) -> bool:
        """Whether ranks can have some of the projections fused in a parameter each, as if one had all of them."""
        return not self.needs_whole(hidden)

    def refuses_partitions(self) -> str | None:
        """Why the optimizer cannot update a partitioned model (`PartitionedOptimizer`), and the fix; None: it can."""
        return None

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> Optimizer:
        """The optimizer over torch parameter groups. seed: of stochastic rounding and random projections."""


class Library(Protocol):
    """Another package's optimizers, named `<prefix>.<class>`."""

    def make(self, name: str, options: Mapping[str, Any], flag: str) -> OptimizerSpec: ...

    def describe(self) -> str: ...


class OptimizerRegistry(Registry[OptimizerSpec]):
    """This project's optimizers by name; `make` also takes `<prefix>.<class>` of the registered libraries."""

    def __init__(self) -> None:
        super().__init__("optimizer")
        self.libraries: dict[str, Library] = {}

    def make(self, name: str, options: Mapping[str, Any], flag: str) -> OptimizerSpec:
        prefix, dot, _ = name.partition(".")
        if dot and prefix in self.libraries:
            return self.libraries[prefix].make(name, options, flag)
        return super().make(name, options, flag)

    def describe_libraries(self) -> list[tuple[str, str]]:
        """(`<prefix>.*`, which names there are or how to get them) of every library."""
        return [(f"{prefix}.*", library.describe()) for prefix, library in self.libraries.items()]


OPTIMIZERS = OptimizerRegistry()
