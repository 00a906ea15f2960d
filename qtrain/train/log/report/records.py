"""A run folder as the report reads it: metrics.jsonl, health.jsonl, config.json, and the plan in train.log.

Files of a run that was killed, or that still writes, are normal; so are files that someone has edited. A line that is
no record is counted and left out, a value that is no finite number is left out, and a missing file is an empty one.
Nothing here imports torch, so that a finished run is drawn in about a second.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qtrain.core.checks import MAX_JSON, user_path
from qtrain.core.errors import UserError, nearest, os_errors
from qtrain.core.reading import read_small, special_file
from qtrain.train.log.jsonl import in_order, read_records

MAX_LOG = 1 << 16
"""Bytes of train.log that are searched for the plan, which is its first entry."""
MODES = {"steps": "steps", "tokens": "tokens", "hours": "hours", "joules": "energy (J)"}
"""What an x axis can show, by the column's name: its label."""
OBJECTS = ("gpu", "ms")
"""Keys of a record that hold objects of numbers."""
LARGEST = 1e300
"""Numbers beyond are damage; their sums would be no numbers."""


def number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return None  # NaN fails the comparison
    return float(value)


def lookup(record: Mapping[str, Any], key: str) -> Any:
    """The value at a key such as "gpu.power", which lies in an object; None without one."""
    # A key that has a dot itself comes before a nested one.
    if key in record or "." not in key:
        return record.get(key)
    outer, _, inner = key.partition(".")
    return lookup(found, inner) if isinstance(found := record.get(outer), dict) else None


@dataclass(frozen=True)
class Curve:
    """A value over the run. x: the columns of MODES that the run has, each [n] float64; y: [n] float64, finite."""

    x: Mapping[str, np.ndarray]
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: np.ndarray) -> "Curve":
        return Curve({mode: values[index] for mode, values in self.x.items()}, self.y[index])


@dataclass(frozen=True)
class RunRecords:
    """What the files of a run folder say."""

    folder: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics.jsonl, steps ascending."""
    health: list[dict[str, Any]] = field(default_factory=list)
    """Of health.jsonl, steps ascending: samples of linears, and warnings."""
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: tuple[tuple[str, str], ...] = ()
    """The rows (name, text) that the run has printed before it began."""
    damaged: Mapping[str, int] = field(default_factory=dict)
    """File -> lines that are no records."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def is_locked(self) -> bool:
        """Whether a process trains it, or was killed while it did."""
        return (self.folder / "run.lock").exists()

    @cached_property
    def samples(self) -> str:
        """What the run counts: "tokens" or "images"."""
        return "images" if any("images" in record for record in self.records) else "tokens"

    @cached_property
    def rate(self) -> str:
        """The key of its speed."""
        return "img_s" if self.samples == "images" else "tok_s"

    @cached_property
    def columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Every number: key -> (indices of the records that have it, its values), [n] each, in the order of their first
        one. Keys of the objects in OBJECTS as "gpu.power"."""
        found: dict[str, tuple[list[int], list[float]]] = {}

        def collect(index: int, prefix: str, record: Mapping[str, Any]) -> None:
            for key, value in record.items():
                # By type, not by `number`: a long run has millions of values. A bool has a type of its own.
                if type(value) in (float, int) and -LARGEST < value < LARGEST:
                    indices, values = found.setdefault(prefix + key, ([], []))
                    indices.append(index)
                    values.append(value)
                elif type(value) is dict and not prefix and key in OBJECTS:
                    collect(index, f"{key}.", value)

        for index, record in enumerate(self.records):
            collect(index, "", record)
        return {key: (np.array(n, np.int64), np.array(y, np.float64)) for key, (n, y) in found.items()}

    @cached_property
    def positions(self) -> dict[str, np.ndarray]:
        """The x columns of all records, [n] float64 each; without those that the run does not have."""
        steps = np.array([record["step"] for record in self.records], np.float64)
        found = {"steps": steps}
        if self.samples in self.columns:
            found["tokens"] = self._filled(self.samples)
        if (hours := self._hours()) is not None:
            found["hours"] = hours
        if "tokens" in found and "joules_token" in self.columns:
            index, each = self.columns["joules_token"]
            # Each record's J per token holds for the tokens since the one before it; [records with energy].
            total = np.cumsum(each * np.diff(found["tokens"][index], prepend=0.0))
            found["joules"] = np.interp(steps, steps[index], total)
        return found

    def _filled(self, key: str) -> np.ndarray:
        """A value at every record, [n]: between those that have it by their steps."""
        steps = np.array([record["step"] for record in self.records], np.float64)
        index, values = self.columns[key]
        return np.interp(steps, steps[index], values)

    def _hours(self) -> np.ndarray | None:
        """Wall time since the start, without the time between a stop and the resumed run."""
        if len(self.columns.get("time", ((), ()))[0]) < 2:
            return None
        # A clock that was set back must not make the axis descend.
        gaps = np.maximum(np.diff(self._filled("time")), 0.0)
        # The median is robust to the pauses that are to be found.
        usual = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 0.0
        # No evaluation or checkpoint takes that much longer than a step: nothing has trained.
        gaps = np.where((gaps > 1800) & (gaps > 20 * usual), usual, gaps)
        return np.concatenate([[0.0], np.cumsum(gaps)]) / 3600

    def curve(self, key: str, scale: float = 1.0) -> Curve | None:
        """The values at `key` times `scale`; None where no record has one."""
        if key not in self.columns:
            return None
        index, values = self.columns[key]
        return Curve({mode: column[index] for mode, column in self.positions.items()}, values * scale)

    def seconds(self) -> float | None:
        """Time spent training: each record's new tokens (or images) over its speed. None without a speed."""
        if self.samples not in self.columns or self.rate not in self.columns:
            return None
        # Pauses for evaluation and checkpoints are no part of the speeds.
        index, counts = self.columns[self.samples]
        # Record index -> tokens since the record before; never negative, also in an edited file.
        new = dict(zip(index.tolist(), np.maximum(np.diff(counts, prepend=0.0), 0.0).tolist(), strict=True))
        speeds = zip(*(part.tolist() for part in self.columns[self.rate]), strict=True)
        return sum(new.get(n, 0.0) / speed for n, speed in speeds if speed > 0) or None


