"""Bytes of device memory that a step reads and writes because of settings that only move memory.

They tell such settings apart: products run at the same rate whatever the micro-batch, but each micro-batch reads all
weights and adds to all gradients, each chunk of the loss adds to the head's gradient, each chunk of an MLP reads its
weights, and what is not kept is computed again. What all settings have in common is left out.
"""

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.full_shard_memory import comes_and_goes
from qtrain.models.cost.memory import StepShape
from qtrain.models.cost.parameters import count_parameters
from qtrain.models.cost.saved_activations import LowBitBytes, layer_kinds, saved_per_token
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.native.loss import chunk_rows
from qtrain.models.native.recompute import Kinds

RECOMPUTED_PASSES = 3
"""Times that a recomputed tensor moves: its inputs are read, it is written, and what reads it does so from memory."""


def moved_bytes(
    config: ModelConfig, step: StepShape, micro_batches: int, low_bit: LowBitBytes, trained: TrainedPart
) -> float:
    """Of the micro-batches of one step."""
    return micro_batches * (
        _weights_and_gradients(config, step, low_bit, trained)
        + _loss_chunks(config, step, low_bit, trained)
        + _recomputed(config, step, low_bit)
        + _mlp_chunks(config, step, low_bit, trained)
        + _residuals(config, step)
        + _host_weights(config, step, low_bit)
    )


def _weights_and_gradients(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    # `output` and `grad_input` read a weight each; of codes there is a layout for either.
    linears = list(low_bit.linears(config))
    plain = total = count_parameters(config).total
    if any(linear.codes for *_, linear in linears):  # all that is outside of layers counts as they do
        plain = sum(count * weights for _, count, weights, linear in linears if not linear.codes) * bool(low_bit.layers)
    read = 2.0 * (total - plain) + 2.0 * step.element * plain
    remade = sum(count * weights * linear.remade for _, count, weights, linear in linears)
    # Gradients are written; where they accumulate, the sum is read too.
    return read + remade + trained.bytes * (2 if step.accumulates else 1)


def _loss_chunks(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    chunks = -(-step.tokens // chunk_rows(step.tokens, step.loss_chunks, large=True))
    if chunks == 1 or not trained.head:
        return 0.0
    # The sum in fp32 is read and written; a quantized head's gradient is a tensor of its own before that.
    of_chunk = 2 * 4 + (2 * step.element if low_bit.head is not None else 0)
    return chunks * config.vocab_size * config.hidden_size * of_chunk


def _mlp_chunks(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    chunks = -(-step.tokens // step.mlp_rows)
    if chunks == 1 or config.moe_layers:
        return 0.0
    of_chunk = 0.0
    for name, count, weights, linear in low_bit.linears(config):
        if name in ("gate_up", "down_proj"):
            # Read by the forward pass, again in the backward pass, and by that itself; what is dequantized is written
            # too.
            of_chunk += count * 3 * weights * ((1.0 if linear.codes else step.element) + 2 * linear.temporary)
    # The sum in fp32 is read and written, and a chunk's gradient is a tensor of its own before that.
    of_chunk += config.num_hidden_layers * trained.mlp_elements(config) * (2 * 4 + 2 * trained.element)
    # One chunk moves what an MLP without chunks moves.
    return (chunks - 1) * of_chunk


def _residuals(config: ModelConfig, step: StepShape) -> float:
    # Read when they leave the device, written when they come back.
    return 2.0 * step.residuals_on_host * step.tokens * config.hidden_size * step.element * config.num_hidden_layers


def _host_weights(config: ModelConfig, step: StepShape, low_bit: LowBitBytes) -> float:
    # Written in both passes.
    return 2.0 * comes_and_goes(config, low_bit, step.element) if step.weights_on_host else 0.0


def _recomputed(config: ModelConfig, step: StepShape, low_bit: LowBitBytes) -> float:
    def kept(recompute: Kinds) -> float:
        return sum(
            kind.count
            * sum(saved_per_token(config, recompute, step.compiled, step.element, kind.low_bit, kind.rows).values())
            for kind in layer_kinds(config, step.tokens, low_bit)
        )

    if not step.recompute:
        return 0.0
    return RECOMPUTED_PASSES * step.tokens * max(kept(frozenset()) - kept(step.recompute), 0.0)
