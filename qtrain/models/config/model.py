"""The architecture of a native decoder, read from and written as a Hugging Face `config.json`.

One frozen dataclass covers Llama 2/3.x, Mistral, SmolLM(2), Qwen2/2.5, Qwen3 and BitNet: they differ in which
projections have a bias, in QK-norm, in norms before the output projections, in rotary scaling and in a sliding window.
Mixtures of experts (`moe.py`) differ in their MLP, DeepSeek's also in their attention (`mla.py`).
Keys that would change the arithmetic and are not covered are refused by name, never ignored.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from qtrain.core.checks import Range, check_value, type_name
from qtrain.core.errors import UserError, unknown_name
from qtrain.models.config.families import FAMILIES, Family
from qtrain.models.config.mla import MLAConfig
from qtrain.models.config.moe import MIXTURES, MoEConfig
from qtrain.models.config.reading import USE_HF, Count, Layers, NotNegative, read, refuse_other_values
from qtrain.models.config.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's architecture, with the names of Hugging Face; sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope = dataclasses.field(default_factory=Rope)
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["heads", "whole"] | None = None
    """An RMSNorm of queries and of keys: of each head, or over all heads together."""
    sub_norm: bool = False
    """An RMSNorm before the output projection of attention and before the down projection of the MLP (BitNet)."""
    sliding_window: int | None = None
    """Positions that a query sees, itself included; None: all of them."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    moe: MoEConfig | None = None
    """The layers' mixtures of experts; None: every layer has a plain MLP."""
    mla: MLAConfig | None = None
    """The sizes of multi-head latent attention; None: plain attention."""

    @property
    def mixture(self) -> MoEConfig:
        """`moe` of a model that has mixtures."""
        assert self.moe is not None
        return self.moe

    @property
    def latent(self) -> MLAConfig:
        """`mla` of a model that has latent attention."""
        assert self.mla is not None
        return self.mla

    @functools.cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have a mixture."""
        dense = range(self.num_hidden_layers) if self.moe is None else self.moe.dense_layers
        return tuple(i for i in range(self.num_hidden_layers) if i not in dense)

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a head."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def value_size(self) -> int:
        """Width of what attention computes for all query heads together."""
        return self.num_attention_heads * (self.head_dim if self.mla is None else self.mla.value_dim)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Output width of the fused q, k, v projection."""
        return self.q_size + 2 * self.kv_size

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Read a Hugging Face config dict. `where` names the file in errors.

        Raises UserError for a missing or wrong key and for an architecture that is not covered.
        """

        def own(key: str, kind: Any, default: Any = dataclasses.MISSING) -> Any:
            return read(values, key, kind, where, default)

        model_type = own("model_type", str)
        if model_type not in FAMILIES:
            raise unknown_name(where, "model_type", model_type, FAMILIES, USE_HF)
        family, mixture = FAMILIES[model_type], MIXTURES.get(model_type)
        values = {**family.defaults, **values}
        _refuse_unsupported(values, mixture is not None, family, where)
        attention_bias = family.attention_bias and own("attention_bias", bool, False)
        qkv_bias = family.qkv_bias or (family.qkv_bias_key and own("qkv_bias", bool, True))
        max_positions = own("max_position_embeddings", Count, family.max_positions)
        layers = own("num_hidden_layers", Layers)
        latent = MLAConfig.from_hf(values, where) if family.latent else None
        return cls(
            model_type=model_type,
            vocab_size=own("vocab_size", Count),
            intermediate_size=own("intermediate_size", Count),
            num_hidden_layers=layers,
            **_read_heads(values, model_type, latent, where),
            max_position_embeddings=max_positions,
            rope=Rope.from_hf(values, max_positions, where),
            rms_norm_eps=own("rms_norm_eps", NotNegative, 1e-6),
            initializer_range=own("initializer_range", NotNegative, 0.02),
            tie_word_embeddings=own("tie_word_embeddings", bool, False),
            qkv_bias=attention_bias or qkv_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and own("mlp_bias", bool, False),
            qk_norm=family.qk_norm,
            sub_norm=family.sub_norm,
            sliding_window=_read_window(values, family, where),
            bos_token_id=own("bos_token_id", int, None),
            eos_token_id=own("eos_token_id", int | list[int], None),
            pad_token_id=own("pad_token_id", int, None),
            moe=mixture.read(values, layers, where) if mixture else None,
            mla=latent,
        )

    def with_sub_norms(self, flag: str) -> "ModelConfig":
        """This architecture with BitNet's norms before the output projections.

        UserError naming `flag` where it has features that transformers' BitNet lacks: it could not be exported.
        """
        if self.sub_norm:
            return self
        heads = f"heads of {self.q_size} elements together for a width of {self.hidden_size}"
        features = {
            "a mixture of experts": self.moe is not None,
            "QK-norm": self.qk_norm is not None,
            "biases in its MLP": self.mlp_bias,
            "a sliding window": self.sliding_window is not None,
            heads: self.q_size != self.hidden_size,
        }
        for feature, present in features.items():
            if present:
                raise UserError(
                    f"{flag}: the norms of BitNet cannot be exported with this model, which has {feature}. "
                    "Leave them out with --quantize_kwargs '{\"sub_norm\":false}'."
                )
        return dataclasses.replace(self, model_type="bitnet", sub_norm=True)

    def to_hf(self) -> dict[str, Any]:
        """A config dict that transformers 4 and 5 both load as this architecture."""
        same = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
        same += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"]
        same += ["initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"]
        family = FAMILIES[self.model_type]
        config = {
            "architectures": [family.architecture],
            **{key: getattr(self, key) for key in same},
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            **self.rope.to_hf(),
        }
        if self.mla is not None:
            config |= self.mla.to_hf()
            if self.model_type == "deepseek_v3":
                config["rope_interleave"] = self.mla.interleaved
        elif self.model_type not in ("qwen2", "qwen2_moe", "olmoe") or self.q_size != self.hidden_size:
            config["head_dim"] = self.head_dim
        if self.moe is not None:
            config |= MIXTURES[self.model_type].write(self.moe)
        if family.qkv_bias_key:
            config["qkv_bias"] = self.qkv_bias
        if family.attention_bias:
            config["attention_bias"] = self.qkv_bias
        if family.mlp_bias:
            config["mlp_bias"] = self.mlp_bias
        if family.window == "all_layers":
            config["sliding_window"] = self.sliding_window
        elif self.model_type in ("qwen2", "qwen3"):
            sliding = self.sliding_window is not None
            config["use_sliding_window"] = sliding
            config["sliding_window"] = self.sliding_window
            # Layers from this one on have the window: 0 for all of them, the number of layers for none.
            config["max_window_layers"] = 0 if sliding else self.num_hidden_layers
        return config


def _read_heads(values: Mapping[str, Any], model_type: str, latent: MLAConfig | None, where: str) -> dict[str, int]:
    """The width and the sizes of the attention heads."""
    hidden, heads = (read(values, key, Count, where) for key in ("hidden_size", "num_attention_heads"))
    if model_type != "llama" and "num_key_value_heads" not in values:  # the classes of transformers differ here
        raise UserError(f"{where}: the key 'num_key_value_heads' is missing; it must be {type_name(Count)}.")
    kv_heads = read(values, "num_key_value_heads", Count, where, None) or heads
    if latent is not None:
        head_dim = latent.head_dim
    else:
        head_dim = read(values, "head_dim", Count, where, None) or FAMILIES[model_type].head_dim
    # transformers requires it of these always
    if hidden % heads and (head_dim is None or model_type in ("llama", "deepseek_v2")):
        raise UserError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    head_dim = head_dim or hidden // heads
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    # Latent attention rotates rope_dim elements alone, which `MLAConfig` has checked.
    if head_dim % 2 and latent is None:
        raise UserError(f"{where}: head_dim {head_dim} is odd; rotary positions need pairs.")
    if FAMILIES[model_type].qk_norm == "whole" and head_dim * heads != hidden:  # its norms have these sizes
        raise UserError(f"{where}: head_dim {head_dim} is not hidden_size {hidden} / num_attention_heads {heads}.")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _refuse_unsupported(values: Mapping[str, Any], mixture: bool, family: Family, where: str) -> None:
    """Refuse keys that change the arithmetic in a way that the native decoder does not compute."""
    neutral = {"hidden_act": ("silu", "swish"), "attention_dropout": (0, None)}
    if not mixture:
        # Experts in the config of a dense family: its layers are not what the family says.
        neutral |= dict.fromkeys(("num_experts", "num_local_experts"), (0, 1, None))
    # Qwen's mixtures have the key, but no window here: one that is on is refused.
    if mixture and family.window == "none":
        neutral["use_sliding_window"] = (False, None)
    refuse_other_values(values, neutral, where)


def _read_window(values: Mapping[str, Any], family: Family, where: str) -> int | None:
    """The sliding window of every layer. A window in only some layers is refused."""
    if family.window == "none":
        return None
    # transformers' value of a missing key; Mixtral's None is among its family's defaults.
    window = values.get("sliding_window", 4096)
    if window is None or (family.window == "by_layer" and not values.get("use_sliding_window", False)):
        return None
    window = check_value(f"{where}: sliding_window", window, Count)
    if family.window == "all_layers":
        return window
    first = check_value(f"{where}: max_window_layers", values.get("max_window_layers", 28), Annotated[int, Range(0)])
    layers = range(values["num_hidden_layers"])
    # As transformers fills in layer_types: the first max_window_layers layers see all positions.
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in layers]
    if values.get("layer_types") is not None:
        allowed = list[Literal["sliding_attention", "full_attention"]]
        kinds = check_value(f"{where}: layer_types", values["layer_types"], allowed)
        if len(kinds) != len(layers):
            raise UserError(f"{where}: layer_types names {len(kinds)} layers; num_hidden_layers is {len(layers)}.")
    if len(set(kinds)) > 1:
        raise UserError(f"{where}: a sliding window in only some layers is not supported natively. {USE_HF}")
    return window if kinds[0] == "sliding_attention" else None
