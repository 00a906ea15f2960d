"""What an optimizer is chosen by and built from: specs by name, and a model's parameters in groups.

Other libraries' optimizers have names under a prefix such as `torch.`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import nn

from qtrain.core.registry import Registry
from qtrain.optim.optimizer import Optimizer


@dataclass(frozen=True)
class ParameterShape:
    """`count` parameters of one shape. hidden, parts: as in `parameter_groups`. experts: stacked matrices of experts.
    stored: in low bits. on_host: in host memory, as their gradients."""

    shape: tuple[int, ...]
    count: int = 1
    hidden: bool = False
    parts: tuple[int, ...] = ()
    experts: bool = False
    stored: bool = False
    on_host: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count


class OptimizerSpec(ABC):
    """A choice of `--optim`; its fields are the keys of `--optim_kwargs`."""

    streams_weights: ClassVar[bool] = False
    """Whether it can update weights that are in host memory."""

    @abstractmethod
    def state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        """Bytes of device memory that the states of a whole model take, for weights of `weight_bytes` each."""

    @property
    def host_names(self) -> tuple[str, ...]:
        """What this optimizer can keep in host memory, by the names of --offload."""
        return ()

    @property
    def offloaded(self) -> frozenset[str]:
        """Those of its `host_names` that are in host memory."""
        return frozenset()

    def with_offload(self, names: Collection[str]) -> "OptimizerSpec":
        """The spec with these of its `host_names`, and no others, in host memory."""
        return self

    def host_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> Mapping[str, float]:
        """Bytes of host memory, pinned for the GPU, that a whole model takes, by those of `host_names` that are
        there."""
        return {}

    def step_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int, *, partitioned: bool) -> float:
        """Bytes of temporaries at the largest moment of a step, for gradients of `weight_bytes` each. partitioned: each
        layer is updated by itself. A fused update has none."""
        return 0.0

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

    def make(
        self, name: str, options: Mapping[str, Any], flag: str, options_flag: str | None = None
    ) -> OptimizerSpec: ...

    def describe(self) -> str: ...


class OptimizerRegistry(Registry[OptimizerSpec]):
    """This project's optimizers by name; `make` also takes `<prefix>.<class>` of the registered libraries."""

    def __init__(self) -> None:
        super().__init__("optimizer")
        self.libraries: dict[str, Library] = {}

    def make(self, name: str, options: Mapping[str, Any], flag: str, options_flag: str | None = None) -> OptimizerSpec:
        prefix, dot, _ = name.partition(".")  # "torch.AdamW": no own name has a dot
        if dot and prefix in self.libraries:
            return self.libraries[prefix].make(name, options, flag, options_flag)
        return super().make(name, options, flag, options_flag)

    def describe_libraries(self) -> list[tuple[str, str]]:
        """(`<prefix>.*`, which names there are or how to get them) of every library."""
        return [(f"{prefix}.*", library.describe()) for prefix, library in self.libraries.items()]


OPTIMIZERS = OptimizerRegistry()


def hidden_matrices(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """id of each trainable 2-D parameter outside the embeddings and the output head -> rows of its fused projections.

    The rows are () for a single projection. A module whose linears hold several projections has an attribute
    `projections`: name of the linear -> rows of each projection.
    """
    # By identity: a tied head is its embedding's parameter, and found as such.
    excluded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = getattr(model, "lm_head", None)  # native decoders and transformers
    if head is None and (get_classifier := getattr(model, "get_classifier", None)) is not None:  # timm
        head = get_classifier()
    if isinstance(head, nn.Module):
        excluded |= {id(p) for p in head.parameters()}
    fused = {
        id(getattr(module, child).weight): tuple(rows)
        for module in model.modules()
        for child, rows in getattr(module, "projections", {}).items()
    }
    # Frozen parameters have no state.
    hidden = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]
    return {id(p): fused.get(id(p), ()) for p in hidden}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in groups. Matrices are decayed; norms and biases (one dimension) are not.

    Group options: `hidden`, whether its parameters are matrices of hidden layers; `parts`, the rows of the projections
    fused in each of them, () for a single one. Both are saved in checkpoints.
    """
    hidden = hidden_matrices(model)
    groups: dict[tuple[float, bool, tuple[int, ...]], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            # Parameters of one kind share a group, in the order of the model: checkpoints name states by that order.
            kind = (weight_decay if p.ndim >= 2 else 0.0, id(p) in hidden, hidden.get(id(p), ()))
            groups.setdefault(kind, []).append(p)
    return [
        {"params": params, "weight_decay": decay, "hidden": is_hidden, "parts": parts}
        for (decay, is_hidden, parts), params in groups.items()
    ]
