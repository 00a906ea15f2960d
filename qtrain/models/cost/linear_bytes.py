"""Bytes of a model's linears under a scheme: weights, codes, and what backward keeps of their inputs."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from qtrain.kernels.grouped.token_permutation import padded_rows
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.parameters import LAYER_LINEARS, layer_linears


@dataclasses.dataclass(frozen=True)
class LinearBytes:
    """Bytes per element of a linear: of its weight, of the low-bit codes beside it, and of the codes of its input that
    backward keeps instead of the input (None: the input itself).

    temporary: of the whole weight while it is read, dequantized or in the codes of one product. remade: those that are
    read and written for such codes in each micro-batch, where they take the place of kept ones. codes_only: codes are
    all that is read; where masters are sharded, there is no full weight. wire: of the codes that ranks exchange in its
    place; 0: the weight itself. x_quantizer, dy_quantizer: per element of its input, and of its output's gradient, what
    is read and written where they are quantized. dy_codes: of that gradient's codes, all layouts. adapter_passes: times
    that an element of its output, or of its input's gradient, is read or written where the product of adapters is
    added.
    """

    weight: float
    codes: float = 0.0
    kept_input: float | None = None
    temporary: float = 0.0
    remade: float = 0.0
    codes_only: bool = False
    wire: float = 0.0
    x_quantizer: float = 0.0
    dy_quantizer: float = 0.0
    dy_codes: float = 0.0
    adapter_passes: float = 0.0

    @property
    def in_full(self) -> float:
        """Of what the products read, where masters are sharded."""
        return self.codes + (0 if self.codes_only else self.weight)


@dataclasses.dataclass(frozen=True)
class LowBitBytes:
    """Bytes of a model's linears under a scheme. layer: of each of LAYER_LINEARS; head: None for a plain output head;
    down_input_recomputed: backward recomputes down's input from gate_up's output instead of keeping it; swiglu_codes:
    the operator that computes down's input writes codes alone; gate_up_8bit: backward reads gate_up's output in 8
    bits; softmax_codes: the head's `grad_input` and `grad_weight` read codes that are computed from the logits.
    layers: of each layer with the linears that it has, where layers are not alike; () where all are as `layer`
    says."""

    layer: Mapping[str, LinearBytes]
    head: LinearBytes | None = None
    down_input_recomputed: bool = False
    swiglu_codes: bool = False
    gate_up_8bit: bool = False
    softmax_codes: bool = False
    layers: tuple["LowBitBytes", ...] = ()

    def linears(self, config: ModelConfig) -> Iterator[tuple[str, int, int, LinearBytes]]:
        """(key, how many, weights of each, bytes) of the layers' linears; where layers are not alike, those of a key
        more than once."""
        for name, linear in layer_linears(config).items():
            layer_counts = Counter(layer.layer[name] for layer in self.layers if name in layer.layer)
            if not self.layers and name in self.layer:
                layer_counts[self.layer[name]] = linear.layers
            for found, count in layer_counts.items():
                yield name, count, linear.weights, found

    def sizes(self, config: ModelConfig) -> list[tuple[int, LinearBytes]]:
        """(elements, bytes) of the layers' linears, those that are alike together."""
        return [(count * weights, linear) for _, count, weights, linear in self.linears(config)]

    @classmethod
    def plain(cls, element: int) -> "LowBitBytes":
        """The linears of a model that is not quantized."""
        return cls(dict.fromkeys(LAYER_LINEARS, LinearBytes(element)))


class LayerKind(NamedTuple):
    """`count` layers that are alike. rows: per token that a mixture's experts compute, with padding; 0: a plain MLP.
    low_bit: the bytes of their linears."""

    count: int
    rows: float
    low_bit: LowBitBytes


def layer_kinds(config: ModelConfig, tokens: int, low_bit: LowBitBytes) -> list[LayerKind]:
    """The layers of a model that reads micro-batches of this many tokens."""
    rows, routed = rows_per_token(config, tokens), config.moe_layers
    every = low_bit.layers or (low_bit,) * config.num_hidden_layers
    layers = [(rows if index in routed else 0.0, own) for index, own in enumerate(every)]
    distinct = [layer for index, layer in enumerate(layers) if layer not in layers[:index]]
    return [LayerKind(layers.count(layer), *layer) for layer in distinct]


def rows_per_token(config: ModelConfig, tokens: int) -> float:
    """Rows that a mixture's experts compute for each of `tokens`, with padding; 0 without a mixture."""
    mixture = config.moe
    if mixture is None:
        return 0.0
    return padded_rows(tokens * (mixture.reserved or mixture.per_token), mixture.experts) / tokens
