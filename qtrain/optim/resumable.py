"""States from elsewhere: how optimizers take what `state_dict` gave, here or in another run, or of another kind."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtrain.errors import UserError

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each of a parameter's states by its key."""


class ResumableOptimizer(torch.optim.Optimizer):
    """Loads states in their own dtypes; torch's own loading would cast them to the weights'."""

    @abstractmethod
    def check_saved(self, name: str, p: Tensor, described: Described) -> None:
        """UserError unless `adopt_states` can read the states `described` of the parameter that is called `name`."""

    @abstractmethod
    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        """Check the states that have been filled in from elsewhere, and bring them into this optimizer's formats.

        names: of the parameters, for messages. Returns what was converted, as "exp_avg int8 -> fp32". UserError for
        values that no training leaves behind.
        """

    def home(self, key: str, parameter: Tensor) -> torch.device:
        """Where a state lives."""
        return parameter.device

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` of this or another optimizer gave, as far as `check_saved` allows it. UserError, with
        nothing changed, for a state that does not fit."""
        groups, saved = state_dict["param_groups"], state_dict["state"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise UserError("--resume: the saved optimizer groups its parameters differently.")
        number_of = {
            p: number
            for group, other in zip(self.param_groups, groups, strict=True)
            for p, number in zip(group["params"], other["params"], strict=True)
        }
        names = {p: f"parameter {number}" for p, number in number_of.items()}
        former = dict(self.state)
        try:
            self.state.clear()
            for p, number in number_of.items():
                if state := saved.get(number, {}):
                    self._take(p, names[p], state)
            self.adopt_states(names)
        except UserError:
            self.state.clear()
            self.state.update(former)
            raise
        for group, other in zip(self.param_groups, groups, strict=True):
            for key, value in other.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))  # on the device, where kernels and recordings read it
                elif key != "params":
                    group[key] = value

    def _take(self, p: Tensor, name: str, state: Mapping[str, Any]) -> None:
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise UserError(f"--resume: the optimizer state of {name} is not tensors.")
        self.check_saved(name, p, {key: (tuple(value.shape), value.dtype) for key, value in state.items()})
        self.state[p] = {key: value.to(self.home(key, p), copy=True) for key, value in state.items()}
