"""Rotary positions in a Hugging Face config."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from qtrain.core.checks import check_value
from qtrain.core.errors import UserError, unknown_name
from qtrain.models.config.reading import USE_HF, Count, Positive

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kind of scaling -> the keys that it needs."""
_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: base frequency, and its scaling for contexts longer than in pretraining."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    """YaRN: pairs that turn more often than this over the pretraining context keep their frequency."""
    beta_slow: float = 1.0
    """YaRN: pairs that turn less often are scaled by `factor`; between the two is a ramp."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    """YaRN: round the ends of the ramp to whole pairs."""

    @property
    def table_scale(self) -> float:
        """What YaRN multiplies cosines and sines with."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            # DeepSeek's two keys: where they are equal, the tables stay unscaled and `logit_scale` has all of it.
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def logit_scale(self) -> float:
        """What DeepSeek's attention, in which only a part of a head is rotated, multiplies its logits with."""
        # Squared: once for the queries and once for the keys, their unrotated elements included.
        return self._temperature(self.mscale_all_dim) ** 2 if self.kind == "yarn" and self.mscale_all_dim else 1.0

    def _temperature(self, weight: float) -> float:
        """YaRN's sqrt(1/t) (Peng et al. 2023, arXiv:2309.00071)."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], max_positions: int, where: str) -> "Rope":
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
        # transformers 4 has rope_scaling null, not missing, where nothing is scaled.
        given = values.get("rope_scaling") or values.get("rope_parameters") or {}
        given = check_value(f"{where}: rope_parameters", given, dict[str, Any])
        theta = given.get("rope_theta", values.get("rope_theta", cls.theta))
        theta = check_value(f"{where}: rope_theta", theta, Positive)
        partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise UserError(f"{where}: partial_rotary_factor {partial!r} is not supported natively. {USE_HF}")

        # `type` is the older name of the key.
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _NEEDED:
            raise unknown_name(where, "rope type", str(kind), _NEEDED, USE_HF)
        options: dict[str, Any] = {}
        for key in _NEEDED[kind]:
            if given.get(key) is None:
                raise UserError(f"{where}: the rope type {kind!r} needs the key {key!r}; it must be a number.")
        for key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ())):
            if given.get(key) is not None:
                options[key] = check_value(f"{where}: rope {key}", given[key], Positive)
        if kind in ("llama3", "yarn"):
            original = given.get("original_max_position_embeddings", max_positions)
            original = check_value(f"{where}: rope original_max_position_embeddings", original, Count)
            options["original_max_position_embeddings"] = original
        if kind == "yarn":
            options["truncate"] = check_value(f"{where}: rope truncate", given.get("truncate", True), bool)
        if kind == "llama3" and options["high_freq_factor"] <= options["low_freq_factor"]:
            raise UserError(f"{where}: rope high_freq_factor must be greater than low_freq_factor.")
        return cls(theta=theta, kind=kind, **options)

    def to_hf(self) -> dict[str, Any]:
        """The same rotary positions for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`)."""
        scaling: dict[str, Any] = {"rope_type": self.kind}
        keys = [*_NEEDED[self.kind], *_OPTIONAL.get(self.kind, ())]
        if self.kind in ("llama3", "yarn"):
            keys.append("original_max_position_embeddings")
        if self.kind == "yarn":
            keys.append("truncate")
        # Left out where unset: `from_hf` would refuse an mscale of 0.
        unset = {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": None}
        scaling |= {key: getattr(self, key) for key in keys if key not in unset or getattr(self, key) != unset[key]}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaling,
            "rope_parameters": {"rope_theta": self.theta, **scaling},
        }
