"""Bytes of device memory that a step reads and writes: for each token between products, and by settings of memory.

`moved_bytes` tells settings apart that only move memory: products run at the same rate whatever the micro-batch, but
each micro-batch reads all weights and adds to all gradients, each chunk of the loss adds to the head's gradient, each
chunk of an MLP reads its weights, what is in host memory passes through the device's.

`between_products` is for each token, of a layer with C, I, QKV and b as in `saved_activations.py`:

    norms, with the sums before them    2·4·C·b forward: two tensors read, two written; 2·4·C·b backward: three read
    norms before o_proj, down_proj      2·K·b forward, 3·K·b backward, of the K inputs of that linear
    rotary positions                    2·QKV·b in each pass
    SwiGLU                              3·I·b forward, 5·I·b backward
    quantizers                          what each reads, and the codes that it writes (`scheme_bytes.quantizer_bytes`)
    adapters, for each linear [N, K]    2·N·b of dy, for dz and db; 2·K·b of x, for z and da, or of their codes; and
                                        where their product is added in passes of its own, these
                                        (`scheme_bytes.adapter_passes`)
    what is not kept                    computed again: RECOMPUTED_PASSES times its bytes

and of the loss, with V logits, 3·V·b: two reads, and their gradient; V·b where the head's quantizer computes that.
What a GEMM or attention itself reads and writes is part of its rate.
"""

from collections.abc import Iterable

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.full_shard_memory import comes_and_goes, host_gradient_bytes
from qtrain.models.cost.linear_bytes import LinearBytes, LowBitBytes, layer_kinds
from qtrain.models.cost.parameters import (
    DENSE_MLP,
    LayerLinear,
    attention_input_size,
    count_parameters,
    embedding_elements,
    forward_again,
    layer_linears,
    products_again,
)
from qtrain.models.cost.saved_activations import saved_of_kind
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import AdaptedLinear, TrainedPart
from qtrain.models.native.loss import AT_ONCE, FEW_CHUNKS
from qtrain.models.native.recompute import Kinds

CODES_READS = 2.6
"""How often adapters' products with codes would have read them in the time that they take: an H200, 7B, rank 16."""
RECOMPUTED_PASSES = 3
"""Times that a recomputed tensor moves: its inputs are read, it is written, and what reads it does so from memory."""


def between_products(
    config: ModelConfig, step: StepShape, low_bit: LowBitBytes, adapters: Iterable[AdaptedLinear] = ()
) -> float:
    """Bytes per token of forward and backward, of all layers and the loss."""
    c, element, layers = config.hidden_size, step.element, layer_linears(config)
    # 16·C: norms, 2·4·C in each pass; 4·QKV: rotary positions, 2·QKV in each.
    total = float(config.num_hidden_layers * element * (16 * c + 4 * attention_input_size(config)))
    for name, count, _, linear in low_bit.linears(config):
        n = layers[name]
        rows, columns = n.active * n.out_features, n.active * n.in_features
        if config.sub_norm and name in ("o_proj", "down_proj"):
            total += count * 5 * columns * element
        total += count * (columns * linear.x_quantizer + rows * linear.dy_quantizer)
        if name.endswith("gate_up"):
            # Fused with both quantizers, SwiGLU's results are never in memory: not written, and not read again.
            fused = 2 * 3 if low_bit.swiglu_codes else 0
            total += count * rows / 2 * element * (8 - fused)
    total += sum(_adapter(layers[a.name], a, element, low_bit.layer[a.name], step.recompute) for a in adapters)
    total += (1 if low_bit.softmax_codes else 3) * config.vocab_size * element
    if low_bit.head is not None:
        total += c * low_bit.head.x_quantizer + config.vocab_size * low_bit.head.dy_quantizer
    return total + _recomputed(config, step, low_bit)


def requantized_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes) -> float:
    """That are read and written where the weights of all linears are quantized again, once a step."""
    head = [] if low_bit.head is None else [(embedding_elements(config), low_bit.head)]
    return sum(n * (step.element + linear.codes) for n, linear in (*low_bit.sizes(config), *head) if linear.codes)


def _adapter(n: LayerLinear, adapted: AdaptedLinear, element: int, linear: LinearBytes, kinds: Kinds) -> float:
    again = adapted.name in products_again(kinds)
    # x is read for z and da, dy for dz and db, or codes of them; z · bᵀ is added to y, dz · a to dx.
    x_bytes, dy_bytes = float(element), float(element)
    if linear.kept_input is not None:
        x_bytes, dy_bytes = CODES_READS * linear.kept_input, CODES_READS * linear.dy_codes or element
    x = (2 + again) * x_bytes + element * linear.adapter_passes
    dy = 2 * dy_bytes + element * (1 + again) * linear.adapter_passes
    return adapted.layers * n.active * (n.in_features * x + n.out_features * dy)


