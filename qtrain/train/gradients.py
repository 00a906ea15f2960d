"""What the backward passes of a step leave behind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together: fp32 scalar on their device, also where they are bf16."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))


@dataclass(frozen=True)
class Gradients:
    """What a step's backward passes left behind, besides the gradients themselves."""

    loss: float
    """Mean over the step's trained tokens, without z-loss."""
    norm: Tensor
    """Norm of all gradients together, before clipping; fp32 scalar on the device."""
    norm_value: float
    tokens: int
    """All tokens read, trained on or not."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm_value)
