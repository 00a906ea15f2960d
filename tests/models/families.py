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


def source_of(name: str, **changes) -> ModelSource:
    return ModelSource(name, {**FAMILIES[name], **changes}, f"--model ({name})")


def drawn(source: ModelSource, **options) -> Decoder:
    """A native model whose norms and biases are random too: at their initial 1 and 0 a mix-up would not show."""
    model = build_model(source, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center = 1.0 if "norm" in name else 0.0
                parameter.copy_(center + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(vocab: int = 97, rows: int = 2, length: int = 24, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and labels [rows, length], some labels not trained on."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, vocab, (2, rows, length), generator=generator)
    labels[0, :5] = -100
    return ids, labels


DOC_IDS = torch.tensor([[0] * 10 + [1] * 14, [3] * 5 + [4] * 1 + [5] * 18])
