"""The sizes of multi-head latent attention in a Hugging Face config (DeepSeek-V2, arXiv:2405.04434)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qtrain.core.errors import UserError
from qtrain.models.config.reading import Count, read, refuse_other_values


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Keys and values are computed from a latent vector per token; a part of each query and key is rotated."""

    q_rank: int | None
    """Width of the queries' latent vector; None: they are computed from the hidden state."""
    kv_rank: int
    """Width of the latent vector of keys and values."""
    plain_dim: int
    """Elements of a head's query and key that are not rotated."""
    rope_dim: int
    """Elements that are; of the key, one for all heads."""
    value_dim: int
    interleaved: bool = True
    """Rotated pairs are neighbors in the checkpoint, not half of `rope_dim` apart."""

    @property
    def head_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.plain_dim + self.rope_dim

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], where: str) -> "MLAConfig":
        refuse_other_values(values, {"attention_bias": (False, None), "mlp_bias": (False, None)}, where)
        heads, kv_heads = (read(values, f"num_{kind}_heads", Count, where) for kind in ("attention", "key_value"))
        if kv_heads != heads:
            raise UserError(
                f"{where}: num_key_value_heads {kv_heads} differs from num_attention_heads {heads}; latent attention "
                "has a key and a value for every head."
            )
        rope_dim = read(values, "qk_rope_head_dim", Count, where, 64)
        if rope_dim % 2:
            raise UserError(f"{where}: qk_rope_head_dim {rope_dim} is odd; rotary positions need pairs.")
        return cls(
            # A missing key is transformers' 1536; null says that queries have no latent vector.
            q_rank=read({"q_lora_rank": 1536, **values}, "q_lora_rank", Count, where, None),
            kv_rank=read(values, "kv_lora_rank", Count, where, 512),
            plain_dim=read(values, "qk_nope_head_dim", Count, where, 128),
            rope_dim=rope_dim,
            value_dim=read(values, "v_head_dim", Count, where, 128),
            interleaved=read(values, "rope_interleave", bool, where, True),
        )

    def to_hf(self) -> dict[str, Any]:
        return {
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.plain_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "attention_bias": False,
        }
