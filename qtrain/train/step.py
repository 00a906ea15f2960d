"""One optimizer step in its two halves, gradients and update; and one evaluation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtrain.data import Batch
from qtrain.quant import QuantizedModel
from qtrain.train.language import Forward


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


def count_trained(batches: Iterable[Batch]) -> int:
    """How many tokens have a label that is trained on."""
    return sum(int((batch.labels >= 0).sum()) for batch in batches)


def compute_gradients(
    model: nn.Module, forward: Forward, quantized: QuantizedModel, batches: list[Batch], step: int
) -> Gradients:
    """Forward and backward over the micro-batches of one step.

    The loss of every micro-batch is divided by the trained tokens of the whole step, so that the gradient is the same
    however the step is split.
    """
    quantized.assert_fresh()
    trained = max(count_trained(batches), 1)
    nll = torch.zeros((), device=next(model.parameters()).device)
    for number, batch in enumerate(batches):
        quantized.set_step(step * len(batches) + number)
        sums = forward(batch)
        (sums.loss / trained).backward()
        nll += sums.nll
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).float()
    # The only wait for the GPU in a step: a gradient that is not finite must not touch the weights.
    loss, norm_value = torch.stack([nll / trained, norm]).tolist()
    return Gradients(loss, norm, norm_value, sum(batch.input_ids.numel() for batch in batches))


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    quantized: QuantizedModel,
    gradients: Gradients,
    *,
    lr: float,
    clip_grad_norm: float,
) -> None:
    """Clip (0: do not), update the weights at rate `lr`, free the gradients, and renew the codes of every weight."""
    if clip_grad_norm and gradients.norm_value > clip_grad_norm:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip_grad_norm, gradients.norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    quantized.refresh()


@torch.no_grad()
def evaluate(model: nn.Module, forward: Forward, batches: Iterable[Batch]) -> float:
    """Mean loss per trained token over all batches, without z-loss; the model comes back in the mode it had."""
    was_training = model.training
    model.eval()
    nll = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    trained = 0
    for batch in batches:
        nll += forward(batch).nll
        trained += count_trained([batch])
    model.train(was_training)
    return float(nll) / max(trained, 1)
