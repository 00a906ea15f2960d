"""The texts of a batch as they are written."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from qtrain.models.generation.engine import Generation
from qtrain.models.generation.text import TextStream


@dataclass(frozen=True)
class Piece:
    """Text of a row that is final."""

    row: int
    text: str
    ended: bool
    """Whether it is the row's last piece: `Generation.rows` then says why."""
    seconds: float
    """Since the batch began."""


def stream_texts(generation: Generation, streams: Sequence[TextStream]) -> Generator[Piece, None, None]:
    """The pieces of all rows, each with its stream, from check to check."""
    started = time.perf_counter()
    going = set(range(len(streams)))
    for new in generation:
        for row in sorted(going):
            stream, text = streams[row], ""
            for token in new[row]:
                text += stream.push(token)
                if stream.stopped:
                    generation.stop(row, len(stream.ids))
                    break
            ended = generation.rows[row].finish is not None
            if ended:
                text += stream.end()
                going.remove(row)
            if text or ended:
                yield Piece(row, text, ended, time.perf_counter() - started)
