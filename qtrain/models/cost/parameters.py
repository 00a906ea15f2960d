"""The size of a decoder: parameters and FLOPs per token, from its config alone."""

import dataclasses
import functools
from typing import NamedTuple

from qtrain.models.config.model import ModelConfig
from qtrain.models.native.recompute import Kinds

LAYER_LINEARS = (
    *("qkv", "o_proj", "gate_up", "down_proj"),
    *("qkv_a", "q_b", "kv_b"),  # latent attention
    *("experts.gate_up", "experts.down_proj", "shared.gate_up", "shared.down_proj"),  # mixtures of experts
)
"""The keys of all linears that a layer may have (`linear_key`)."""


DENSE_MLP = ("gate_up", "down_proj")
"""Of these, the linears of a dense MLP."""


@functools.cache
def linear_key(name: str) -> str:
    """The key of a layer's linear: layers.3.attn.qkv -> qkv, layers.3.mlp.shared.gate_up -> shared.gate_up."""
    owner, own = name.split(".")[-2:]
    return own if owner in ("attn", "mlp") else f"{owner}.{own}"


@functools.cache
def layer_index(name: str) -> int:
    """The number of a linear's layer: layers.3.attn.qkv -> 3."""
    return int(name.split(".")[1])


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. A tied embedding counts once."""

    embedding: int
    """Embedding, and the head unless it is tied to it."""
    linear: int
    """Weights of the linears inside the layers: what a scheme quantizes."""
    other: int
    """Biases, norms and routers."""
    inactive: int = 0
    """Of `linear`, those of experts that a token is not routed to."""

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.other

    @property
    def active(self) -> int:
        """What a token uses."""
        return self.total - self.inactive


class ParameterGroup(NamedTuple):
    """`count` parameters of one shape. hidden: they are matrices of hidden layers; parts: rows of the projections fused
    in each, () for a single one; experts: they are stacked matrices of experts, which --ep shards."""

    shape: tuple[int, ...]
    count: int = 1
    hidden: bool = False
    parts: tuple[int, ...] = ()
    experts: bool = False


class LayerLinear(NamedTuple):
    """A linear of the layers. projections: name in a checkpoint -> rows, of one group; layers: how many have it;
    groups: matrices stacked in it, one for each expert; active: how many of them a token uses."""

    in_features: int
    projections: dict[str, int]
    layers: int
    groups: int = 1
    active: int = 1

    @property
    def out_features(self) -> int:
        """Of one group."""
        return sum(self.projections.values())

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.groups * self.out_features, self.in_features

    @property
    def weights(self) -> int:
        """Of one layer, all groups."""
        return self.groups * self.out_features * self.in_features

    @property
    def share(self) -> float:
        """Of the weights, those that a token uses."""
        return self.active / self.groups

    @property
    def used(self) -> float:
        """Weights of one layer that a token uses."""
        return self.weights * self.share

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of the projections fused in the weight, () for a single one."""
        rows = tuple(self.projections.values()) * self.groups
        return rows if len(rows) > 1 else ()


def layer_linears(config: ModelConfig) -> dict[str, LayerLinear]:
    """The linears of the layers, by their keys."""
    layers = config.num_hidden_layers
    found = _latent_linears(config) if config.mla else _attention_linears(config)
    if dense := layers - len(config.moe_layers):
        found |= _mlp_linears("", config.hidden_size, config.intermediate_size, dense)
    if routed := len(config.moe_layers):
        mixture = config.mixture
        groups = mixture.experts, mixture.per_token
        found |= _mlp_linears("experts.", config.hidden_size, mixture.width, routed, *groups)
        if mixture.shared_width:
            found |= _mlp_linears("shared.", config.hidden_size, mixture.shared_width, routed)
    return found


class LayerWeights(NamedTuple):
    """Weights of the linears of a layer, which has a dense MLP or a mixture of experts, never both."""

    attention: int
    dense: int
    mixture: int

    @property
    def largest(self) -> int:
        """Of the layer that has most."""
        return self.attention + max(self.dense, self.mixture)


def layer_weights(config: ModelConfig) -> LayerWeights:
    sizes = {name: n.weights for name, n in layer_linears(config).items()}
    dense = sum(sizes.pop(name, 0) for name in DENSE_MLP)
    mixture = sum(sizes.pop(name) for name in list(sizes) if name.startswith(("experts.", "shared.")))
    return LayerWeights(sum(sizes.values()), dense, mixture)


def embedding_elements(config: ModelConfig) -> int:
    """Of the embedding, and of a head of its own: V·C."""
    return config.vocab_size * config.hidden_size


def attention_input_size(config: ModelConfig) -> int:
    """Width of q, k and v together, as attention reads them."""
    # MLA expands its latent to keys of all query heads: q and k are equally wide.
    return config.qkv_size if config.mla is None else 2 * config.q_size + config.value_size


def _attention_linears(config: ModelConfig) -> dict[str, LayerLinear]:
    c, kv, layers = config.hidden_size, config.kv_size, config.num_hidden_layers
    return {
        "qkv": LayerLinear(c, {"q_proj": config.q_size, "k_proj": kv, "v_proj": kv}, layers),
        "o_proj": LayerLinear(config.q_size, {"o_proj": c}, layers),
    }


