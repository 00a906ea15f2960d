"""The cost of a run in which not everything trains.

Frozen weights have no gradient, no optimizer state, and two of their three GEMMs. Adapters add parameters, and keep the
inputs that a frozen linear would not.

Bytes per token that an adapted layer keeps beyond a frozen one (b bytes per element, P projections of rank r a linear):

    input of each adapted linear    its width · b, unless the layer keeps it anyway (`saved_activations.py`); where
                                    adapters read codes of it (`quant/adapted_linear.py`), its width
    that input times A              P·r·b; of experts, for each row, r·b, and K with dropout: which elements it left
    DoRA: what is scaled            its rows · b, for qkv and down; the others recompute the scaled result
"""

import dataclasses
import math
from collections.abc import Mapping

from qtrain.models.adapters.lora import Lora, chosen_targets
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.parameters import (
    DENSE_MLP,
    ParameterGroup,
    embedding_elements,
    layer_linears,
    layer_weights,
    parameter_shapes,
    products_again,
)
from qtrain.models.native.lora_experts import EXPERT_TARGETS
from qtrain.models.native.recompute import Kinds
from qtrain.quant.adapted_experts import padded_rank

_KEPT_FOR = {
    "attn_norm output": {"qkv", "qkv_a"},
    "latent vectors": {"q_b", "kv_b"},
    "mlp_norm output": {"gate_up", "shared.gate_up", "experts.gate_up"},
    "down input": {"down_proj"},
    "shared input": {"shared.gate_up"},
    "shared down input": {"shared.down_proj"},
    "experts' input": set(),
    "experts' down input": set(),
}
"""Tensor of `saved_per_token` -> the linears as whose input alone it is kept."""


