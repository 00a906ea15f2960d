"""JSON lines of a run: metrics.jsonl and health.jsonl as they are read again, by a resumed run and by reports.

Files of a run that was killed, or that still writes, are normal; so are files that someone has edited. A line that is
no record is left out, and a missing file is an empty one. Nothing here imports torch: a report is drawn in a second.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qtrain.core.checks import MAX_JSON
from qtrain.core.reading import read_small, special_file

MAX_LINE = 1 << 20
"""Bytes of the longest line that is read; a longer one is no record."""
MAX_STEP = 2**53  # a float holds every whole number up to here

Record = dict[str, Any]
"""The object of a line, which has a "step"; or of a file."""


def record_of(line: bytes) -> Record | None:
    """A complete line as a record; None for a truncated one, and for one without a whole number as "step"."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    # bool is a subclass of int: `"step": true` is no step.
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_STEP else None


def read_records(path: Path) -> tuple[list[Record], int]:
    """(records in the order of the file, damaged lines); none of a file that is missing or cannot be read. A last line
    without its end is not counted: the run may be writing it."""
    records: list[Record] = []
    damaged = 0
    if special_file(path) or not path.is_file():
        return records, damaged
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                record = record_of(line)
                if record is None:
                    # Blank lines are harmless, and the last one may be half written.
                    damaged += line.endswith(b"\n") and bool(line.strip())
                    continue
                records.append(record)
    except OSError:
        pass
    return records, damaged


def read_object(path: Path) -> Record:
    """The object in a JSON file; an empty one of a file that is missing, cannot be read or holds something else."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(path, MAX_JSON))
        return found if isinstance(found, dict) else {}
    return {}


def in_order(records: list[Record]) -> list[Record]:
    """The records that count, in order of their steps. Where the steps go back, as after a kill and a resume of an
    older checkpoint, the later ones do."""
    # The usual case, without a rewind: nothing is dropped.
    if all(a["step"] < b["step"] for a, b in itertools.pairwise(records)):
        return records
    found: list[Record] = []
    for record in records:
        # An evaluation follows its step; the record of a step is the first of it.
        while found and found[-1]["step"] > record["step"] - ("loss" in record):
            found.pop()
        found.append(record)
    return found


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines; of one of more than MAX_LINE bytes only an end that is no record."""
    while line := file.readline(MAX_LINE):
        # readline has stopped at its limit: the rest is read in pieces and dropped, in constant memory.
        if not line.endswith(b"\n") and len(line) == MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE)
            line = b"too long\n"
        yield line
