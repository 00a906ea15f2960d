"""A mixture of experts in a Hugging Face config: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3.

They differ in the names of their keys, in how a router's scores become weights, in experts that every token uses, and
in which layers have a plain MLP instead.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.models.config.reading import Count, CountOrZero, NotNegative, Positive, read, refuse_other_values


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The layers' mixtures of experts; sizes in elements."""

    experts: int
    per_token: int
    """Experts that a token is routed to."""
    width: int
    """Feed-forward width of an expert."""
    shared_width: int = 0
    """Feed-forward width of the experts that every token uses, which are one MLP; 0: there are none."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by a sigmoid of the token (Qwen2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What a router makes of its logits. sigmoid: experts are selected by score plus a bias that is not trained by
    gradients (DeepSeek-V3)."""
    groups: int = 1
    """Groups of neighboring experts, of which a token is routed to `groups_per_token` at most."""
    groups_per_token: int = 1
    normalize: bool = False
    """The weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """What the weights are multiplied with at last."""
    aux_loss: float = 0.0
    """The load-balancing loss that the config names."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP."""
    reserved: int | None = None
    """Of a rank's part of a model: routes to its experts, for each token, that it has rows for; None: per_token."""

    @property
    def selection_bias(self) -> bool:
        return self.scores == "sigmoid"


@dataclasses.dataclass(frozen=True)
class MixtureKeys:
    """How a `model_type` names its experts' tensors in a checkpoint, and how its config is read and written.

    block, gate, up, down, shared: parts of tensor names. read: (values, layers, where) -> MoEConfig.
    write: the reverse, without what `ModelConfig` writes.
    """

    read: Callable[[Mapping[str, Any], int, str], MoEConfig]
    write: Callable[[MoEConfig], dict[str, Any]]
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


def _routed(values: Mapping[str, Any], experts_key: str, where: str) -> dict[str, Any]:
    """Experts, how many of them a token uses, and the weight of the loss that balances them."""
    if "num_local_experts" in values:  # transformers 5 writes it for Qwen3-MoE
        experts_key = "num_local_experts"
    experts, per_token = (read(values, key, Count, where) for key in (experts_key, "num_experts_per_tok"))
    if per_token > experts:
        raise UserError(f"{where}: num_experts_per_tok {per_token} is more than {experts_key} {experts}.")
    aux_loss = read(values, "router_aux_loss_coef", NotNegative, where)
    return {"experts": experts, "per_token": per_token, "aux_loss": aux_loss}


# What transformers takes for keys that a config.json lacks.
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01}
_QWEN3 = {"num_experts": 128, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}


def _read_mixtral(values: Mapping[str, Any], layers: int, where: str) -> MoEConfig:
    refuse_other_values(values, {"router_jitter_noise": (0, None)}, where)
    return MoEConfig(
        **_routed({**_MIXTRAL, **values}, "num_local_experts", where),
        width=read(values, "intermediate_size", Count, where),
        normalize=True,
    )


def _write_mixtral(mixture: MoEConfig) -> dict[str, Any]:
    return {"num_local_experts": mixture.experts, "router_jitter_noise": 0.0, **_write_common(mixture)}


def _read_olmoe(values: Mapping[str, Any], layers: int, where: str) -> MoEConfig:
    refuse_other_values(values, {"clip_qkv": (None,)}, where)
    return MoEConfig(
        **_routed({**_OLMOE, **values}, "num_experts", where),
        width=read(values, "intermediate_size", Count, where),
        normalize=read(values, "norm_topk_prob", bool, where, False),
    )


def _write_olmoe(mixture: MoEConfig) -> dict[str, Any]:
    return {"num_experts": mixture.experts, "norm_topk_prob": mixture.normalize, **_write_common(mixture)}


def _read_qwen(values: Mapping[str, Any], layers: int, where: str) -> MoEConfig:
    """Qwen3-MoE's. Every `decoder_sparse_step`-th layer is a mixture, unless it is among `mlp_only_layers`."""
    step = read(values, "decoder_sparse_step", Count, where, 1)
    dense = read(values, "mlp_only_layers", list[int], where, None) or []
    return MoEConfig(
        **_routed({**_QWEN3, **values}, "num_experts", where),
        width=read(values, "moe_intermediate_size", Count, where, 768),
        normalize=read(values, "norm_topk_prob", bool, where, False),
        # Counted from 1: with a step of 2 the layers 1, 3, ... are mixtures.
        dense_layers=tuple(i for i in range(layers) if i in dense or (i + 1) % step),
    )


def _write_qwen(mixture: MoEConfig) -> dict[str, Any]:
    return {
        **_write_olmoe(mixture),
        "moe_intermediate_size": mixture.width,
        # mlp_only_layers names all dense layers, also those that a larger step made dense.
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(mixture.dense_layers),
    }


