"""Optimizers that can update a model part by part, each as soon as its gradients are there.

That is what an update within the backward pass needs (`train.in_backward`): no two parts' gradients need exist at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtrain.optim.resumable import ResumableOptimizer


class PartitionedOptimizer(ResumableOptimizer):
    """A step is `begin`, then `step_part` of every part, in any order; `step` does it all. Without `split` everything
    is one part.

    grad_scale: a scalar on the device that the next step multiplies the gradients with (clipping), without touching
    them.
    """

    grad_scale: Tensor | None = None
    _parts: list[list[Tensor]] | None = None

    def parameters(self) -> list[Tensor]:
        """All of them, group by group."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def parts(self) -> list[list[Tensor]]:
        """The parameters of every part; those of one are in the order of `parameters`."""
        return [self.parameters()] if self._parts is None else self._parts

    def split(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Make these the parts; each parameter is in one of them, and one may be empty. States stay as they are."""
        part_of = {p: number for number, part in enumerate(parts) for p in part}
        assert len(part_of) == sum(map(len, parts)) and part_of.keys() == set(self.parameters()), "not a partition"
        found: list[list[Tensor]] = [[] for _ in parts]
        for p in self.parameters():
            found[part_of[p]].append(p)
        self._parts = found

    def begin(self) -> None:
        """Count a step, where that is not done parameter by parameter."""

    def step_part(self, number: int) -> None:
        """Update the parameters of one part that have gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for number in range(len(self.parts)):
            self.step_part(number)
        self.grad_scale = None
        return loss
