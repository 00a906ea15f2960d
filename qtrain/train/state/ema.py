"""A running average of the weights, which is often better than the last of them: evaluated and exported in their place.

average = decay · average + (1 - decay) · weights after every step, in fp32. So that a short run's average is not the
random weights that it began with, the decay begins lower: at most (1 + step) / (10 + step), as in TensorFlow's
ExponentialMovingAverage.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qtrain.tensors.stored_weight import StoredWeight


class Ema:
    """Averages of all floating parameters and saved buffers of `model`, beginning at their values of now."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self._live: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and not any(tensor is other for other in self._live.values()):
                self._live[name] = tensor
        self._average = {name: _value(tensor).clone() for name, tensor in self._live.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by the names of the parameters: the very tensors."""
        return self._average

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` (counted from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, average in self._average.items():
            average.mul_(decay).add_(_value(self._live[name]), alpha=1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averages; codes made of its weights are stale when it begins and when it ends."""
        with torch.no_grad():
            kept = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            self._write(self._average)
        try:
            yield
        finally:
            with torch.no_grad():
                self._write(kept)

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._live.items():
            tensor.copy_(values[name])


def _value(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, StoredWeight) else tensor.detach().float()
