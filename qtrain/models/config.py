"""The architecture of a native decoder, read from and written as a Hugging Face `config.json`.

One frozen dataclass covers Llama 2/3.x, Mistral, SmolLM(2), Qwen2/2.5, Qwen3 and BitNet: they differ in which
projections have a bias, in QK-norm, in norms before the output projections, in rotary scaling and in a sliding window.
Keys that would change the arithmetic and are not covered are refused by name, never ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from qtrain.checks import Range, check_value, type_name
from qtrain.errors import UserError, unknown_name

USE_HF = "Run it through transformers instead: --model_impl hf"

_Count = Annotated[int, Range(1, 10**8)]
_Layers = Annotated[int, Range(1, 10_000)]
_Positive = Annotated[float, Range(1e-30)]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: base frequency, and its scaling for contexts longer than in pretraining."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], max_positions: int, where: str) -> "Rope":
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
        given = values.get("rope_scaling") or values.get("rope_parameters") or {}
        given = check_value(f"{where}: rope_parameters", given, dict[str, Any])
        theta = given.get("rope_theta", values.get("rope_theta", cls.theta))
        theta = check_value(f"{where}: rope_theta", theta, _Positive)
        partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise UserError(f"{where}: partial_rotary_factor {partial!r} is not supported natively. {USE_HF}")

        kind = given.get("rope_type", given.get("type", "default"))
        keys = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        if kind not in keys:
            raise unknown_name(where, "rope type", str(kind), keys, USE_HF)
        options: dict[str, Any] = {}
        for key in keys[kind]:
            if key not in given:
                raise UserError(f"{where}: the rope type {kind!r} needs the key {key!r}; it must be a number.")
            options[key] = check_value(f"{where}: rope {key}", given[key], _Positive)
        if kind == "llama3":
            original = given.get("original_max_position_embeddings", max_positions)
            original = check_value(f"{where}: rope original_max_position_embeddings", original, _Count)
            options["original_max_position_embeddings"] = original
            if options["high_freq_factor"] <= options["low_freq_factor"]:
                raise UserError(f"{where}: rope high_freq_factor must be greater than low_freq_factor.")
        return cls(theta=theta, kind=kind, **options)

    def to_hf(self) -> dict[str, Any]:
        """The same rotary positions for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`)."""
        scaling: dict[str, Any] = {"rope_type": self.kind}
        if self.kind != "default":
            scaling["factor"] = self.factor
        if self.kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
                scaling[key] = getattr(self, key)
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaling,
            "rope_parameters": {"rope_theta": self.theta, **scaling},
        }


@dataclasses.dataclass(frozen=True)
class _Family:
    """What a `model_type` fixes, which keys its `config.json` has, and what its transformers class assumes for missing
    ones."""

    architecture: str
    max_positions: int
    head_dim: int | None = None
    """Where the key is missing; None: hidden_size / num_attention_heads."""
    qk_norm: bool = False
    sub_norm: bool = False
    qkv_bias: bool = False
    """The q, k, v projections always have a bias."""
    attention_bias: bool = False
    """The key of this name decides over the biases of attention."""
    mlp_bias: bool = False
    """The key of this name decides over the biases of the MLP."""
    window: Literal["none", "all_layers", "by_layer"] = "none"
    """Sliding window: none, in all layers, or by the keys use_sliding_window and max_window_layers."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Unusual values of missing keys."""


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, attention_bias=True, mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", 131072, window="all_layers"),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, qkv_bias=True, window="by_layer"),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, head_dim=128, qk_norm=True, attention_bias=True, window="by_layer"),
    "bitnet": _Family(
        "BitNetForCausalLM",
        2048,
        sub_norm=True,
        attention_bias=True,
        window="by_layer",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
}


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
    rope: Rope = Rope()
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sub_norm: bool = False
    """An RMSNorm before the output projection of attention and before the down projection of the MLP (BitNet)."""
    sliding_window: int | None = None
    """Positions that a query sees, itself included; None: all of them."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

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

        def read(key: str, kind: Any, default: Any = dataclasses.MISSING) -> Any:
            return _read(values, key, kind, where, default)

        model_type = read("model_type", str)
        if model_type not in _FAMILIES:
            raise unknown_name(where, "model_type", model_type, _FAMILIES, USE_HF)
        family = _FAMILIES[model_type]
        values = {**family.defaults, **values}
        _refuse_unsupported(values, where)
        attention_bias = family.attention_bias and read("attention_bias", bool, False)
        max_positions = read("max_position_embeddings", _Count, family.max_positions)
        return cls(
            model_type=model_type,
            vocab_size=read("vocab_size", _Count),
            intermediate_size=read("intermediate_size", _Count),
            num_hidden_layers=read("num_hidden_layers", _Layers),
            **_read_heads(values, model_type, where),
            max_position_embeddings=max_positions,
            rope=Rope.from_hf(values, max_positions, where),
            rms_norm_eps=read("rms_norm_eps", Annotated[float, Range(0)], 1e-6),
            initializer_range=read("initializer_range", Annotated[float, Range(0)], 0.02),
            tie_word_embeddings=read("tie_word_embeddings", bool, False),
            qkv_bias=attention_bias or family.qkv_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and read("mlp_bias", bool, False),
            qk_norm=family.qk_norm,
            sub_norm=family.sub_norm,
            sliding_window=_read_window(values, family, where),
            bos_token_id=read("bos_token_id", int, None),
            eos_token_id=read("eos_token_id", int | list[int], None),
            pad_token_id=read("pad_token_id", int, None),
        )

    def with_sub_norms(self, flag: str) -> "ModelConfig":
        """This architecture with BitNet's norms before the output projections.

        UserError naming `flag` where it has features that transformers' BitNet lacks: it could not be exported.
        """
        if self.sub_norm:
            return self
        heads = f"heads of {self.q_size} elements together for a width of {self.hidden_size}"
        features = {
            "QK-norm": self.qk_norm,
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
        family = _FAMILIES[self.model_type]
        config = {
            "architectures": [family.architecture],
            **{key: getattr(self, key) for key in same},
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            **self.rope.to_hf(),
        }
        if self.model_type != "qwen2" or self.q_size != self.hidden_size:
            config["head_dim"] = self.head_dim
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
            config["max_window_layers"] = 0 if sliding else self.num_hidden_layers
        return config


def _read(values: Mapping[str, Any], key: str, kind: Any, where: str, default: Any = dataclasses.MISSING) -> Any:
    """A key's checked value. With a default of None the key may be null or missing."""
    if key not in values and default is dataclasses.MISSING:
        raise UserError(f"{where}: the key {key!r} is missing; it must be {type_name(kind)}.")
    value = values.get(key, default)
    return None if value is None and default is None else check_value(f"{where}: {key}", value, kind)


def _read_heads(values: Mapping[str, Any], model_type: str, where: str) -> dict[str, int]:
    """The width and the sizes of the attention heads."""
    hidden, heads = (_read(values, key, _Count, where) for key in ("hidden_size", "num_attention_heads"))
    if model_type != "llama" and "num_key_value_heads" not in values:  # the classes of transformers differ here
        raise UserError(f"{where}: the key 'num_key_value_heads' is missing; it must be {type_name(_Count)}.")
    kv_heads = _read(values, "num_key_value_heads", _Count, where, None) or heads
    head_dim = _read(values, "head_dim", _Count, where, None) or _FAMILIES[model_type].head_dim
    if hidden % heads and (head_dim is None or model_type == "llama"):  # transformers requires it of Llama always
        raise UserError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    head_dim = head_dim or hidden // heads
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    if head_dim % 2:
        raise UserError(f"{where}: head_dim {head_dim} is odd; rotary positions need pairs.")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    """Refuse keys that change the arithmetic in a way that the native decoder does not compute."""
    neutral = {
        "hidden_act": ("silu", "swish"),
        "attention_dropout": (0, None),
        "num_experts": (0, 1, None),
        "num_local_experts": (0, 1, None),
        "quantization_config": (None,),
    }
    for key, allowed in neutral.items():
        if values.get(key, allowed[0]) not in allowed:
            raise UserError(f"{where}: {key} {values[key]!r} is not supported natively. {USE_HF}")


def _read_window(values: Mapping[str, Any], family: _Family, where: str) -> int | None:
    """The sliding window of every layer. A window in only some layers is refused."""
    if family.window == "none":
        return None
    window = values.get("sliding_window", 4096)
    if window is None or (family.window == "by_layer" and not values.get("use_sliding_window", False)):
        return None
    window = check_value(f"{where}: sliding_window", window, _Count)
    if family.window == "all_layers":
        return window
    first = check_value(f"{where}: max_window_layers", values.get("max_window_layers", 28), Annotated[int, Range(0)])
    layers = range(values["num_hidden_layers"])
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in layers]
    if values.get("layer_types") is not None:
        allowed = list[Literal["sliding_attention", "full_attention"]]
        kinds = check_value(f"{where}: layer_types", values["layer_types"], allowed)
        if len(kinds) != len(layers):
            raise UserError(f"{where}: layer_types names {len(kinds)} layers; num_hidden_layers is {len(layers)}.")
    if len(set(kinds)) > 1:
        raise UserError(f"{where}: a sliding window in only some layers is not supported natively. {USE_HF}")
    return window if kinds[0] == "sliding_attention" else None
