"""Examples to samples: several packed into one sample, or one per sample, padded.

A window of examples is packed together, by best-fit decreasing: the longest first, each into the fullest sample that
still has room, which leaves 1-3% of padding where examples are much shorter than samples. Examples are never split.
Each is a document of its own to attention and starts at position 0, so packing does not change what is computed for it.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qtrain.data.batch import Sample


@dataclass(frozen=True)
class Example:
    """`ids` int64 [n]; `trained` bool [n]: whether the token is a training target."""

    ids: np.ndarray
    trained: np.ndarray

    def cut(self, length: int) -> "Example":
        return Example(self.ids[:length], self.trained[:length])


def pack_examples(examples: Sequence[Example], seq_len: int, pad_id: int) -> list[Sample]:
    """Samples of seq_len+1 tokens, padded with `pad_id`; no example may be longer."""
    free: list[tuple[int, int]] = []  # (tokens free, index) of every sample, ascending
    members: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        at = bisect.bisect_left(free, (len(example.ids), -1))  # the fullest sample that has room
        if at < len(free):  # else a new sample
            room, index = free.pop(at)
        else:
            room, index = seq_len + 1, len(members)
            members.append([])
        members[index].append(example)
        # A sample without room stays in the list: no example is empty, so none is put into it.
        bisect.insort(free, (room - len(example.ids), index))
    return [_packed(row, seq_len, pad_id) for row in members]


def _packed(row: Sequence[Example], seq_len: int, pad_id: int) -> Sample:
    tokens = np.full(seq_len + 1, pad_id, dtype=np.int64)
    trained = np.zeros(seq_len + 1, dtype=bool)
    doc_ids = np.full(seq_len + 1, len(row), dtype=np.int64)  # the padding is a document of its own
    start = 0
    for index, example in enumerate(row):
        end = start + len(example.ids)
        tokens[start:end], trained[start:end], doc_ids[start:end] = example.ids, example.trained, index
        trained[start] = False  # no token of its document predicts it
        start = end
    return Sample(tokens, trained[1:], doc_ids[:-1])  # labels and positions of the first S tokens


def pad_examples(examples: Sequence[Example], multiple: int, group_size: int, pad_id: int) -> list[list[Sample]]:
    """Groups of samples of similar length: one example each, padded to the group's next multiple, plus one."""
    ordered = sorted(examples, key=lambda e: len(e.ids))  # neighbors need the least padding
    groups = [ordered[start : start + group_size] for start in range(0, len(ordered), group_size)]
    return [[_padded(example, _length(group, multiple), pad_id) for example in group] for group in groups]


def _length(group: Sequence[Example], multiple: int) -> int:
    longest = max(len(example.ids) for example in group) - 1
    return max(1, -(-longest // multiple)) * multiple + 1


def _padded(example: Example, length: int, pad_id: int) -> Sample:
    tokens, trained = np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=bool)
    tokens[: len(example.ids)], trained[: len(example.ids)] = example.ids, example.trained
    return Sample(tokens, trained[1:])
