"""Delayed scaling: x and dy are quantized under scales from the absmax of earlier steps, and are read once.

    scale of a step = max of its tensor's absmax over the last `amax_history` steps / largest code

(Micikevicius et al., arXiv:2209.05433; NVIDIA Transformer Engine.) A linear holds the scale in force and the absmax
that it has seen since; both change between steps only, in `roll`, all linears together. So every micro-batch of a step
and whatever is computed again in backward read the same scale, and recording an absmax twice changes nothing. An
evaluation records nothing. A tensor without history, as in the first step, is scaled by its own absmax
(`kernels/quantize/delayed_scale.py`). Weights need no history: their codes are made once a step from the weight itself.

All of it happens on the device. The history is the state: checkpoints hold it, the scales follow from it.
"""

import torch
import torch.distributed as dist

from qtrain.kernels.quantize.reference import scale_ref
from qtrain.quant.linear import LowBitLinear


class AmaxHistory:
    """What the linears of a model remember; all of one scheme."""

    def __init__(self, linears: list[LowBitLinear]):
        scheme = linears[0].scheme
        assert all(linear.scheme == scheme for linear in linears), "linears with different histories"
        self._power_of_two = scheme.power_of_two
        self._formats = scheme.amax_formats
        self._scales = [scale for linear in linears for scale in (linear.x_scale, linear.dy_scale)]
        self._seen = [amax for linear in linears for amax in (linear.x_amax, linear.dy_amax)]
        device = linears[0].weight.device
        self.history = torch.zeros(len(linears), 2, scheme.amax_history, device=device)
        """fp32 [linears, x and dy, steps], the latest step first; 0: nothing was seen."""

    @torch.no_grad()
    def roll(self) -> None:
        """Take what was seen since the last call as the latest step, and renew the scales in force."""
        seen = torch.cat(self._seen).view(-1, 2)
        if dist.is_initialized():  # ranks see other data, and scale alike
            dist.all_reduce(seen, dist.ReduceOp.MAX)
        seen = torch.where(seen.isfinite(), seen, 0.0)
        rolled = torch.cat([seen[..., None], self.history[..., :-1]], dim=-1)
        self.history.copy_(torch.where((seen > 0)[..., None], rolled, self.history))
        largest = self.history.amax(dim=-1)
        scales = [
            scale_ref(column[:, None], fmt, "rowwise", self._power_of_two)
            for column, fmt in zip(largest.unbind(dim=1), self._formats, strict=True)
        ]
        scales = torch.where(largest > 0, torch.stack(scales, dim=1), 0.0)
        torch._foreach_copy_(self._scales, list(scales.flatten().split(1)))
        torch._foreach_zero_(self._seen)
