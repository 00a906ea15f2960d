"""Loading states exactly, from this optimizer or one of another kind: checked first, and never cast."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.optim.optimizer import Optimizer, StateShapes


class ResumableOptimizer(Optimizer):
    """Loads states in their own dtypes, where torch's `load_state_dict` casts them to the weights'."""

    @abstractmethod
    def check_saved(self, name: str, parameter: Tensor, saved: StateShapes) -> None: ...

    @abstractmethod
    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]: ...

    def state_device(self, key: str, parameter: Tensor, saved_on_host: bool = False) -> torch.device:
        """The device that the optimizer keeps the state on, wherever it was saved."""
        return parameter.device

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of this or another optimizer, as far as `check_saved` allows. UserError, with nothing
        changed, for a state that does not fit."""
        groups, saved = state_dict["param_groups"], state_dict["state"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise UserError("--resume: the saved optimizer groups its parameters differently.")
        index_of = {
            p: index
            for group, other in zip(self.param_groups, groups, strict=True)
            for p, index in zip(group["params"], other["params"], strict=True)
        }
        names = {p: f"parameter {index}" for p, index in index_of.items()}
        before = dict(self.state)
        try:
            self.state.clear()
            for p, index in index_of.items():
                if state := saved.get(index, {}):
                    self._load_state(p, names[p], state)
            self.adopt_states(names)
        except UserError:
            self.state.clear()
            self.state.update(before)
            raise
        for group, other in zip(self.param_groups, groups, strict=True):
            for key, value in other.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(torch.as_tensor(value))  # in place: kernels and CUDA graphs hold its address
                elif key != "params":
                    group[key] = value

    def _load_state(self, p: Tensor, name: str, state: Mapping[str, Any]) -> None:
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise UserError(f"--resume: the optimizer state of {name} is not tensors.")
        self.check_saved(name, p, {key: (tuple(value.shape), value.dtype) for key, value in state.items()})
        self.state[p] = {key: value.to(self.state_device(key, p), copy=True) for key, value in state.items()}
