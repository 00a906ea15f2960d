"""What a run costs in which not everything trains: frozen weights have neither gradient nor optimizer state, and of
their three products two; adapters add parameters of their own, and keep the inputs that a frozen linear would not.

An adapted layer keeps, a token, beyond what a frozen one does (b bytes an element, P projections of rank r a linear):

    input of each adapted linear    its width · b, where the layer does not keep it for other reasons (`cost.py`)
    that input times A              P·r·b
    DoRA: what is scaled            its rows · b, of qkv and down; elsewhere it stands for the scaled, made again
"""

import dataclasses
import math
from collections.abc import Mapping

from qtrain.models.config import ModelConfig
from qtrain.models.lora import Lora, chosen_targets

Shapes = list[tuple[tuple[int, ...], int, bool, tuple[int, ...]]]
"""Shape, how many, whether a hidden layer's matrix, rows of fused projections: as `cost.parameter_shapes`."""

_KEPT_FOR = {"qkv": "attn_norm output", "gate_up": "mlp_norm output", "down_proj": "down input"}
"""The tensor of `cost.saved_per_token` that is kept as a linear's input and for nothing else."""


@dataclasses.dataclass(frozen=True)
class AdaptedLinear:
    """A linear of every layer with adapters: columns is P·r, rows those of its adapted projections."""

    name: str
    in_features: int
    out_features: int
    rows: tuple[int, ...]
    columns: int


@dataclasses.dataclass(frozen=True)
class TrainedPart:
    """What of a model trains. head: its output head does; adapters: nothing else than these, in fp32.

    element: bytes of a trained parameter and of its gradient.
    """

    shapes: Shapes
    element: int
    head: bool
    adapters: tuple[AdaptedLinear, ...] = ()
    dora: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the trained parameters, and of their gradients."""
        return self.element * sum(math.prod(shape) * count for shape, count, *_ in self.shapes)

    def added_bytes(self, layers: int, element: int) -> int:
        """Bytes of what a model of this element size has not without it: adapters, their copies in its dtype, and with
        DoRA the lengths of the frozen rows."""
        if not self.adapters:
            return 0
        copies = sum(a.columns * (a.in_features + a.out_features) for a in self.adapters) * element
        lengths = 4 * sum(a.out_features for a in self.adapters)
        return self.bytes + layers * (copies * (element < self.element) + lengths * self.dora)

    def kept(self, kept: Mapping[str, float], element: int) -> dict[str, float]:
        """`cost.saved_per_token`, given for plain linears, of a layer with these adapters."""
        found = dict(kept)
        if not self.adapters or len(kept) == 1:  # the layer is computed again
            return found
        adapted = {adapted.name for adapted in self.adapters}
        for name, tensor in _KEPT_FOR.items():
            if name not in adapted and tensor in found:
                found[tensor] = 0
        found["inputs times A"] = element * sum(a.columns for a in self.adapters)
        if self.dora:
            scaled = sum(a.out_features for a in self.adapters if a.name in ("qkv", "down_proj"))
            found["scaled by DoRA"] = element * scaled
        return found

    def flops(self, flops: Mapping[str, float], layers: int) -> dict[str, float]:
        """FLOPs a token by kind, given those of a model in which everything trains."""
        if not self.adapters:
            return {**flops, "head": flops["head"] * (1 if self.head else 2 / 3)}
        frozen = {kind: flops[kind] * 2 / 3 for kind in ("blocks", "head")}
        own = sum((a.in_features + sum(a.rows) / len(a.rows)) * a.columns for a in self.adapters)
        return {**flops, **frozen, "adapters": 6.0 * layers * own}


def all_but_embedding(config: ModelConfig, shapes: Shapes, element: int) -> TrainedPart:
    """A model (`shapes`: all of its parameters) whose embedding is frozen, and the head where that is the same."""
    matrix = (config.vocab_size, config.hidden_size)
    rest = [(shape, count - (shape == matrix and not hidden), hidden, parts) for shape, count, hidden, parts in shapes]
    return TrainedPart(rest, element, head=not config.tie_word_embeddings)


def only_adapters(config: ModelConfig, lora: Lora) -> TrainedPart:
    """A frozen model with adapters. UserError for a target that it does not have."""
    c, inner, kv = config.hidden_size, config.intermediate_size, config.kv_size
    linears = {
        "qkv": (c, {"q_proj": config.q_size, "k_proj": kv, "v_proj": kv}),
        "o_proj": (config.q_size, {"o_proj": c}),
        "gate_up": (c, {"gate_proj": inner, "up_proj": inner}),
        "down_proj": (inner, {"down_proj": c}),
    }
    targets = chosen_targets(lora, sorted(word for _, rows in linears.values() for word in rows))
    layers, shapes, adapters = config.num_hidden_layers, [], []
    for name, (in_features, projections) in linears.items():
        rows = tuple(size for word, size in projections.items() if word in targets)
        if rows:
            adapters.append(
                AdaptedLinear(name, in_features, sum(projections.values()), rows, columns=lora.r * len(rows))
            )
        for size in rows:
            shapes += [((lora.r, in_features), layers, True, ()), ((size, lora.r), layers, True, ())]
            shapes += [((size,), layers, False, ())] if lora.dora else []
    return TrainedPart(shapes, 4, head=False, adapters=tuple(adapters), dora=lora.dora)