def moved_bytes(
    config: ModelConfig, step: StepShape, micro_batches: int, low_bit: LowBitBytes, trained: TrainedPart
) -> float:
    """Of the micro-batches of one step."""
    return micro_batches * (
        _weights_and_gradients(config, step, low_bit, trained)
        + _loss_chunks(config, step, low_bit, trained)
        + _mlp_chunks(config, step, low_bit, trained)
        # Layers' inputs are read when they leave the device, written when they come back.
        + 2.0 * step.residuals_away * step.tokens * config.hidden_size * step.element * config.num_hidden_layers
        + _host_weights(config, step, low_bit)
        + _host_gradients(config, step, low_bit, trained)
    )


def _weights_and_gradients(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    # `output` and `grad_input` read a weight each; of codes there is a layout for either.
    linears = low_bit.sizes(config)
    plain = total = count_parameters(config).total
    if any(linear.codes for _, linear in linears):  # all that is outside of layers counts as they do
        plain = sum(size for size, linear in linears if not linear.codes) * bool(low_bit.layers)
    read = 2.0 * (total - plain) + 2.0 * step.element * plain
    # What is dequantized for a product is read in its format, written, and read by the product; again where layers
    # are recomputed.
    products = 2 + forward_again(config, step.recompute)["blocks"]
    read += sum(
        size * (products * (linear.weight + 2 * linear.temporary) - 2 * step.element)
        for size, linear in linears
        if linear.temporary and not linear.codes
    )
    remade = sum(size * linear.remade for size, linear in linears)
    # Gradients are written; where they accumulate, the sum is read too.
    return read + remade + trained.bytes * (2 if step.accumulates else 1)


def _loss_chunks(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    if not (step.loss_parts > 1 and trained.head):
        return 0.0
    # The sum in fp32 is read and written; a quantized head's gradients are tensors of their own before that.
    chunk_bytes = 2.0 * 4
    if low_bit.head is not None:
        chunk_bytes = 2 * step.element + (2 * 4 / AT_ONCE if step.loss_parts > FEW_CHUNKS else 0)
    return step.loss_parts * embedding_elements(config) * chunk_bytes


def _mlp_chunks(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    chunks = -(-step.tokens // step.mlp_rows)
    if chunks == 1 or config.moe_layers:
        return 0.0
    chunk_bytes = 0.0
    for name, count, weights, linear in low_bit.linears(config):
        if name in DENSE_MLP:
            # Read by the forward pass, again in the backward pass, and by that itself; what is dequantized is written
            # too.
            chunk_bytes += count * 3 * weights * ((1.0 if linear.codes else step.element) + 2 * linear.temporary)
    # The sum in fp32 is read and written, and a chunk's gradient is a tensor of its own before that.
    chunk_bytes += config.num_hidden_layers * trained.mlp_elements(config) * (2 * 4 + 2 * trained.element)
    # One chunk moves what an MLP without chunks moves.
    return (chunks - 1) * chunk_bytes


def _host_weights(config: ModelConfig, step: StepShape, low_bit: LowBitBytes) -> float:
    if not step.weights_on_host:
        return 0.0
    # Written in both passes; where products read codes, the weight is read then, and they are written.
    coded = sum(size * (linear.weight + linear.codes) for size, linear in low_bit.sizes(config) if linear.codes)
    return 2.0 * (comes_and_goes(config, low_bit, step.element) + coded)


def _host_gradients(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    if not (step.gradients_on_host and step.weights_on_host):
        return 0.0
    # Besides what gradients in memory move: the sum that comes is written, the gradient read, and the new sum written,
    # read for its norm, and read as it leaves.
    return 5.0 * host_gradient_bytes(config, step.element, low_bit, trained)


def _recomputed(config: ModelConfig, step: StepShape, low_bit: LowBitBytes) -> float:
    def kept(recompute: Kinds) -> float:
        kinds = layer_kinds(config, step.tokens, low_bit)
        return sum(kind.count * sum(saved_of_kind(config, step, kind, recompute).values()) for kind in kinds)

    return RECOMPUTED_PASSES * max(kept(frozenset()) - kept(step.recompute), 0.0)
