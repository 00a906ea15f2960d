"""Examples made into samples: packed, several in one, or one in each, padded.

A window of examples is arranged at once. Packing is best-fit decreasing: the longest first, each into the fullest
sample that still holds it, which leaves 1-3% of padding where examples are much shorter than samples. Every example is
whole, is a document of its own to attention, and begins at position 0: a packed sample computes what its examples
alone would.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtrain.data.stream import Sample


@dataclass(frozen=True)
class Example:
    """`ids` int64 [n]; `trained` bool [n]: whether a token is one to learn to write."""

    ids: np.ndarray
    trained: np.ndarray

    def cut(self, length: int) -> "Example":
        return Example(self.ids[:length], self.trained[:length])


def pack(examples: Sequence[Example], seq_len: int, filler: int) -> list[Sample]:
    """Samples of seq_len+1 tokens, filled up with `filler`; no example may be longer."""
    free: list[tuple[int, int]] = []  # (tokens left, number) of every sample, ascending
    members: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        at = bisect.bisect_left(free, (len(example.ids), -1))
        if at < len(free):
            left, number = free.pop(at)
        else:
            left, number = seq_len + 1, len(members)
            members.append([])
        members[number].append(example)
        bisect.insort(free, (left - len(example.ids), number))
    return [_packed(row, seq_len, filler) for row in members]


def _packed(row: Sequence[Example], seq_len: int, filler: int) -> Sample:
    tokens = np.full(seq_len + 1, filler, dtype=np.int64)
    trained = np.zeros(seq_len + 1, dtype=bool)
    doc_ids = np.full(seq_len + 1, len(row), dtype=np.int64)  # what fills up is a document of its own
    start = 0
    for number, example in enumerate(row):
        end = start + len(example.ids)
        tokens[start:end], trained[start:end], doc_ids[start:end] = example.ids, example.trained, number
        trained[start] = False  # nothing of its own document comes before it
        start = end
    return Sample(tokens, trained[1:], doc_ids[:-1])


def pad(examples: Sequence[Example], multiple: int, together: int, filler: int) -> list[list[Sample]]:
    """Groups of `together` samples of like length: one example each, padded to the group's next multiple, plus one."""
    ordered = sorted(examples, key=lambda e: len(e.ids))
    groups = [ordered[start : start + together] for start in range(0, len(ordered), together)]
    return [[_padded(example, _length(group, multiple), filler) for example in group] for group in groups]


def _length(group: Sequence[Example], multiple: int) -> int:
    longest = max(len(example.ids) for example in group) - 1
    return max(1, -(-longest // multiple)) * multiple + 1


def _padded(example: Example, length: int, filler: int) -> Sample:
    tokens, trained = np.full(length, filler, dtype=np.int64), np.zeros(length, dtype=bool)
    tokens[: len(example.ids)], trained[: len(example.ids)] = example.ids, example.trained
    return Sample(tokens, trained[1:])
