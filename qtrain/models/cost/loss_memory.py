"""Memory of the output head and the loss, from a model's config alone. The forward pass of the loss computes its
gradients, a chunk of tokens after the other (`models/native/loss.py`).

Letters: T tokens of a micro-batch, t of a chunk, C width, V vocabulary, b bytes per element of the model's dtype.

                                          at the loss             at the head's backward
    last layer's output, and normed       2·T·C·b                 2·T·C·b
    1/rms of the norm, token ids, labels  (4 + 16)·T              -
    gradient of hidden states             T·C·b                   4·T·C: kept, and scaled
    gradient of the head, if it trains    4·V·C (*)               4·V·C (*), and V·C·b: scaled
    a chunk of logits                     t·V·b                   -
    a quantized head's besides: codes of
      their gradient, a layout            t·V·b / 2               -
      and the other one, if it trains     t·V·b / 2               -
      a gradient of the weight to add     V·C·b; one chunk: none  -

(*) fp32, as chunks add it up; V·C·b of a quantized head whose loss is one chunk
"""

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import LowBitBytes
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import TrainedPart


def loss_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    """While the loss of a chunk is computed."""
    c, element, tokens, head = config.hidden_size, step.element, step.tokens, trained.head_elements(config)
    logits = step.loss_rows * config.vocab_size * element
    loss = tokens * (3 * c * element + 4 + 16) + head * _gradient_element(step, low_bit) + logits
    if low_bit.head is None:
        return loss
    codes = logits if head else logits / 2
    return loss + codes + head * element * step.chunked_loss


def head_backward_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    """When the head's gradient is given to autograd, before the backward pass of layers."""
    hidden = step.tokens * config.hidden_size * (2 * step.element + 4)
    return hidden + trained.head_elements(config) * (_gradient_element(step, low_bit) + step.element)


def _gradient_element(step: StepShape, low_bit: LowBitBytes) -> int:
    """Bytes per element of the gradient of the head's weight that the loss keeps: fp32 where chunks are added up."""
    return 4 if low_bit.head is None or step.chunked_loss else step.element
