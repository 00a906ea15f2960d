"""What a `model_type` fixes of a native decoder's architecture."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Family:
    """What a `model_type` fixes, which keys its `config.json` has, and what its transformers class assumes for missing
    ones. Of a mixture of experts also see `mixture_config.MIXTURES`."""

    architecture: str
    max_positions: int
    head_dim: int | None = None
    """Where the key is missing; None: hidden_size / num_attention_heads."""
    qk_norm: Literal["heads", "whole"] | None = None
    """An RMSNorm of queries and of keys: of each head, or over all heads together."""
    sub_norm: bool = False
    qkv_bias: bool = False
    """The q, k, v projections always have a bias."""
    qkv_bias_key: bool = False
    """The key qkv_bias decides over it; true where it is missing."""
    attention_bias: bool = False
    """The key of this name decides over the biases of attention."""
    mlp_bias: bool = False
    """The key of this name decides over the biases of the MLP."""
    window: Literal["none", "all_layers", "by_layer"] = "none"
    """Sliding window: none, in all layers, or by the keys use_sliding_window and max_window_layers."""
    latent: bool = False
    """Attention is multi-head latent attention."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Unusual values of missing keys."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, attention_bias=True, mlp_bias=True),
    "mistral": Family("MistralForCausalLM", 131072, window="all_layers"),
    "qwen2": Family("Qwen2ForCausalLM", 32768, qkv_bias=True, window="by_layer"),
    "qwen3": Family("Qwen3ForCausalLM", 32768, head_dim=128, qk_norm="heads", attention_bias=True, window="by_layer"),
    "bitnet": Family(
        "BitNetForCausalLM",
        2048,
        sub_norm=True,
        attention_bias=True,
        window="by_layer",
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        131072,
        window="all_layers",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    ),
    "olmoe": Family("OlmoeForCausalLM", 4096, qk_norm="whole", attention_bias=True, defaults={"rms_norm_eps": 1e-5}),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", 32768, qkv_bias_key=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", 32768, qk_norm="heads", attention_bias=True),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", 2048, latent=True),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", 4096, latent=True),
}
