"""What the backward passes of a step produce besides the gradients themselves."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gradients:
    """The result of a step's backward passes."""

    loss: float
    """Mean over the step's trained tokens, without z-loss."""
    norm: Tensor
    """L2 norm of all gradients, before clipping; fp32 scalar on the device."""
    norm_value: float
    """The same on the host."""
    tokens: int
    """Tokens read by all ranks, trained on or not."""
    stop_signal: int = 0
    """The number of a signal that some rank has received; 0: none."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm_value)
