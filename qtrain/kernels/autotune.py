"""Picks the fastest of several ways to compute one thing, by timing them once per device and shape.

The winner is kept in a JSON file per device and versions, so that a second run starts at once. Where nothing can be
timed (no GPU, or a CUDA graph is being captured) the first name stands: callers order names by what is best in general.

    QTRAIN_IMPL=triton | cublas | ref   only names that begin so (ref: the plain PyTorch definition)
    QTRAIN_TUNE=0                       time nothing, take the first name
    QTRAIN_CACHE=DIR                    where the files are kept; default ~/.cache/qtrain
"""

import json
import os
import re
import statistics
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from qtrain.errors import unknown_name

Run = Callable[[str], object]

ROUNDS = 11
SWEEP_BYTES = 2**28
FAMILIES = ("triton", "cublas", "ref")


def forced() -> str | None:
    """The family that QTRAIN_IMPL asks for. UserError for one that is none."""
    family = os.environ.get("QTRAIN_IMPL")
    if family is not None and family not in FAMILIES:
        raise unknown_name("QTRAIN_IMPL", "family of implementations", family, FAMILIES)
    return family


def choose(op: str, key: tuple[object, ...], names: Sequence[str], run: Run) -> str:
    """The name for which run(name) is fastest; `key` is all that the answer depends on besides the device.

    The last of a timing's runs leaves its result behind for nobody: runs must be free of lasting effects.
    """
    family = forced()
    if family is not None:
        names = [name for name in names if name.startswith(family)] or names
    if len(names) == 1:
        return names[0]
    among = zlib.crc32(" ".join(names).encode())  # a later version that has more to choose from chooses again
    entry = " ".join([op, *(str(part).removeprefix("torch.") for part in key), f"{among:08x}"])
    known = _choices()
    name = known.get(entry)
    if name in names:
        return name
    if os.environ.get("QTRAIN_TUNE") == "0" or torch.cuda.is_current_stream_capturing():
        return names[0]
    known[entry] = name = _fastest(names, run)
    _save(known)
    return name


def _fastest(names: Sequence[str], run: Run) -> str:
    able = []
    for name in names:
        try:
            run(name)  # compiles
            able.append(name)
        except Exception as error:  # a configuration that this GPU has no room for, or a library that lacks the shape
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
    if len(able) < 2:
        return able[0] if able else names[0]
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in able}
    sweep = torch.empty(SWEEP_BYTES, dtype=torch.int8, device="cuda")
    for turn in range(ROUNDS):  # in turns, in changing order: a hot GPU lowers its clocks, for whoever comes then
        for name in able if turn % 2 else reversed(able):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            sweep.zero_()  # takes longer than issuing `run`, so that its launch is not timed, and clears the L2 cache
            start.record()
            run(name)
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    return min(able, key=lambda name: statistics.median(start.elapsed_time(end) for start, end in times[name]))


@cache
def _choices() -> dict[str, str]:
    try:
        found = json.loads(_file().read_text())
        return {str(key): str(value) for key, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _file() -> Path:
    folder = Path(os.environ.get("QTRAIN_CACHE") or Path.home() / ".cache" / "qtrain")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", f"tuning {device} torch {torch.__version__}") + ".json")


def _save(known: dict[str, str]) -> None:
    """Write the file whole or not at all; a folder that cannot be written only costs the next run its time."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(known, file, indent=1, sort_keys=True)
        os.replace(file.name, path)
    except OSError:
        pass
