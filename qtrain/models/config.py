"""The architecture of a native decoder, read from and written as a Hugging Face `config.json`.

One frozen dataclass covers Llama 2/3.x, Mistral, SmolLM(2), Qwen2/2.5, Qwen3 and BitNet: they differ in which
projections have a bias, in QK-norm, in norms before the output projections, in rotary scaling and in a sliding window.
What would change the arithmetic and is not covered here is refused by name, never ignored.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from qtrain.checks import Range, check_value, type_name
from qtrain.errors import UserError, unknown_name

USE_HF = "Run it through transformers instead: --model_impl hf"

_Count = Annotated[int, Range(1)]
_Positive = Annotated[float, Range(1e-30)]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: base frequency and, for contexts longer than the pretraining one, how it is stretched."""

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
    """What a `model_type` fixes, and what its transformers class assumes where `config.json` is silent."""

    architecture: str
    max_positions: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qk_norm: bool = False
    sub_norm: bool = False
    silent: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what a missing key means, where unusual


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048),
    "mistral": _Family("MistralForCausalLM", 131072),
    "qwen2": _Family("Qwen2ForCausalLM", 32768),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, head_dim=128, qk_norm=True),
    "bitnet": _Family(
        "BitNetForCausalLM",
        2048,
        sub_norm=True,
        silent={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's architecture. Names are those of Hugging Face; sizes are in elements."""

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
    """An RMSNorm in front of the attention's output projection and of the MLP's down projection (BitNet)."""
    sliding_window: int | None = None
    """Positions a query sees, itself included; None is all of them."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; values have the same."""
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
            """A key's value, checked. With a default of None the key may be null or absent."""
            if key not in values and default is dataclasses.MISSING:
                raise UserError(f"{where}: the key {key!r} is missing; it must be {type_name(kind)}.")
            value = values.get(key, default)
            return None if value is None and default is None else check_value(f"{where}: {key}", value, kind)

        model_type = read("model_type", str)
        if model_type not in _FAMILIES:
            raise unknown_name(where, "model_type", model_type, _FAMILIES, USE_HF)
        family = _FAMILIES[model_type]
        values = {**family.silent, **values}
        _refuse_unsupported(values, where)

        hidden, heads, layers = (read(k, _Count) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        if model_type != "llama" and "num_key_value_heads" not in values:  # each class of transformers guesses its own
            raise UserError(f"{where}: the key 'num_key_value_heads' is missing; it must be {type_name(_Count)}.")
        kv_heads = read("num_key_value_heads", _Count, None) or heads
        head_dim = read("head_dim", _Count, None) or family.head_dim
        if hidden % heads and (head_dim is None or model_type == "llama"):  # transformers holds Llama to it always
            raise UserError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
        head_dim = head_dim or hidden // heads
        if heads % kv_heads:
            raise UserError(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
            )
        if head_dim % 2:
            raise UserError(f"{where}: head_dim {head_dim} is odd; rotary positions need pairs.")

        attention_bias = model_type in ("llama", "qwen3", "bitnet") and read("attention_bias", bool, False)
        max_positions = read("max_position_embeddings", _Count, family.max_positions)
        return cls(
            model_type=model_type,
            vocab_size=read("vocab_size", _Count),
            hidden_size=hidden,
            intermediate_size=read("intermediate_size", _Count),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope=Rope.from_hf(values, max_positions, where),
            rms_norm_eps=read("rms_norm_eps", Annotated[float, Range(0)], 1e-6),
            initializer_range=read("initializer_range", Annotated[float, Range(0)], 0.02),
            tie_word_embeddings=read("tie_word_embeddings", bool, False),
            qkv_bias=attention_bias or model_type == "qwen2",
            o_bias=attention_bias,
            mlp_bias=model_type == "llama" and read("mlp_bias", bool, False),
            qk_norm=family.qk_norm,
            sub_norm=family.sub_norm,
            sliding_window=_read_window(values, model_type, layers, where),
            bos_token_id=read("bos_token_id", int, None),
            eos_token_id=read("eos_token_id", int | list[int], None),
            pad_token_id=read("pad_token_id", int, None),
        )

    def with_sub_norms(self, flag: str) -> "ModelConfig":
        """This architecture as BitNet has it: with a norm before each output projection.

        UserError naming `flag` where it has what transformers' BitNet has no place for: it could not be exported.
        """
        if self.sub_norm:
            return self
        odd = {
            "QK-norm": self.qk_norm,
            "biases in its MLP": self.mlp_bias,
            "a sliding window": self.sliding_window is not None,
            f"heads of {self.q_size} elements together for a width of {self.hidden_size}": self.q_size
            != self.hidden_size,
        }
        for what, there in odd.items():
            if there:
                raise UserError(
                    f"{flag}: the norms of BitNet cannot be exported with this model, which has {what}. "
                    "Leave them out with --quantize_kwargs '{\"sub_norm\":false}'."
                )
        return dataclasses.replace(self, model_type="bitnet", sub_norm=True)

    def to_hf(self) -> dict[str, Any]:
        """A config dict that transformers 4 and 5 both load as this architecture."""
        same = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
        same += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"]
        same += ["initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"]
        config = {
            "architectures": [_FAMILIES[self.model_type].architecture],
            **{key: getattr(self, key) for key in same},
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            **self.rope.to_hf(),
        }
        if self.model_type != "qwen2" or self.head_dim * self.num_attention_heads != self.hidden_size:
            config["head_dim"] = self.head_dim
        if self.model_type in ("llama", "qwen3", "bitnet"):
            config["attention_bias"] = self.qkv_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.model_type == "mistral":
            config["sliding_window"] = self.sliding_window
        if self.model_type in ("qwen2", "qwen3"):
            sliding = self.sliding_window is not None
            config["use_sliding_window"] = sliding
            config["sliding_window"] = self.sliding_window
            config["max_window_layers"] = 0 if sliding else self.num_hidden_layers
        return config


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    """Refuse keys that would change the arithmetic and that the native decoder does not compute."""
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


def _read_window(values: Mapping[str, Any], model_type: str, layers: int, where: str) -> int | None:
    """The sliding window, where every layer has it. Some layers with and some without are refused."""
    if model_type == "llama":
        return None
    window = values.get("sliding_window", 4096)
    if window is None or (model_type != "mistral" and not values.get("use_sliding_window", False)):
        return None
    window = check_value(f"{where}: sliding_window", window, _Count)
    if model_type == "mistral":
        return window
    first = check_value(f"{where}: max_window_layers", values.get("max_window_layers", 28), Annotated[int, Range(0)])
    kinds = values.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if len(set(kinds)) > 1:
        raise UserError(f"{where}: a sliding window in only some layers is not supported natively. {USE_HF}")
    return window if kinds[0] == "sliding_attention" else None