def _read_qwen2(values: Mapping[str, Any], layers: int, where: str) -> MoEConfig:
    found = _read_qwen(
        {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, **values}, layers, where
    )
    shared = read(values, "shared_expert_intermediate_size", Count, where, 5632)
    return dataclasses.replace(found, shared_width=shared, shared_gate=True)


def _write_qwen2(mixture: MoEConfig) -> dict[str, Any]:
    return {**_write_qwen(mixture), "shared_expert_intermediate_size": mixture.shared_width}


def _read_deepseek(values: Mapping[str, Any], layers: int, where: str, defaults: Mapping[str, Any]) -> MoEConfig:
    """What V2 and V3 share: the first layers are dense, and `n_shared_experts` experts are one MLP."""
    refuse_other_values(values, {"moe_layer_freq": (1, None), "ep_size": (1, None)}, where)
    values = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    width = read(values, "moe_intermediate_size", Count, where)
    return MoEConfig(
        **_routed(values, "n_routed_experts", where),
        width=width,
        shared_width=width * read(values, "n_shared_experts", Count, where),
        scaling=read(values, "routed_scaling_factor", Positive, where),
        dense_layers=tuple(range(min(layers, read(values, "first_k_dense_replace", CountOrZero, where)))),
    )


_V2 = {
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "router_aux_loss_coef": 0.0,
}
_V3 = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "router_aux_loss_coef": 0.0,
}


def _read_deepseek_v2(values: Mapping[str, Any], layers: int, where: str) -> MoEConfig:
    # transformers ignores norm_topk_prob here; DeepSeek's own code does not.
    refuse_other_values(values, {"norm_topk_prob": (False, None), "scoring_func": ("softmax", None)}, where)
    found = _read_deepseek(values, layers, where, _V2)
    method = read(values, "topk_method", Literal["greedy", "group_limited_greedy"], where, "greedy")
    return found if method == "greedy" else dataclasses.replace(found, **_groups(values, found, where))


def _read_deepseek_v3(values: Mapping[str, Any], layers: int, where: str) -> MoEConfig:
    refuse_other_values(values, {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}, where)
    found = _read_deepseek(values, layers, where, _V3)
    groups = _groups({"n_group": 8, "topk_group": 4, **values}, found, where)
    if found.experts == groups["groups"]:
        raise UserError(f"{where}: n_group {groups['groups']} leaves one expert a group; a group's score needs two.")
    normalize = read(values, "norm_topk_prob", bool, where, True)
    return dataclasses.replace(found, scores="sigmoid", normalize=normalize, **groups)


def _groups(values: Mapping[str, Any], mixture: MoEConfig, where: str) -> dict[str, Any]:
    groups = read(values, "n_group", Count, where)
    chosen = read(values, "topk_group", Annotated[int, Range(1, groups)], where)
    if mixture.experts % groups:
        raise UserError(f"{where}: n_routed_experts {mixture.experts} is not a multiple of n_group {groups}.")
    if mixture.per_token > chosen * mixture.experts // groups:
        raise UserError(
            f"{where}: num_experts_per_tok {mixture.per_token} is more than the experts of topk_group {chosen} groups."
        )
    return {"groups": groups, "groups_per_token": chosen}


def _write_deepseek(mixture: MoEConfig) -> dict[str, Any]:
    return {
        "n_routed_experts": mixture.experts,
        "n_shared_experts": mixture.shared_width // mixture.width,
        "moe_intermediate_size": mixture.width,
        "routed_scaling_factor": mixture.scaling,
        "first_k_dense_replace": len(mixture.dense_layers),
        "norm_topk_prob": mixture.normalize,
        "scoring_func": mixture.scores,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
        **_write_common(mixture),
    }


def _write_deepseek_v2(mixture: MoEConfig) -> dict[str, Any]:
    limited = mixture.groups > 1
    return {**_write_deepseek(mixture), "topk_method": "group_limited_greedy" if limited else "greedy"}


def _write_deepseek_v3(mixture: MoEConfig) -> dict[str, Any]:
    return {**_write_deepseek(mixture), "topk_method": "noaux_tc"}


def _write_common(mixture: MoEConfig) -> dict[str, Any]:
    return {"num_experts_per_tok": mixture.per_token, "router_aux_loss_coef": mixture.aux_loss}


MIXTURES = {
    # Mixtral's w1 is the gate, w3 the up and w2 the down projection.
    "mixtral": MixtureKeys(_read_mixtral, _write_mixtral, "block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": MixtureKeys(_read_olmoe, _write_olmoe),
    "qwen2_moe": MixtureKeys(_read_qwen2, _write_qwen2, shared="shared_expert"),
    "qwen3_moe": MixtureKeys(_read_qwen, _write_qwen),
    "deepseek_v2": MixtureKeys(_read_deepseek_v2, _write_deepseek_v2),
    "deepseek_v3": MixtureKeys(_read_deepseek_v3, _write_deepseek_v3),
}
"""By `model_type`."""
