"""Memory of gradients of weights, from a model's config alone: which exist at which moment of a step.

                              forward         last layer's     first layer's or embedding's       optimizer's step
                                              backward         backward
    all on the device         the sums, if    the head's (*)   all but the embedding's and what   all
                              they            and its MLP's    the layer is still to compute, or
                              accumulate                       all (`end_of_backward`)
    optimizer within          -               a tied head's    those of the largest partition     the same
      backward                                                 that is updated at once
    full sharding             the sums'       the head's and   the sums' shard, two messages of   the sums' shard
                              shard           its message      layers or the embedding's
    host memory, one process  a buffer, and   the head's, or   a buffer, what does not move,      a buffer, and what
                              what does not   a layer's        and two units                      does not move
                              move
    host memory, of ranks     a buffer        as full          a buffer, two messages             a shard, and a buffer
                                              sharding

(*) if it is not added to another at once. That of a tied embedding exists from the head's backward on, together with a
layer's. Where the optimizer runs within the backward pass of sharded layers, gradients are those outside of layers, and
no sums are kept of the others.
"""

from typing import NamedTuple

from qtrain.core.hardware.host_memory import PIECE_BYTES
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.full_shard_memory import FullShardBytes, host_gradient_bytes
from qtrain.models.cost.layer_backward import ByHalf
from qtrain.models.cost.linear_bytes import LowBitBytes
from qtrain.models.cost.parameters import count_parameters, embedding_elements, layer_linears, layer_weights
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.cost.weight_memory import RankShare


class GradientBytes(NamedTuple):
    """Bytes of gradients on the device, by moment."""

    held: int
    """Of earlier micro-batches, which exist during the forward pass."""
    at_last_layer: int
    """Besides those held, while the last layer's backward runs."""
    at_end: int
    """At the end of the backward pass."""
    at_step: int
    """From which the optimizer's step updates."""
    in_masters_dtype: float = 0
    """That the optimizer's step makes of those of masters which are not the model's own weights."""
    on_host: int = 0
    """Of their sums in pinned host memory."""
    arriving: int = 0
    """Of a linear's weight that is there while its codes are computed, as another layer's backward runs."""


def gradient_bytes(
    config: ModelConfig,
    step: StepShape,
    low_bit: LowBitBytes,
    trained: TrainedPart,
    share: RankShare,
    full: FullShardBytes | None,
) -> GradientBytes:
    """full: of layers that are fully sharded; None: they are not."""
    gradients, head = trained.bytes, step.element * trained.head_elements(config)
    if step.in_backward:
        gradients = min(gradients, step.element * _largest_partition(config))
    # With sums these are rounded in their memory.
    in_masters_dtype = 0 if full and full.sums and not step.in_backward else gradients * share.gradients
    if step.gradients_on_host and share.states == 1:
        return _on_host(config, step, low_bit, trained)._replace(in_masters_dtype=in_masters_dtype)
    if full is not None:
        at_last_layer = head + full.head_message
        if step.gradients_on_host:
            at_step = round(trained.bytes * share.states) + PIECE_BYTES
            at_end = PIECE_BYTES + full.last
            return GradientBytes(PIECE_BYTES, at_last_layer, at_end, at_step, in_masters_dtype, full.sums)
        sums = 0 if step.in_backward else full.sums
        return GradientBytes(step.accumulates * sums, at_last_layer, sums + full.last, sums, in_masters_dtype)
    waits = config.tie_word_embeddings or not (step.accumulates or step.in_backward)
    return GradientBytes(step.accumulates * gradients, head * waits, gradients, gradients, in_masters_dtype)


def _on_host(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> GradientBytes:
    """Of one process whose weights that train, and sums of gradients, are in host memory."""
    matrix, element = embedding_elements(config), step.element
    layer, sums = element * layer_weights(config).largest, host_gradient_bytes(config, element, low_bit, trained)
    linears = [n.weights for n in layer_linears(config).values()]
    buffer = min(PIECE_BYTES, element * max(*linears, matrix * (not config.tie_word_embeddings)))
    at_step = trained.bytes - sums + buffer
    return GradientBytes(
        held=at_step if step.accumulates else buffer,
        # Of the head, or of the layer before, while they are added to the sums.
        at_last_layer=max(element * trained.head_elements(config), layer),
        # Of the unit that is added, and of the one whose backward pass runs meanwhile.
        at_end=at_step + layer + max(layer, trained.ends(config)[0] * element * matrix),
        at_step=at_step,
        on_host=sums,
        # That of the head is gone before the loss.
        arriving=element * max(weights * linear.codes_only for _, _, weights, linear in low_bit.linears(config)),
    )


def _largest_partition(config: ModelConfig) -> int:
    """Parameters whose gradients exist at once where each layer, and each embedding, is updated by itself."""
    other, matrix = count_parameters(config).other, embedding_elements(config)
    # Norms, biases and routers are the layers', but for the last norm's C.
    layer = layer_weights(config).largest + (other - config.hidden_size) // config.num_hidden_layers
    return layer + matrix if config.tie_word_embeddings else max(layer, matrix)


def layer_gradients(config: ModelConfig, trained: TrainedPart, index: int) -> ByHalf:
    """Of the layer `index`; of adapters, which are small, those of a dense MLP."""
    if trained.adapters:
        return ByHalf(trained.element * trained.mlp_elements(config), 0.0)
    weights = layer_weights(config)
    mlp = weights.mixture if index in config.moe_layers else weights.dense
    return ByHalf(trained.element * mlp, trained.element * weights.attention)


class EndOfBackward(NamedTuple):
    """Bytes at the widest moment of the end of the backward pass."""

    gradients: float
    activations: float
    temporaries: float


def end_of_backward(
    config: ModelConfig, step: StepShape, trained: TrainedPart, layer: ByHalf, one_layer: float
) -> EndOfBackward:
    """Of a model whose gradients all stay on the device. one_layer: what the first layer keeps."""
    matrix, (embedding, _) = step.element * embedding_elements(config), trained.ends(config)
    own, tied = layer_gradients(config, trained, 0), config.tie_word_embeddings and trained.head
    # A tied embedding's gradient, and its sum with the head's, which waits for it; then what an earlier sum receives.
    at_embedding = matrix * ((embedding or tied) * step.accumulates + 2 * tied)
    ends = [EndOfBackward(trained.bytes, 0.0, step.tokens * config.hidden_size * step.element + at_embedding)]
    if step.accumulates:
        ends.append(EndOfBackward(trained.bytes, one_layer, layer.with_gradients(own) + matrix * tied))
    else:
        # Those of the embedding, and of what is still to be computed in the first layer, do not exist yet.
        before = trained.bytes - matrix * embedding
        ends.append(EndOfBackward(before - own.mlp - own.attention, one_layer, layer.mlp))
        ends.append(EndOfBackward(before - own.attention, one_layer, layer.attention))
    return max(ends, key=sum)
