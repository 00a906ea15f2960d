"""Small configs that between them have every feature of the native decoder, and models with drawn weights for them."""

import torch

from qtrain.models import Decoder, ModelSource, build_model

_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES = {
    "llama2": {"model_type": "llama", **_SHAPE, "num_key_value_heads": 4},
    "llama3": {
        "model_type": "llama",
        **_SHAPE,
        "rope_theta": 500.0,  # small, so that the few dimensions fall on both sides of the scaling's thresholds
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "llama-biases-linear-rope": {
        "model_type": "llama",
        **_SHAPE,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral-window": {"model_type": "mistral", **_SHAPE, "sliding_window": 7},
    "qwen2": {
        "model_type": "qwen2",
        **_SHAPE,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3": {"model_type": "qwen3", **_SHAPE, "head_dim": 16, "rms_norm_eps": 1e-5},
    "bitnet": {"model_type": "bitnet", **_SHAPE, "hidden_act": "silu", "attention_bias": True},
}


_MIXTURE = {**_SHAPE, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_MIXTURE,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 16,
}

MIXTURES = {
    "mixtral": {"model_type": "mixtral", **_MIXTURE, "num_local_experts": 6, "sliding_window": 9},
    "olmoe": {"model_type": "olmoe", **_MIXTURE, "num_experts": 8, "num_experts_per_tok": 3, "attention_bias": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_MIXTURE,
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_MIXTURE,
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "rope_theta": 500.0,
        "rope_scaling": _YARN,
    },
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": 28,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        "q_lora_rank": 28,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
}
"""Mixtures of experts, which some tests that go through all families do not take."""


def source_of(name: str, **changes) -> ModelSource:
    return ModelSource(name, {**(FAMILIES | MIXTURES)[name], **changes}, f"--model ({name})")


def drawn(source: ModelSource, **options) -> Decoder:
    """A native model whose norms and biases are random too: at their initial 1 and 0 a mix-up would not show."""
    model = build_model(source, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center = 1.0 if "norm" in name else 0.0
                parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def batch(vocab: int = 97, rows: int = 2, length: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and labels [rows, length], some labels not trained on."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, vocab, (2, rows, length), generator=generator)
    labels[0, :5] = -100
    return ids, labels


DOC_IDS = torch.tensor([[0] * 10 + [1] * 14, [3] * 5 + [4] * 1 + [5] * 18])
