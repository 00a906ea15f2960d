"""What training, evaluation and checkpoints may ask of any optimizer: the base class, and the adapter for foreign ones.

Every capability is a method with a default that suits an optimizer of another library, so callers never probe for
attributes.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.kernels.optim.weight_amax import WeightAmax
from qtrain.optim.state_layout import local

StateShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Key of each of a parameter's states -> its shape and dtype."""


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer with the capabilities that qtrain uses."""

    averages_weights: ClassVar[bool] = False
    """Whether `eval` puts other weights into the model than those that training updates."""

    def parameters(self) -> list[Tensor]:
        """All parameters, group by group."""
        return [p for group in self.param_groups for p in group["params"]]

    def clip_gradients(self, norm: Tensor, max_norm: float) -> None:
        """Scale the gradients of the next step by max_norm / norm. norm: of all gradients, fp32 scalar, > max_norm."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)

    def record_amax(self, parameter: Tensor) -> WeightAmax | None:
        """From now on have each update of `parameter` leave its new absmax, of this rank's shard; None: it cannot."""
        return None

    def eval(self) -> None:
        """Put the weights into the model that are evaluated and exported."""

    def train(self) -> None:
        """Put the weights back that training updates, bit for bit."""

    def synchronize(self) -> None:
        """Wait until states in host memory are those after the last step."""

    def state_device(self, key: str, parameter: Tensor, saved_on_host: bool) -> torch.device:
        """The device of a state that a checkpoint fills. saved_on_host: it was in host memory, unlike its parameter."""
        return torch.device("cpu") if saved_on_host else parameter.device

    def check_saved(self, name: str, parameter: Tensor, saved: StateShapes) -> None:
        """UserError unless `adopt_states` can read the `saved` states of `parameter`, which is called `name`."""

    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        """Check the states that a checkpoint has filled in, and convert them to this optimizer's formats.

        names: of the parameters, for messages. Returns what was converted, such as "exp_avg int8 -> fp32". UserError
        for NaN, Inf and values that no training produces.
        """
        for parameter, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    check_finite(key, value, names[parameter])
        return []


def check_finite(key: str, value: Tensor, name: str) -> None:
    """UserError where the state `key` of the parameter called `name` holds NaN or Inf."""
    if not bool(local(value).float().isfinite().all()):
        raise UserError(
            f"--resume: the optimizer state {key} of {name} holds NaN or Inf; resume from an earlier checkpoint."
        )


def adapted(cls: type[torch.optim.Optimizer]) -> type[Optimizer]:
    """The optimizer class `cls` of another library with the defaults of `Optimizer`, under its own name."""
    return type(cls.__name__, (cls, Optimizer), {"__doc__": cls.__doc__})
