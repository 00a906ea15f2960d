"""Reading checked values from a Hugging Face config."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from qtrain.core.checks import Range, check_value, type_name
from qtrain.core.errors import UserError

USE_HF = "Run it through transformers instead: --model_impl hf"

Count = Annotated[int, Range(1, 10**8)]
CountOrZero = Annotated[int, Range(0, 10**8)]
Layers = Annotated[int, Range(1, 10_000)]
Positive = Annotated[float, Range(1e-30)]
NotNegative = Annotated[float, Range(0)]


def read(values: Mapping[str, Any], key: str, kind: Any, where: str, default: Any = dataclasses.MISSING) -> Any:
    """A key's checked value. With a default of None the key may be null or missing. UserError naming `where`."""
    if key not in values and default is dataclasses.MISSING:
        raise UserError(f"{where}: the key {key!r} is missing; it must be {type_name(kind)}.")
    value = values.get(key, default)
    return None if value is None and default is None else check_value(f"{where}: {key}", value, kind)


def refuse_other_values(values: Mapping[str, Any], neutral: Mapping[str, Collection[Any]], where: str) -> None:
    """UserError for a key that has none of its `neutral` values: others change the arithmetic in a way that the native
    decoder does not compute."""
    for key, allowed in neutral.items():
        if key in values and values[key] not in allowed:
            raise UserError(f"{where}: {key} {values[key]!r} is not supported natively. {USE_HF}")
