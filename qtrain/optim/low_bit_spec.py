"""What the specs of optimizers with an elementwise update share: how states are stored, and what memory they take."""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch

from qtrain.core.checks import Range
from qtrain.optim.elementwise import LowBitOptimizer
from qtrain.optim.offload import HostSizes, host_sizes, staging_bytes
from qtrain.optim.registry import OptimizerSpec, ParameterShape
from qtrain.optim.state_layout import HOST_NAMES, FormatChoice, StateOptions


@dataclass(frozen=True)
class LowBitSpec(OptimizerSpec):
    """What the specs of these optimizers share: the storage of states, and its size."""

    m: FormatChoice = "weight"
    """format of the momentum, or first moment; weight: the dtype of the weights"""
    sr: bool = True
    """round bf16 weights without a master copy, and bf16 states, stochastically"""
    small: Annotated[int, Range(0)] = 4096
    """tensors with fewer elements, and all vectors, keep fp32 states"""
    offload: bool | tuple[Literal["m", "v", "master"], ...] = False
    """keep states and master in host memory, or those in a list; they stream through the GPU during the step"""

    streams_weights = True
    optimizer: ClassVar[type[LowBitOptimizer]]
    group_options: ClassVar[tuple[str, ...]]
    """The fields that are options of the parameter groups."""

    @property
    @abstractmethod
    def state_options(self) -> StateOptions:
        """How states are stored."""

    @property
    def host_names(self) -> tuple[str, ...]:
        return self.state_options.host_names

    @property
    def offloaded(self) -> frozenset[str]:
        return frozenset(HOST_NAMES if self.offload is True else self.offload or ())

    def with_offload(self, names: Collection[str]) -> OptimizerSpec:
        return replace(self, offload=tuple(name for name in self.host_names if name in names))

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> LowBitOptimizer:
        options = {name: getattr(self, name) for name in self.group_options}
        return self.optimizer(groups, {"lr": lr, "weight_decay": 0.0, **options}, self.state_options, seed=seed)

    def state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        """As for any optimizer; for states and weights in host memory, the staging buffers on the device."""
        return state_bytes(self.state_options, shapes, weight_bytes)

    def host_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> Mapping[str, float]:
        names = (name for name in self.host_names if name in self.offloaded)
        return {name: _total(_sizes(self.state_options, shapes, weight_bytes, {name})) for name in names}

    def needs_whole(self, hidden: bool) -> bool:
        return False

    def refuses_partitions(self) -> str | None:
        if self.offloaded:
            return (
                "offloaded states are moved for the whole model at once; leave m, v and master out of --offload, and "
                "offload out of --optim_kwargs."
            )
        return None


def state_bytes(options: StateOptions, shapes: Sequence[ParameterShape], weight_bytes: int) -> int:
    """Bytes of device memory of a model's states and master copies; of what is in host memory, of the staging buffers
    through which it passes."""
    on_device = _total(_sizes(options, shapes, weight_bytes, set(HOST_NAMES) - options.offload))
    moved = _sizes(options, shapes, weight_bytes, options.offload, weights=True)
    return on_device + staging_bytes(tuple(moved))


def _total(tensors: Sequence[HostSizes]) -> int:
    return sum(sizes.rows * sum(sizes.row_bytes) for sizes in tensors)


def _sizes(
    options: StateOptions,
    shapes: Sequence[ParameterShape],
    weight_bytes: int,
    names: Collection[str],
    *,
    weights: bool = False,
) -> list[HostSizes]:
    """Of what `names` say of each parameter's states and master copy. weights: also of weights and gradients that are
    in host memory."""
    dtype = torch.bfloat16 if weight_bytes == 2 else torch.float32
    tensors = []
    for shape in shapes:
        weight = torch.empty(shape.shape, dtype=dtype, device="meta")
        # Signs do not change a format's size.
        formats = options.formats_of(weight, dict.fromkeys(options.formats, True)).values()
        master = options.master and dtype == torch.bfloat16 and not shape.stored
        moved = dtype if weights and shape.on_host else None
        tensors += [host_sizes(weight.shape, formats, master=master, names=names, weight=moved)] * shape.count
    return tensors
