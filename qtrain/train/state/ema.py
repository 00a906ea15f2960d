"""An exponential moving average of the weights, evaluated and exported in their place.

average = decay · average + (1 - decay) · weights after every step, in fp32. The decay is at most
(1 + step) / (10 + step), as in TensorFlow's ExponentialMovingAverage, so that the average of a short run is not
dominated by the initial weights.

Where master weights are sharded the average is sharded alike: each element has the same values on any mesh. The
model gets it as it gets the weights of a step, gathered from the masters.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qtrain.optim.state_layout import local
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.shards import is_placeholder
from qtrain.tensors.stored_weight import StoredWeight


class Ema:
    """Averages of all floating-point parameters and persistent buffers of `model`, initialized to their values; of what
    this rank has of the masters in `parallel`."""

    def __init__(self, model: nn.Module, decay: float, parallel: DataParallel):
        self.decay, self._parallel = decay, parallel
        self._live: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            master = parallel.master(tensor)
            known = any(master is other for other in self._live.values())
            if tensor.is_floating_point() and not known and not is_placeholder(master):
                self._live[name] = master
        self._average = {name: _value(tensor).clone() for name, tensor in self._live.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The averages by parameter name, for a checkpoint: the tensors themselves, not copies."""
        return self._average

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` (counted from 1) to the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, average in self._average.items():
            # Of sharded masters this rank's rows: the average needs no communication.
            local(average).mul_(decay).add_(_value(local(self._live[name])), alpha=1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the averages. Low-bit codes of its weights are stale on entry and on exit."""
        with torch.no_grad():
            saved = {name: tensor.detach().clone() for name, tensor in self._live.items()}
            self._write(self._average)
        try:
            yield
        finally:
            with torch.no_grad():
                self._write(saved)

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._live.items():
            local(tensor).copy_(local(values[name]))
        self._parallel.gather()


def _value(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, StoredWeight) else tensor.detach().float()
