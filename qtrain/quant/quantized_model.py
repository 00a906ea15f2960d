"""The linears of a model that run in low bits: their map, the keys of their rounding, their codes, delayed scales."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.quant.choices import LinearChoice
from qtrain.quant.delayed_scaling import AmaxHistory
from qtrain.quant.execute import Exchange
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scales import Reduce
from qtrain.quant.scheme_map import Spec
from qtrain.quant.weight_codes import scales_by_amax


class SharedLinear(NamedTuple):
    """How a linear is shared with other processes that hold other parts of its weight, or other tokens."""

    first_number: int = 0
    """Added to the number of the linear in its Philox key: parts must not draw the same bits."""
    reduce: Reduce | None = None
    """Of statistics over those processes; None: each has the whole weight."""
    exchange: Exchange | None = None
    """For the scales of inputs and gradients; None: a call brings it, or there is none."""


@dataclass
class QuantizedModel:
    """A model's swapped linears, the Philox keys of their rounding, and the state of delayed scaling."""

    choices: list[LinearChoice]
    linears: list[LowBitLinear]
    """Those of `choices` that are swapped, in this order."""
    keys: Tensor
    """int64 [choices, 3]: seed, micro-step, number of the linear; SIBLINGS hold the row of the first."""
    own_keys: dict[str, Tensor]
    """The key of each linear, by name: a row of `keys`."""
    left: dict[str, "weakref.ref[nn.Module]"] = field(default_factory=dict)
    """The linears and convolutions that are not swapped; not kept alive, for an export replaces them one by one."""
    shared: Callable[[str], SharedLinear | None] = lambda name: None
    """The linears of which other processes hold other parts or tokens, by name."""
    one_weight_layout: bool = False
    """Whether one layout of weights' codes is kept, where the other follows from it."""
    amax: AmaxHistory | None = None
    reduce_amax: Callable[[Tensor], None] | None = None
    """Takes the maximum over processes of what delayed scaling has seen, in place; None: one process."""
    assignments: int = 0
    """How often `reassign` has changed the map: what was recorded before launches the kernels of other schemes."""
    sub_norm: bool = False
    """Whether the model was built for a scheme with norms of its own."""
    step: int = 0
    """The micro-step that keys the random bits, of stochastically rounded weights too."""
    record_amax: Callable[[LowBitLinear], WeightAmax | None] = lambda linear: None
    """Where the optimizer leaves the absmax of a linear's weight."""

    def set_step(self, step: int) -> None:
        """Set the micro-step that keys the next random bits."""
        self.step = step
        if self.linears:
            # In place: the linears' keys are views of these rows, and captured graphs hold the address.
            self.keys[:, 1].fill_(step)

    @property
    def schemes(self) -> dict[str, Spec]:
        """The map: linear -> the scheme that it runs in, as --quantize_overrides has it."""
        return {choice.name: choice.spec for choice in self.choices}

    def by_name(self) -> dict[str, LowBitLinear]:
        """The swapped linears by the names of their choices."""
        names = (choice.name for choice in self.choices if choice.reason is None)
        return dict(zip(names, self.linears, strict=True))

    def amax_rows(self) -> dict[str, Tensor]:
        """Of each linear under delayed scaling, its part of the history, fp32 [2 (x, dy), steps]."""
        names = [name for name, linear in self.by_name().items() if linear.scheme.amax_history]
        # One row of the history for each delayed linear, in the order of `keep_amax`.
        return {} if self.amax is None else dict(zip(names, self.amax.history, strict=True))

    def keep_amax(self) -> None:
        """Begin the history of the linears that are under delayed scaling now."""
        delayed = [linear for linear in self.linears if linear.scheme.amax_history]
        self.amax = AmaxHistory(delayed) if delayed else None

    def linear(self, name: str) -> LowBitLinear | nn.Linear | nn.Conv2d:
        """The linear of this name, swapped or left; the model keeps alive those that are left."""
        linear: Any = self.by_name().get(name) or self.left[name]()
        assert linear is not None, name
        return linear

    @property
    def needs_refresh(self) -> bool:
        """Whether `refresh` has anything to do after a step."""
        return self.amax is not None or any(linear.weight.requires_grad for linear in self.linears)

    def refresh(self) -> None:
        """Requantize every trained weight and update delayed scales; to be called after each optimizer step, and after
        a checkpoint is loaded. Codes of frozen weights stay those that the model was built with."""
        if self.amax is not None:
            self.amax.roll(self.reduce_amax)
        self.refresh_weights()

    def discard_step(self) -> None:
        """Forget what a step has left that is not applied; in place of `refresh`: no weight has changed."""
        if self.amax is not None:
            self.amax.discard()

    def refresh_weights(self) -> None:
        """Requantize weights without a step of delayed scaling: where averaged weights are swapped in and out."""
        stale = [linear for linear in self.linears if linear.weight.requires_grad]
        # Scales that span ranks need a reduction: one for all weights of the same ranks.
        for reduce in dict.fromkeys(linear.reduce for linear in stale if linear.reduce is not None):
            LowBitLinear.refresh_spanning([linear for linear in stale if linear.reduce is reduce])
        for linear in stale:
            if linear.reduce is None:
                linear.refresh()

    def tensors(self) -> dict[str, Tensor]:
        """The state tensors that a checkpoint holds besides the model's; loading them requires `refresh`."""
        # Codes follow from weights, so the history alone is state.
        return {} if self.amax is None else {"amax_history": self.amax.history}

    def mark_fresh(self) -> None:
        """State that the replay of a recorded `refresh` has updated all codes."""
        for linear in self.linears:
            linear.mark_fresh()

    def track_versions(self, optimizer: torch.optim.Optimizer) -> None:
        """Increment the weights' versions after each optimizer step where it did not, as torch's fused optimizers."""

        def after_step(*_: object) -> None:
            # Weights whose version the optimizer has incremented itself are stale already.
            fresh = [x.weight for x in self.linears if x.weight.requires_grad and not x.stale]
            if fresh:
                torch.autograd.graph.increment_version(fresh)

        optimizer.register_step_post_hook(after_step)

    def use_optimizer_amax(self, record: Callable[[LowBitLinear], WeightAmax | None]) -> None:
        """Compute scales from the absmax that the optimizer leaves of a weight. record: where it leaves that of a
        linear's weight; None: nowhere."""
        self.record_amax = record
        for linear in self.linears:
            self.ask_amax(linear)

    def ask_amax(self, linear: LowBitLinear) -> None:
        """Have the optimizer leave the absmax of a linear's weight, if its scale follows from that."""
        if linear.weight.requires_grad and scales_by_amax(linear.scheme):
            linear.weight_amax = self.record_amax(linear)

    def known_amax(self) -> frozenset[int]:
        """The linears, by number, of which `refresh` knows the absmax now; the others' weights it reads for it."""
        return frozenset(i for i, linear in enumerate(self.linears) if linear.known_amax is not None)

    def assert_fresh(self) -> None:
        """Assert that no weight has changed since its codes were computed."""
        stale = [name for name, linear in self.by_name().items() if linear.stale]
        assert not stale, f"stale codes: {', '.join(stale[:3])} changed after the last refresh"