def _latent_linears(config: ModelConfig) -> dict[str, LayerLinear]:
    c, latent, heads, layers = config.hidden_size, config.latent, config.num_attention_heads, config.num_hidden_layers
    # Without a rank of its own (DeepSeek-V2-Lite), q is projected from the hidden state in one product.
    q_weights = {"q_a_proj": latent.q_rank} if latent.q_rank else {"q_proj": config.q_size}
    found = {"qkv_a": LayerLinear(c, {**q_weights, "kv_a_proj_with_mqa": latent.kv_rank + latent.rope_dim}, layers)}
    if latent.q_rank:
        found["q_b"] = LayerLinear(latent.q_rank, {"q_b_proj": config.q_size}, layers)
    # Of each head: the part of keys without rotary positions, and values.
    found["kv_b"] = LayerLinear(latent.kv_rank, {"kv_b_proj": heads * (latent.plain_dim + latent.value_dim)}, layers)
    return {**found, "o_proj": LayerLinear(config.value_size, {"o_proj": c}, layers)}


def _mlp_linears(
    owner: str, hidden: int, width: int, layers: int, groups: int = 1, active: int = 1
) -> dict[str, LayerLinear]:
    return {
        f"{owner}gate_up": LayerLinear(hidden, {"gate_proj": width, "up_proj": width}, layers, groups, active),
        f"{owner}down_proj": LayerLinear(width, {"down_proj": hidden}, layers, groups, active),
    }


def count_parameters(config: ModelConfig) -> ParameterCount:
    c, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    linears = layer_linears(config).values()
    linear = sum(n.weights * n.layers for n in linears)
    inactive = sum(n.weights // n.groups * (n.groups - n.active) * n.layers for n in linears)
    norms = 2 * c  # attn_norm and mlp_norm
    if config.qk_norm:
        norms += 2 * config.head_dim if config.qk_norm == "heads" else config.q_size + config.kv_size
    if config.mla:
        norms += (config.mla.q_rank or 0) + config.mla.kv_rank
    # Of qkv; of o_proj; of gate and up (2·I), and down (C).
    biases = config.qkv_size * config.qkv_bias + c * config.o_bias + (2 * inner + c) * config.mlp_bias
    # The last C: the norm before the head.
    other = layers * (norms + biases + (config.q_size + inner) * config.sub_norm) + c
    other += sum(rows * c for rows, _ in _router_shapes(config)) * len(config.moe_layers)
    matrices = 1 if config.tie_word_embeddings else 2
    return ParameterCount(matrices * config.vocab_size * c, linear, other, inactive)


def _router_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """The matrices of a mixture that are no linears: its router, and the gate of its shared experts."""
    if config.moe is None:
        return []
    return [(config.moe.experts, config.hidden_size)] + [(1, config.hidden_size)] * config.moe.shared_gate


def parameter_shapes(config: ModelConfig) -> list[ParameterGroup]:
    """All parameters. Biases and norms are one entry, as a vector."""
    matrices = [
        ParameterGroup(n.shape, n.layers, True, n.parts, name.startswith("experts."))
        for name, n in layer_linears(config).items()
    ]
    routed = len(config.moe_layers)
    routers = [ParameterGroup(shape, routed, True) for shape in _router_shapes(config)]
    # `other` has routers too, which are matrices of their own here.
    vector = count_parameters(config).other - sum(rows * c for rows, c in _router_shapes(config)) * routed
    embedding = ParameterGroup((config.vocab_size, config.hidden_size), 1 if config.tie_word_embeddings else 2)
    return [*matrices, *routers, embedding, ParameterGroup((vector,))]


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs per token of forward and backward, two per multiply-add, without recomputation."""

    blocks: float
    """The layers' linears, of experts those that a token uses, which run in the scheme's dtype. A router's, under 1%,
    are not counted."""
    head: float
    attention: float
    """q·kᵀ and p·v over the keys that a causal query sees, on average half of the sequence."""

    @property
    def total(self) -> float:
        return self.blocks + self.head + self.attention


_PRODUCTS = {
    "qkv": {"qkv", "qkv_a", "q_b", "kv_b"},
    "ffn": {f"{owner}{name}" for owner in ("", "shared.", "experts.") for name in DENSE_MLP},
}
"""Kind of recomputation -> the linears of which it computes the product, or that of their adapters, again."""


def products_again(kinds: Kinds) -> set[str]:
    """The linears whose products, and those of their adapters with their input, are computed again."""
    if "block" in kinds:
        return set(LAYER_LINEARS)
    return {name for kind in kinds for name in _PRODUCTS.get(kind, ())}


def forward_again(config: ModelConfig, kinds: Kinds) -> dict[str, float]:
    """The share of a forward pass that backward computes again if it recomputes these kinds, by kind of work."""
    if "block" in kinds:
        return {"blocks": 1.0, "attention": 1.0, "adapters": 1.0}
    used, again = {name: n.layers * n.used for name, n in layer_linears(config).items()}, products_again(kinds)
    # Of a down projection only the adapters' product with its input: backward does not read its output.
    products = sum(work for name, work in used.items() if name in again and not name.endswith("down_proj"))
    return {"blocks": products / sum(used.values()), "attention": float("attention" in kinds)}


def flops_per_token(config: ModelConfig, seq_len: int) -> Flops:
    parameters = count_parameters(config)
    return Flops(
        # 2 FLOPs a multiply-add, three GEMMs: output, grad_input, grad_weight.
        blocks=6.0 * (parameters.linear - parameters.inactive),
        head=6.0 * config.vocab_size * config.hidden_size,
        # 2 FLOPs, 3 times the forward pass, S / 2 keys, L layers: of q·kᵀ over Q elements, of p·v over V.
        attention=3.0 * config.num_hidden_layers * (config.q_size + config.value_size) * seq_len,
    )
