"""The gradient of logits that is not in memory until something reads it.

`SoftmaxGradient` stands for d loss / d logits [T, V] in backward of an output head. It holds the logits, which nothing
has overwritten yet, and the statistics of their rows. A linear whose GEMMs read FP8 codes of its output's gradient
computes the codes from these (`kernels/quantize/softmax_grad.py`). Any other operation gets the values: the first one
overwrites the logits with them, as `cross_entropy` does.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qtrain.kernels.cross_entropy import cross_entropy, cross_entropy_statistics

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}


@dataclass
class SoftmaxSource:
    """What the gradient is computed from."""

    logits: Tensor
    """fp32 or bf16 [T, V]; their gradient once it is `in_memory`."""
    log_total: Tensor
    """fp32 [T], the logsumexp of each row."""
    labels: Tensor
    """int64 [T]; -100: ignored."""
    z_loss: float
    in_memory: bool = False

    def values(self) -> Tensor:
        """The gradient [T, V] in the dtype and the memory of the logits."""
        if not self.in_memory:
            cross_entropy(self.logits, self.labels, self.z_loss, True)
            self.in_memory = True
        return self.logits


class SoftmaxGradient(Tensor):
    """d loss / d logits [T, V] of cross-entropy summed over rows, in the logits' dtype."""

    source: SoftmaxSource

    # Operations are intercepted in __torch_dispatch__ only: below autograd, where values are read.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: SoftmaxSource):
        logits = source.logits
        return Tensor._make_wrapper_subclass(cls, logits.shape, dtype=logits.dtype, device=logits.device)

    def __init__(self, source: SoftmaxSource):
        self.source = source

    def __repr__(self) -> str:
        return f"SoftmaxGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The backward of a view, such as that of a linear's output, passes the gradient on in its own shape.
        same = op in _ALIASES or (op is _aten.view.default and tuple(args[1]) == tuple(args[0].shape))
        if same:
            return SoftmaxGradient(args[0].source)
        args, kwargs = tree_map_only(SoftmaxGradient, lambda t: t.source.values(), (args, kwargs or {}))
        return op(*args, **kwargs)


def softmax_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, SoftmaxGradient]:
    """Loss and nll of each row of logits [T, V], fp32 [2, T], and the gradient of the sum of losses. The logits' memory
    belongs to the gradient from here on."""
    statistics = cross_entropy_statistics(logits, labels, z_loss)
    return statistics[:2], SoftmaxGradient(SoftmaxSource(logits, statistics[2], labels, z_loss))
