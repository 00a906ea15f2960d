"""What the scripts need to know of a kind of model: how it is built, planned, checkpointed and compiled."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import nn

from qtrain.core.checks import shown
from qtrain.core.errors import UserError
from qtrain.core.hardware.device import Hardware
from qtrain.models.cost.trained import TrainedPart
from qtrain.parallel.sharding.full_shard import Unit
from qtrain.quant import LinearChoice, Scheme
from qtrain.quant.choices import NO_NAMES
from qtrain.quant.quantized_model import SharedLinear
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.plan import Plan
from qtrain.train.settings.settings import TrainSettings

M = TypeVar("M", bound=nn.Module)
"""The kind of model."""
S = TypeVar("S", bound=TrainSettings)


class Architecture(ABC, Generic[M, S]):
    """A model without its weights."""

    @cached_property
    @abstractmethod
    def empty(self) -> M:
        """The model on the meta device: its modules and shapes, no memory."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows per sample of the input of most linears: tokens of a sequence, patches of an image."""

    @abstractmethod
    def head(self, model: M) -> nn.Module | None:
        """The output head of `model`."""

    @abstractmethod
    def blocks(self, model: M) -> list[nn.Module]:
        """The repeated layers of `model`, in the order in which they run; empty if there are none."""

    def units(self, model: M) -> list[Unit]:
        """What full sharding gathers at once."""
        return [Unit(block, block) for block in self.blocks(model)]

    @abstractmethod
    def build(self, checked: CheckedSettings) -> M:
        """The model on the device, with weights; if `is_native`, its matrices are lazy. UserError for weights that are
        missing or do not fit."""

    @abstractmethod
    def recompute(self, model: M, settings: S) -> None:
        """Set what backward recomputes (`--activation_checkpointing`, `--recompute`)."""

    @abstractmethod
    def compile(self, model: M, checked: CheckedSettings) -> None:
        """Compile the repeated blocks of `model` in place."""

    @abstractmethod
    def plan(
        self, checked: CheckedSettings, linears: Sequence[LinearChoice], hardware: Hardware, trained: TrainedPart | None
    ) -> Plan:
        """The plan of the run. trained: what trains, None: everything."""

    @property
    def linear_rows(self) -> Mapping[str, float] | None:
        """Rows of the input of each linear, by its name; of experts on average; None: the same for all."""
        return None

    @property
    def is_native(self) -> bool:
        """Whether the model is qtrain's own decoder: it never reads weights of linears but through them, and `build`
        leaves the values of matrices to be made one by one (`tensors/lazy.py`)."""
        return False

    def shared_linear(self, name: str) -> SharedLinear | None:
        """How the weight of the linear `name` is shared with other processes; None: not at all."""
        return None

    def left_linears(self, scheme: Scheme) -> Mapping[str, str]:
        """The linears that stay in high precision though `scheme` could take them, by name, with the reason."""
        return NO_NAMES

    def notes(self, linears: Sequence[LinearChoice]) -> list[str]:
        """Lines to print below the list of linears."""
        return []


MAX_LAYERS = 10_000


def refuse_absurd(config: Mapping[str, Any], flag: str) -> None:
    """UserError for more layers than could be built in seconds."""
    for key, value in config.items():
        if key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "layers"):
            depth = max(value, default=0) if isinstance(value, list | tuple) else value
            if isinstance(depth, int) and depth > MAX_LAYERS:
                raise UserError(f"{flag}: {key} {shown(value)} is more than {MAX_LAYERS:,} layers.")
