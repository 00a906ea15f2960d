"""The size of a decoder: parameters and FLOPs per token, from its config alone."""

import dataclasses
from typing import NamedTuple

from qtrain.models.config import ModelConfig

LAYER_LINEARS = ("qkv", "o_proj", "gate_up", "down_proj")
"""The linears of a layer, by the last part of their names."""


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. A tied embedding counts once."""

    embedding: int
    """Embedding, and the head unless it is tied to it."""
    linear: int
    """Weights of the linears inside the layers: what a scheme quantizes."""
    other: int
    """Biases and norms."""

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.other

    @property
    def non_embedding(self) -> int:
        return self.linear + self.other


class ParameterGroup(NamedTuple):
    """`count` parameters of one shape. hidden: they are matrices of hidden layers; parts: rows of the projections fused
    in each, () for a single one."""

    shape: tuple[int, ...]
    count: int = 1
    hidden: bool = False
    parts: tuple[int, ...] = ()


def layer_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out-features, in-features) of each of LAYER_LINEARS."""
    c, inner = config.hidden_size, config.intermediate_size
    shapes = [(config.qkv_size, c), (c, config.q_size), (2 * inner, c), (c, inner)]
    return dict(zip(LAYER_LINEARS, shapes, strict=True))


def count_parameters(config: ModelConfig) -> ParameterCount:
    c, inner = config.hidden_size, config.intermediate_size
    linear = sum(n * k for n, k in layer_linears(config).values())
    other = 2 * c
    other += config.qkv_size * config.qkv_bias + c * config.o_bias
    other += (2 * inner + c) * config.mlp_bias
    other += 2 * config.head_dim * config.qk_norm
    other += (config.q_size + inner) * config.sub_norm
    layers = config.num_hidden_layers
    matrices = 1 if config.tie_word_embeddings else 2
    return ParameterCount(matrices * config.vocab_size * c, layers * linear, layers * other + c)


def parameter_shapes(config: ModelConfig) -> list[ParameterGroup]:
    """All parameters. Biases and norms are one entry, as a vector."""
    inner, kv = config.intermediate_size, config.kv_size
    fused = {"qkv": (config.q_size, kv, kv), "gate_up": (inner, inner)}
    matrices = [
        ParameterGroup(shape, config.num_hidden_layers, True, fused.get(name, ()))
        for name, shape in layer_linears(config).items()
    ]
    embedding = ParameterGroup((config.vocab_size, config.hidden_size), 1 if config.tie_word_embeddings else 2)
    return [*matrices, embedding, ParameterGroup((count_parameters(config).other,))]


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs per token of forward and backward, two per multiply-add, without recomputation."""

    blocks: float
    """The layers' linears, which run in the scheme's dtype."""
    head: float
    attention: float
    """q·kᵀ and p·v over the keys that a causal query sees, on average half of the sequence."""

    @property
    def total(self) -> float:
        return self.blocks + self.head + self.attention


def flops_per_token(config: ModelConfig, seq_len: int) -> Flops:
    return Flops(
        blocks=6.0 * count_parameters(config).linear,
        head=6.0 * config.vocab_size * config.hidden_size,
        attention=6.0 * config.num_hidden_layers * config.q_size * seq_len,
    )
