"""Cost of the teacher of --distill: its weights, its forward pass, and a second chunk of logits at the loss."""

import dataclasses

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import rows_per_token
from qtrain.models.cost.memory import MemoryEstimate
from qtrain.models.cost.parameters import attention_input_size, count_parameters, flops_per_token
from qtrain.models.cost.step_shape import StepShape


def with_teacher(student: MemoryEstimate, teacher: ModelConfig, step: StepShape) -> MemoryEstimate:
    """The memory of a run of the student that learns from a teacher, which is not sharded."""
    tokens, element = step.tokens, step.element
    hidden = tokens * teacher.hidden_size * element  # what its layers end with, until the loss
    logits = step.loss_rows * teacher.vocab_size * element
    return dataclasses.replace(
        student,
        weights=student.weights + count_parameters(teacher).total * element,
        loss=student.loss + hidden + logits,
        teacher=round(tokens * element * _layer_elements(teacher, tokens)),
    )


def teacher_flops(teacher: ModelConfig, seq_len: int) -> float:
    """Per token, of its forward pass alone."""
    return flops_per_token(teacher, seq_len).total / 3


def _layer_elements(config: ModelConfig, tokens: int) -> float:
    """Per token, the most that a layer's forward pass has at once where nothing is kept for backward."""
    # The residual, its norm, and: q, k, v, then q and k with positions, and attention's output; or gate and up, and
    # their product; of a mixture those of its rows, with their inputs.
    mlp = 3 * config.intermediate_size
    if rows := rows_per_token(config, tokens):
        own = rows * (3 * config.mixture.width + config.hidden_size)
        mlp = max(own, mlp if len(config.moe_layers) < config.num_hidden_layers else 0)
    return 2 * config.hidden_size + max(2 * attention_input_size(config), mlp)
