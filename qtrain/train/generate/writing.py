"""Continuing many prompts: batches, text in the order of the prompts as it is written, a record of each, totals."""

import json
import sys
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from qtrain.core.errors import os_errors
from qtrain.data.tokenizers.tokenizer import Tokenizer
from qtrain.models import Decoding, Generation, Piece, TextStream, stream_texts
from qtrain.models.generation.cache import rows_at_once
from qtrain.train.generate.prompts import Prompt


@dataclass
class Totals:
    """Of all batches. Seconds are those of the model, not of loading it."""

    prompts: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, generation: Generation, prompt_tokens: int) -> None:
        self.rows += len(generation.rows)
        self.prompt_tokens += prompt_tokens
        self.tokens += sum(len(row.ids) for row in generation.rows)
        self.prompt_seconds += generation.prompt_seconds
        self.decode_seconds += generation.decode_seconds

    def line(self) -> str:
        seconds = self.prompt_seconds + self.decode_seconds
        # The first token of a row is that of the prefill.
        decoded = max(self.tokens - self.rows, 0)
        prefill, decode = self.prompt_tokens / (self.prompt_seconds or 1), decoded / (self.decode_seconds or 1)
        return (
            f"{self.prompts:,} prompts, {self.tokens:,} tokens, {seconds:.1f} s; prefill {prefill:,.0f} tok/s, decode "
            f"{decode:,.0f} tok/s"
        )


def write_texts(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    output: "Output",
    totals: Totals,
    *,
    decoding: Decoding,
    stops: Sequence[str],
    samples: int,
    batch_size: int,
) -> None:
    """Write all continuations of the prompts to `output`. stops: strings that end a text; samples: of each prompt;
    batch_size: rows together, 0: as many as the cache's limit allows."""
    rows = [(number, sample) for number in range(len(prompts)) for sample in range(samples)]
    places = max(len(prompt.ids) for prompt in prompts) + decoding.max_new_tokens
    together = batch_size or rows_at_once(model, min(places, decoding.context or places))
    totals.prompts += len(prompts)
    for start in range(0, len(rows), together):
        batch = rows[start : start + together]
        ids = [prompts[number].ids for number, _ in batch]
        streams = [TextStream(tokenizer.decode, own, stops) for own in ids]
        generation = Generation(model, ids, decoding, range(start, start + len(batch)))
        for piece in closing_pieces(generation, streams):
            output.piece(start + piece.row, piece.text)
            if piece.ended:
                number, sample = batch[piece.row]
                record = _record(prompts[number], sample, streams[piece.row], generation, piece)
                output.end(start + piece.row, record)
        totals.add(generation, sum(map(len, ids)))


def closing_pieces(generation: Generation, streams: Sequence[TextStream]) -> Generator[Piece, None, None]:
    """The pieces; the model is left as it was also where the caller breaks off."""
    with closing(stream_texts(generation, streams)) as pieces:
        yield from pieces


def _record(prompt: Prompt, sample: int, stream: TextStream, generation: Generation, piece: Piece) -> dict[str, Any]:
    row = generation.rows[piece.row]
    found = {
        "prompt": prompt.given.content,
        "sample": sample,
        "text": stream.text,
        "ids": row.ids,
        "finish": row.finish,
        "tokens": len(row.ids),
        "seconds": round(piece.seconds, 4),
        "tok_s": round(len(row.ids) / piece.seconds, 2),
    }
    logprobs = generation.logprobs(piece.row)
    return found if logprobs is None else {**found, "logprobs": logprobs}


class Output:
    """Texts on stdout, one after the other: the first that has not ended is written as it comes, later ones wait. With
    several, stderr names each before it comes. records: a file for one JSON object a text, a line each."""

    def __init__(self, names: Sequence[str], records: Path | None):
        self._names, self._records = names, records
        self._waiting: dict[int, str] = defaultdict(str)
        self._ended: dict[int, dict[str, Any]] = {}
        self._row = 0
        if records is not None:
            self._write(records, "w", "")
        self._begin()

    def piece(self, row: int, text: str) -> None:
        if row == self._row:
            self._show(text)
        else:
            self._waiting[row] += text

    def end(self, row: int, record: dict[str, Any]) -> None:
        self._ended[row] = record
        while self._row in self._ended:
            record = self._ended.pop(self._row)
            if self._records is not None:
                self._write(self._records, "a", json.dumps(record, ensure_ascii=False) + "\n")
            self._show("\n")
            self._row += 1
            if self._row < len(self._names):
                self._begin()
                self._show(self._waiting.pop(self._row, ""))

    def _begin(self) -> None:
        if len(self._names) > 1:
            print(f"---- {self._names[self._row]}", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        print(text, end="", flush=True)

    def _write(self, path: Path, mode: str, text: str) -> None:
        with os_errors(f"--json: cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
