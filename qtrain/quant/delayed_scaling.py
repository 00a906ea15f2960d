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
    """The absmax history of the linears of a model that are under delayed scaling."""

    def __init__(self, linears: list[LowBitLinear]):
        self._scales = [scale for linear in linears for scale in (linear.x_scale, linear.dy_scale)]
        self._seen = [amax for linear in linears for amax in (linear.x_amax, linear.dy_amax)]
        schemes, device = [linear.scheme for linear in linears], linears[0].weight.device
        steps = [scheme.amax_history for scheme in schemes]
        self.history = torch.zeros(len(linears), 2, max(steps), device=device)
        """fp32 [linears, 2 (x, dy), steps], the latest step first; 0: no absmax yet. Steps: of the longest history."""
        self._remembered: Tensor | None = None
        """bool [linears, 1, steps]: those of a linear's own history; None: all."""
        if min(steps) < max(steps):
            numbers = torch.arange(max(steps), device=device)
            self._remembered = (numbers < torch.tensor(steps, device=device)[:, None])[:, None]
        kinds: dict[tuple[bool, tuple[str, str]], list[int]] = {}
        for row, scheme in enumerate(schemes):
            kinds.setdefault((scheme.power_of_two, scheme.amax_formats), []).append(row)
        self._kinds = {kind: torch.tensor(rows, device=device) for kind, rows in kinds.items()}
        """(power_of_two, formats of x and dy) -> rows."""

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
        if self._remembered is not None:
            rolled = torch.where(self._remembered, rolled, 0.0)
        # Linears that saw no data, such as experts without tokens, keep their history.
        self.history.copy_(torch.where((amax > 0)[..., None], rolled, self.history))
        largest = self.history.amax(dim=-1)
        scales = torch.where(largest > 0, self._scales_of(largest), 0.0)
        # In place: forward and backward, perhaps recorded in a CUDA graph, read these buffers.
        torch._foreach_copy_(self._scales, list(scales.flatten().split(1)))
        torch._foreach_zero_(self._seen)

    def discard(self) -> None:
        """Forget the absmax seen since the last `roll`, of a step that is not applied."""
        torch._foreach_zero_(self._seen)

    def _scales_of(self, largest: Tensor) -> Tensor:
        """fp32 [linears, 2] of the largest absmax of each."""

        def kind_scales(amax: Tensor, power_of_two: bool, formats: tuple[str, str]) -> Tensor:
            columns = zip(amax.unbind(dim=1), formats, strict=True)
            return torch.stack(
                [scale_ref(column[:, None], fmt, "rowwise", power_of_two) for column, fmt in columns], dim=1
            )

        if len(self._kinds) == 1:
            return kind_scales(largest, *next(iter(self._kinds)))
        scales = torch.empty_like(largest)
        for kind, rows in self._kinds.items():
            scales[rows] = kind_scales(largest[rows], *kind)
        return scales
