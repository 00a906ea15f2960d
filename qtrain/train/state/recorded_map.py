"""The map of schemes in a checkpoint: which linear ran in which, and the settings that it was made from."""

import json
from collections.abc import Mapping
from typing import Any

from qtrain.core.config import as_dict
from qtrain.quant.scheme_map import Spec
from qtrain.train.settings.settings import TrainSettings

SETTINGS = (
    "quantize", "quantize_kwargs", "quantize_overrides", "quantize_schedule", "quantize_lm_head", "quantize_min_size",
)  # fmt: skip


def recorded_map(settings: TrainSettings, schemes: Mapping[str, Spec]) -> dict[str, Any]:
    """For the meta of a checkpoint. schemes: `QuantizedModel.schemes`."""
    return {"settings": _settings(settings), "linears": dict(schemes)}


def changed_schemes(recorded: Any, settings: TrainSettings, schemes: Mapping[str, Spec]) -> dict[str, Spec]:
    """The linears that ran in other schemes than `schemes` when the map was recorded, with these. None if the map was
    made from other settings: then the new ones say who runs in which scheme."""
    if not made_from(recorded, settings):
        return {}
    saved = recorded.get("linears") or {}
    return {name: saved[name] for name, spec in schemes.items() if saved.get(name, spec) != spec}


def made_from(recorded: Any, settings: TrainSettings) -> bool:
    """Whether a map was made from these settings."""
    return isinstance(recorded, dict) and recorded.get("settings") == _settings(settings)


def _settings(settings: TrainSettings) -> dict[str, Any]:
    """As JSON has them; {} is as good as nothing."""
    given = json.loads(json.dumps(as_dict(settings)))
    return {name: given[name] or None for name in SETTINGS} | {"base": (given.get("lora") or {}).get("base")}
