"""JSON that is nested too deeply, kept from pyarrow: its parser recurses, and beyond some 10,000 levels it ends the
process without a word."""

import io
from typing import Any

import numpy as np

MAX_DEPTH = 1000
"""Levels at most, about those of Python's own parser."""


def depth_of(data: bytes) -> int:
    """The most brackets that are open at a time in a line of JSON, those in strings included."""
    read = np.frombuffer(data, np.uint8)
    opened = ((read == ord("[")) | (read == ord("{"))).astype(np.int8)
    change = opened - ((read == ord("]")) | (read == ord("}")))
    level = np.cumsum(change, dtype=np.int32)
    starts = np.concatenate([[0], np.flatnonzero(read[:-1] == ord("\n")) + 1])
    before = np.where(starts > 0, level[starts - 1], 0)
    return int((np.maximum.reduceat(level, starts) - before).max()) if len(read) else 0


def guard_datasets() -> None:
    """Have the JSON reader of `datasets` refuse such JSON with a RecursionError."""
    from datasets.packaged_modules.json import json as reader

    if not isinstance(reader.paj, _GuardedReader):
        reader.paj = _GuardedReader(reader.paj)


class _GuardedReader:
    """pyarrow.json with another `read_json`."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def read_json(self, source: io.BytesIO, *args: Any, **options: Any) -> Any:
        if (depth := depth_of(source.getvalue())) > MAX_DEPTH:
            raise RecursionError(f"a record of JSON opens {depth:,} brackets; at most {MAX_DEPTH:,} are read")
        return self._module.read_json(source, *args, **options)