# ---- files ----------------------------------------------------------------------------------------------------------


def check_run(path: str, flag: str) -> Path:
    """The run folder that a user names. UserError for one that holds no metrics.jsonl that can be read."""
    folder = user_path(path, flag)
    if not folder.exists():
        close = nearest(str(folder), map(str, folder.parent.glob("*"))) if folder.parent.is_dir() else None
        raise UserError(f"{flag}: {folder} does not exist.{f' Did you mean {close}?' if close else ''}")
    if not folder.is_dir():
        raise UserError(f"{flag}: {folder} is not a run folder; give the folder that holds metrics.jsonl.")
    metrics = folder / "metrics.jsonl"
    if kind := special_file(metrics):
        raise UserError(f"{flag}: {metrics} is {kind}.")
    if not metrics.is_file():
        # A folder of runs is the usual mistake, RUNS_DIR or RUNS_DIR/SCRIPT.
        inner = [path.parent for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/metrics.jsonl"))]
        fix = f" It holds runs: give one, such as {inner[-1]}." if inner else " Give the folder of a run."
        raise UserError(f"{flag}: {folder} is not a run folder: it has no metrics.jsonl.{fix}")
    return folder


def check_records(run: RunRecords, flag: str) -> None:
    """UserError for a run whose metrics.jsonl has lines, and no record among them."""
    path = run.folder / "metrics.jsonl"
    with os_errors(f"{flag}: cannot read {path}"), path.open("rb") as file:
        size = len(file.read(1))
    if size and not run.records and run.damaged.get("metrics.jsonl"):
        raise UserError(
            f"{flag}: {path} is not the log of a run: none of its {run.damaged['metrics.jsonl']:,} lines is a JSON "
            'object with a whole number as "step".'
        )


def read_run(folder: Path) -> RunRecords:
    """Everything that the folder's files say; raises nothing for what they hold."""
    folder, damaged = Path(folder), {}
    records, damaged["metrics.jsonl"] = _read_lines(folder / "metrics.jsonl")
    health, damaged["health.jsonl"] = _read_lines(folder / "health.jsonl")
    config: Any = {}
    try:
        config = json.loads(read_small(folder / "config.json", MAX_JSON))
    except FileNotFoundError:
        pass
    # RecursionError: a file of brackets nested deeper than the parser goes.
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        config, damaged["config.json"] = {}, 1
    return RunRecords(folder, records, health, config, _read_plan(folder / "train.log"), damaged)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    records, damaged = read_records(path)
    return in_order(records), damaged


def _read_plan(path: Path) -> tuple[tuple[str, str], ...]:
    """The rows of the plan, from the first entry of train.log: a name in eight columns, and text. A row without a name
    goes on with the one before."""
    try:
        if special_file(path):
            return ()
        with path.open("rb") as file:
            text = file.read(MAX_LOG).decode("utf-8", "replace")
    except OSError:
        return ()
    rows: list[tuple[str, str]] = []
    for line_number, line in enumerate(text.splitlines()):
        # "2026-11-26 00:54:19,161 INFO model   quickstart, ..."
        # Only the first line of a log entry has the prefix.
        row = re.sub(r"^[\d-]+ [\d:,]+ INFO ", "", line) if line_number == 0 else line
        name, said = row[:8].strip(), row[8:]
        # The first line that is no row ends the plan.
        if not said.strip() or (name and not re.fullmatch(r"[a-z]+ +", row[:8])) or (not name and not rows):
            break
        rows.append((name or rows[-1][0], said.strip()))
    return tuple(rows)


def damage(run: RunRecords) -> str:
    """A line for each file of which something could not be read."""
    found = []
    for name, lines in run.damaged.items():
        if lines and name.endswith(".jsonl"):
            found.append(f"{name}: {lines:,} damaged line{'s are' if lines > 1 else ' is'} left out")
        elif lines:
            found.append(f"{name} cannot be read")
    return "; ".join(found)


def planned_memory(run: RunRecords) -> dict[str, float]:
    """GiB by kind, from the plan's row: "0.28 of 23.5 GiB, most at the loss: weights 0.02, optimizer 0.03"."""
    text = next((text for name, text in run.plan if name == "memory"), "")
    kinds = text.partition(": ")[2].split(", ")
    found = (re.fullmatch(r"(.+?) (\d+\.\d+)", kind) for kind in kinds)
    return {match[1]: float(match[2]) for match in found if match}


def shown_value(value: Any) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value)
