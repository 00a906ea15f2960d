"""Delayed scaling: x and dy are quantized with scales from the absmax of earlier steps, so they are read once.

    scale of a step = max of the tensor's absmax over the last `amax_history` steps / largest code

(Micikevicius et al., arXiv:2209.05433; NVIDIA Transformer Engine.) A linear holds the scale of this step and the absmax
seen since the last one. Both change only between steps, in `roll`, for all linears at once: every micro-batch and every
recompute of a step read the same scale, and recording an absmax twice changes nothing. Evaluation records nothing. A
tensor without history, as in the first step, is scaled by its own absmax (`kernels/quantize/delayed_scale.py`). Weights
need no history: they are quantized once per step.

Everything stays on the device. The history is the state that checkpoints hold; the scales are derived from it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qtrain.kernels.quantize.reference import scale_ref
from qtrain.quant.linear import LowBitLinear


class AmaxHistory:
    """The absmax history of all linears of a model, which share one scheme."""

    def __init__(self, linears: list[LowBitLinear]):
        scheme = linears[0].scheme
        assert all(linear.scheme == scheme for linear in linears), "linears with different histories"
        self._power_of_two = scheme.power_of_two
        self._formats = scheme.amax_formats
        self._scales = [scale for linear in linears for scale in (linear.x_scale, linear.dy_scale)]
        self._seen = [amax for linear in linears for amax in (linear.x_amax, linear.dy_amax)]
        device = linears[0].weight.device
        self.history = torch.zeros(len(linears), 2, scheme.amax_history, device=device)
        """fp32 [linears, 2 (x, dy), steps], the latest step first; 0: no absmax yet."""

    @torch.no_grad()
    def roll(self, reduce: Callable[[Tensor], None] | None = None) -> None:
        """Append the absmax seen since the last call to the history and update the scales of the next step. reduce:
        takes the maximum over processes in place, which see different data and must use one scale."""
        amax = torch.cat(self._seen).view(-1, 2)  # fp32 [linears, 2]: of x, of dy
        if reduce is not None:
            reduce(amax)
        # A step with an Inf or NaN leaves no trace: its scale would make zeros of the steps that follow.
        amax = torch.where(amax.isfinite(), amax, 0.0)
        rolled = torch.cat([amax[..., None], self.history[..., :-1]], dim=-1)
        # Linears that saw no data, such as experts without tokens, keep their history.
        self.history.copy_(torch.where((amax > 0)[..., None], rolled, self.history))
        largest = self.history.amax(dim=-1)
        scales = [
            scale_ref(column[:, None], fmt, "rowwise", self._power_of_two)
            for column, fmt in zip(largest.unbind(dim=1), self._formats, strict=True)
        ]
        scales = torch.where(largest > 0, torch.stack(scales, dim=1), 0.0)
        # In place: forward and backward, perhaps recorded in a CUDA graph, read these buffers.
        torch._foreach_copy_(self._scales, list(scales.flatten().split(1)))
        torch._foreach_zero_(self._seen)