@dataclasses.dataclass(frozen=True)
class AdaptedLinear:
    """A linear with adapters. columns: P·r; rows: of each adapted projection; layers: how many have it.

    active: of a linear of experts, whose sizes are those of one, how many of them a token uses.
    """

    name: str
    in_features: int
    out_features: int
    rows: tuple[int, ...]
    columns: int
    layers: int
    active: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainedPart:
    """The parameters that train. element: bytes of each, and of its gradient. head: the output head trains; adapters:
    only these train, in fp32. in_linears: products of adapters are part of the low-bit linear's own function; dropout,
    and the rounding of merged weights, need the input itself."""

    shapes: list[ParameterGroup]
    element: int
    head: bool
    adapters: tuple[AdaptedLinear, ...] = ()
    dora: bool = False
    dropout: bool = False
    in_linears: bool = True

    @property
    def adapts_experts(self) -> bool:
        return any(a.active is not None for a in self.adapters)

    @property
    def bytes(self) -> int:
        """Bytes of the trained parameters, and of their gradients."""
        return self.element * sum(math.prod(group.shape) * group.count for group in self.shapes)

    @property
    def expert_bytes(self) -> int:
        """Those of experts among them."""
        return self.element * sum(math.prod(group.shape) * group.count for group in self.shapes if group.experts)

    def on_rank(self, ranks: int) -> "TrainedPart":
        """The same on a rank that has 1 / `ranks` of the experts."""

        def own(group: ParameterGroup) -> ParameterGroup:
            rows, *rest = group.shape
            return group._replace(shape=(rows // ranks, *rest), parts=group.parts[: len(group.parts) // ranks])

        shapes = [own(group) if group.experts else group for group in self.shapes]
        return dataclasses.replace(self, shapes=shapes)

    @property
    def added_bytes(self) -> int:
        """Bytes that adapters add to a model: themselves, and with DoRA the norms of the frozen rows."""
        norms = 4 * sum(a.layers * a.out_features for a in self.adapters)
        return self.bytes + norms * self.dora if self.adapters else 0

    def copies(self, element: int, kinds: Kinds) -> int:
        """Bytes of adapters in the model's dtype, which forward keeps for backward where a layer recomputes nothing."""
        # Those of experts are copied where they are read; fp32 ones multiply in an fp32 model without a copy.
        linears = [] if kinds or element == self.element else [a for a in self.adapters if a.active is None]
        return sum(a.layers * a.columns * (a.in_features + a.out_features) for a in linears) * element

    def kept(
        self, kept: Mapping[str, float], element: int, rows: float = 0.0, kinds: Kinds = frozenset()
    ) -> dict[str, float]:
        """`saved_per_token` of a layer with these adapters, given that of plain linears. rows: `LayerKind.rows`; kinds:
        what is recomputed."""
        found = dict(kept)
        if not self.adapters or len(kept) == 1:  # the layer is recomputed
            return found
        adapted = {adapted.name for adapted in self.adapters}
        for tensor, linears in _KEPT_FOR.items():
            if tensor in found and not linears & adapted:
                found[tensor] = 0
        # What A computes is a product like the linear's own.
        again = products_again(kinds)
        adapters = [a for a in self.adapters if a.name not in again]
        experts = [a for a in adapters if a.active is not None]
        found["inputs times A"] = element * sum(a.columns for a in adapters if a.active is None)
        found["experts' inputs times A"] = element * rows * sum(padded_rank(a.columns) for a in experts)
        found["experts' dropout"] = rows * sum(a.in_features for a in experts) * self.dropout
        if self.dora:
            # In a region o_proj's is kept in place of the stream after attention.
            own = {"qkv", "down_proj"} if kinds else {"qkv", "down_proj", "o_proj"}
            scaled = sum(a.out_features for a in self.adapters if a.name in own)
            found["scaled by DoRA"] = element * scaled
        return found

    def head_elements(self, config: ModelConfig) -> int:
        """Elements of the output head that have a gradient."""
        return embedding_elements(config) if self.head else 0

    def ends(self, config: ModelConfig) -> tuple[bool, bool]:
        """Whether the embedding trains, and whether the head does, where they are matrices of their own."""
        if config.tie_word_embeddings or self.adapters:
            return False, False
        shape = config.vocab_size, config.hidden_size
        count = sum(group.count for group in self.shapes if group.shape == shape and not group.hidden)
        # Embedding and head have one shape: a matrix more than the head is the embedding.
        return count > self.head, self.head

    def mlp_elements(self, config: ModelConfig) -> int:
        """Elements that have a gradient of the two linears of a dense MLP."""
        if not self.adapters:
            return layer_weights(config).dense
        adapters = [a for a in self.adapters if a.name in DENSE_MLP]
        # A [P·r, K] of all projections, B [rows, r] of each.
        return sum(a.columns * a.in_features + a.columns // len(a.rows) * sum(a.rows) for a in adapters)

    def flops(self, flops: Mapping[str, float]) -> dict[str, float]:
        """FLOPs per token by kind, given those of a model in which everything trains."""
        if not self.adapters:
            # A frozen head has no grad_weight, one of three GEMMs.
            return {**flops, "head": flops["head"] * (1 if self.head else 2 / 3)}
        # output and grad_input, of three GEMMs: there is no grad_weight.
        frozen = {kind: flops[kind] * 2 / 3 for kind in ("blocks", "head")}
        # Of A K · P·r multiply-adds, of B r · rows for each projection: P·r · their mean.
        own = sum(
            a.layers * (a.in_features + sum(a.rows) / len(a.rows)) * a.columns * (a.active or 1) for a in self.adapters
        )
        return {**flops, **frozen, "adapters": 6.0 * own}  # 2 FLOPs a multiply-add, three GEMMs


def all_of(config: ModelConfig, element: int) -> TrainedPart:
    """A model in which everything trains."""
    return TrainedPart(parameter_shapes(config), element, head=True)


def all_but_embedding(config: ModelConfig, shapes: list[ParameterGroup], element: int) -> TrainedPart:
    """A model, `shapes` its parameters, with a frozen embedding, and a frozen head where that is the same matrix."""
    matrix = (config.vocab_size, config.hidden_size)
    # Embedding and head are one group of count 1 or 2; `hidden` tells linears of the same shape apart.
    rest = [g._replace(count=g.count - (g.shape == matrix and not g.hidden)) for g in shapes]
    return TrainedPart(rest, element, head=not config.tie_word_embeddings)


def only_adapters(config: ModelConfig, lora: Lora) -> TrainedPart:
    """A frozen model with adapters. UserError for a target that it does not have."""
    experts = {name: n for name, n in layer_linears(config).items() if name.startswith("experts.")}
    linears = {name: n for name, n in layer_linears(config).items() if name not in experts}
    words = {word for n in linears.values() for word in n.projections}
    targets = chosen_targets(lora, words, EXPERT_TARGETS.values() if experts else ())
    shapes, adapters = [], []
    for name, n in linears.items():
        rows = tuple(size for word, size in n.projections.items() if word in targets)
        if rows:
            columns = lora.r * len(rows)
            adapters.append(AdaptedLinear(name, n.in_features, n.out_features, rows, columns, n.layers))
        for size in rows:
            # A [r, K] and B [N, r].
            shapes += [ParameterGroup(shape, n.layers, True) for shape in ((lora.r, n.in_features), (size, lora.r))]
            shapes += [ParameterGroup((size,), n.layers)] if lora.dora else []  # DoRA: a magnitude per row
    for name, n in experts.items():
        if EXPERT_TARGETS[name.removeprefix("experts.")] in targets:
            rows = (n.out_features,)
            adapters.append(AdaptedLinear(name, n.in_features, n.out_features, rows, lora.r, n.layers, n.active))
            for size, columns in ((lora.r, n.in_features), (n.out_features, lora.r)):
                shape, parts = (n.groups * size, columns), (size,) * n.groups
                shapes.append(ParameterGroup(shape, n.layers, True, parts, experts=True))
    in_linears = not lora.dropout and lora.merge_format is None
    return TrainedPart(shapes, 4, False, tuple(adapters), lora.dora, bool(lora.dropout), in_linears)
