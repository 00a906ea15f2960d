"""What training, evaluation and checkpoints may ask of any optimizer, and the base classes of this project's own.

    Optimizer             every capability as a method, with a default that suits an optimizer of another library
    PartitionedOptimizer  can update a model one partition of its parameters at a time, and loads states exactly, from
                          this optimizer or one of another kind: checked first, never cast to the weights' dtype

An update within the backward pass (`train/step/in_backward.py`) needs the last: a partition is updated as soon as its
gradients are complete, so the gradients of two partitions never exist at once.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.optim.state_layout import StateShapes, first_of_shard, local
from qtrain.tensors.partition import Placement


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer with the capabilities that qtrain uses."""

    averages_weights: ClassVar[bool] = False
    """Whether `eval` puts other weights into the model than those that training updates."""

    placements: Mapping[Tensor, Placement] = {}
    """Of parameters that are parts of larger ones (`place`)."""

    def place(self, placements: Mapping[Tensor, Placement]) -> None:
        """State which parameters are parts of larger ones, and where they lie in them; before anything else."""
        self.placements = placements

    def placement(self, parameter: Tensor) -> Placement:
        return self.placements.get(parameter, Placement())

    def full_shape(self, parameter: Tensor) -> torch.Size:
        """The shape of the matrix that `parameter` is a part of."""
        return self.placement(parameter).full_shape or parameter.shape

    def first_element(self, parameter: Tensor) -> int:
        """Index in the full matrix of the first element of this rank's shard."""
        return self.placement(parameter).first_element + first_of_shard(parameter)

    def parameters(self) -> list[Tensor]:
        """All parameters, group by group."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def skips_nan_scale(self) -> bool:
        """Whether `scale_gradients` by NaN leaves weights and states as they are: a step may then be launched before
        the host knows whether the gradients are finite."""
        return False

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiply the gradients of the next step by a scalar on the device; where `skips_nan_scale`."""
        raise NotImplementedError

    def prepare_step(self) -> None:
        """Do what the next step takes of the host, once its gradients exist; before the host waits for the device."""

    def clip_gradients(self, norm: float, max_norm: float) -> None:
        """Scale the gradients of the next step by max_norm / norm. norm: of all gradients, in fp32, > max_norm."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, torch.tensor(norm))

    def record_amax(self, parameter: Tensor) -> WeightAmax | None:
        """From now on have each update of `parameter` leave its new absmax, of this rank's shard; None: it cannot."""
        return None

    def eval(self) -> None:
        """Put the weights into the model that are evaluated and exported."""

    def train(self) -> None:
        """Put the weights back that training updates, bit for bit."""

    def synchronize(self) -> None:
        """Wait until states in host memory are those after the last step."""

    def drop_states(self) -> None:
        """Free all states and what points to them, before a checkpoint's are allocated: both may be too much."""
        self.synchronize()
        self.state.clear()

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


class PartitionedOptimizer(Optimizer):
    """A step is `begin_step`, then `step_partition` of every partition in any order; `step` does all of it.

    Without `partition` all parameters are one partition. grad_scale: fp32 scalar on the device that the next step
    multiplies the gradients with as it reads them, which saves a pass over them.
    """

    grad_scale: Tensor | None = None
    _partitions: list[list[Tensor]] | None = None

    @property
    def partitions(self) -> list[list[Tensor]]:
        """The parameters of every partition, in the order of `parameters`."""
        return [self.parameters()] if self._partitions is None else self._partitions

    def partition(self, partitions: Sequence[Sequence[Tensor]]) -> None:
        """Set the partitions. Each parameter is in exactly one; a partition may be empty. States are kept."""
        index_of = {p: index for index, members in enumerate(partitions) for p in members}  # tensors hash by identity
        assert len(index_of) == sum(map(len, partitions)) and index_of.keys() == set(self.parameters()), (
            "not a partition"
        )
        self._partitions = [[] for _ in partitions]
        for p in self.parameters():
            self._partitions[index_of[p]].append(p)

    def scale_gradients(self, scale: Tensor) -> None:
        self.grad_scale = scale

    def clip_gradients(self, norm: float, max_norm: float) -> None:
        # As torch.nn.utils.clip_grads_with_norm_, but applied as the update reads the gradients. Computed on the host,
        # for which the device waits; from pageable memory the copy has been staged when the call returns.
        scale, first = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0), self.param_groups[0]["params"][0]
        self.grad_scale = scale.to(self.placement(first).device or first.device, non_blocking=True)

    def begin_step(self) -> None:
        """Count a step, where it is not counted per parameter."""

    def step_partition(self, index: int) -> None:
        """Update the parameters of one partition that have gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_step()
        for index in range(len(self.partitions)):
            self.step_partition(index)
        self.grad_scale = None  # of this step alone
        return loss

    # ---- loading states ----------------------------------------------------------------------------------------------

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
        # Tensors are replaced, not written: a shallow copy is enough.
        before = dict(self.state)  # restored if a later parameter's state does not fit
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
                elif key != "params":  # options, such as the learning rate
                    group[key] = value

    def _load_state(self, p: Tensor, name: str, state: Mapping[str, Any]) -> None:
        if not all(isinstance(value, Tensor) for value in state.values()):
            raise UserError(f"--resume: the optimizer state of {name} is not tensors.")
        # Before the copy to the device: a wrong checkpoint costs no memory there.
        self.check_saved(name, p, {key: (tuple(value.shape), value.dtype) for key, value in state.items()})
        self.state[p] = {key: value.to(self.state_device(key, p), copy=True) for key, value in state.items()}
