"""Memory of the output head and the loss, from a model's config alone. The forward pass of the loss computes its
gradients, a chunk of tokens after the other (`models/native/loss.py`).

Letters: T tokens of a micro-batch, t of a chunk, C width, V vocabulary, b bytes per element of the model's dtype.

                                          at the loss             at the head's backward
    last layer's output, and normed       2·T·C·b                 2·T·C·b
    1/rms of the norm, token ids, labels  (4 + 16)·T              -
    gradient of hidden states             T·C·b                   T·C·b
    gradient of the head, if it trains    4·V·C                   4·V·C, and V·C·b: scaled
      of a quantized head of few chunks   V·C·b of each           V·C·b of each
      of more chunks                      4·V·C, and 2·V·C·b      4·V·C, and V·C·b: scaled (*)
    a chunk of logits                     t·V·b                   -
    a quantized head's besides: codes of
      their gradient, a layout            t·V·b / 2               -
      and the other one, if it trains     t·V·b / 2               -

(*) and V·C·b of an odd chunk, which is left to add
"""

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import LowBitBytes
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.native.loss import AT_ONCE, FEW_CHUNKS


def loss_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    """While the loss of a chunk is computed."""
    c, element, tokens, head = config.hidden_size, step.element, step.tokens, trained.head_elements(config)
    logits = step.loss_rows * config.vocab_size * element
    gradient, _ = _gradient_elements(step, low_bit)
    loss = tokens * (3 * c * element + 4 + 16) + head * gradient + logits
    if low_bit.head is None:
        return loss
    return loss + (logits if head else logits / 2)  # codes


def head_backward_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    """When the head's gradient is given to autograd, before the backward pass of layers."""
    hidden = step.tokens * config.hidden_size * 3 * step.element
    return hidden + trained.head_elements(config) * _gradient_elements(step, low_bit)[1]


def _gradient_elements(step: StepShape, low_bit: LowBitBytes) -> tuple[int, int]:
    """Bytes per element of the gradient of the head's weight: at the loss of the last chunk, and when it is scaled."""
    chunks, element = step.loss_parts, step.element
    if low_bit.head is None:
        return 4, 4 + element
    if chunks <= FEW_CHUNKS:
        return chunks * element, chunks * element  # scaled in the first one's memory
    return 4 + AT_ONCE * element, 4 + element + chunks % AT_ONCE * element
