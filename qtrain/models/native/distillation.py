"""Distillation: a frozen teacher whose distribution over the next token the training loss follows.

The teacher is a decoder in high precision over the same vocabulary. It runs once per micro-batch without a graph; its
head runs in the chunks of tokens of `loss.py`, so logits of both models exist for one chunk at a time. The loss is that
of `kernels/distillation.py`; the logged negative log-likelihood stays that of cross-entropy.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from qtrain.core.checks import Range, check_fields
from qtrain.kernels.cross_entropy import IGNORED
from qtrain.kernels.distillation import distilled_cross_entropy
from qtrain.models.native.loss import Entropy, EntropyOf


@dataclass(frozen=True)
class DistillOptions:
    """The options of --distill. teacher: a folder or hub id with weights. weight: of the divergence from the teacher in
    the loss, cross-entropy has the rest. temperature: by which the logits of both are divided for the divergence."""

    teacher: str
    weight: Annotated[float, Range(0, 1)] = 0.5
    temperature: Annotated[float, Range(0.01, 100)] = 1.0


def as_distill(values: dict[str, Any]) -> DistillOptions:
    """The checked options of --distill. Raises UserError."""
    return DistillOptions(**check_fields(DistillOptions, values, "--distill"))


class Distillation:
    """A teacher, a Decoder, and the divergence from it since `begin_step`. Not a module, so that its parameters are not
    those of the model that learns from it."""

    def __init__(self, teacher: Any, options: DistillOptions):
        self.teacher = teacher.eval().requires_grad_(False)
        self.options = options
        self.sums = torch.zeros(2, dtype=torch.float64, device=teacher.lm_head.weight.device)
        """Divergence of the trained tokens, and their number."""

    def begin_step(self) -> None:
        self.sums.zero_()

    def entropy_of(self, input_ids: Tensor, doc_ids: Tensor | None) -> EntropyOf:
        """The loss of chunks of the tokens [B, S], which have run through the teacher's layers."""
        with torch.no_grad():
            hidden = self.teacher.hidden_states(input_ids, doc_ids)[0].flatten(0, -2)  # [T, C]

        def chunk_entropy(chunk: slice) -> Entropy:
            def entropy(logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool) -> Tensor:
                weight, temperature = self.options.weight, self.options.temperature
                teacher = self.teacher.lm_head(hidden[chunk])  # [t, V]
                found = distilled_cross_entropy(logits, teacher, labels, z_loss, weight, temperature, with_grad)
                self.sums += torch.stack([found[2].sum(), (labels != IGNORED).sum()])
                return found[:2]

            return entropy

        return chunk_entropy
