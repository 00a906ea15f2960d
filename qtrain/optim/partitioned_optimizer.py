"""Optimizers that can update a model one partition of its parameters at a time.

An update within the backward pass (`train.in_backward`) needs this: a partition is updated as soon as its gradients are
complete, so the gradients of two partitions never exist at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qtrain.optim.resumable import ResumableOptimizer


class PartitionedOptimizer(ResumableOptimizer):
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
        index_of = {p: index for index, members in enumerate(partitions) for p in members}
        assert len(index_of) == sum(map(len, partitions)) and index_of.keys() == set(self.parameters()), (
            "not a partition"
        )
        self._partitions = [[] for _ in partitions]
        for p in self.parameters():
            self._partitions[index_of[p]].append(p)

    def clip_gradients(self, norm: Tensor, max_norm: float) -> None:
        self.grad_scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)

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
        self.grad_scale = None
        return loss
