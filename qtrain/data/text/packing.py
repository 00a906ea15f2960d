"""Documents packed into windows: their ids are concatenated, each document ended by eos, and cut every seq_len ids."""

import dataclasses
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qtrain.core.errors import UserError
from qtrain.data.batch import Sample
from qtrain.data.stream import Stream, StreamContext, check_position
from qtrain.data.tokenizers.tokenizer import Tokenizer

ENCODE_CHARACTERS = 1 << 17
ENCODE_DOCUMENTS = 64
ESTIMATED_CHARACTERS = 4096


@dataclasses.dataclass(frozen=True)
class Document:
    """A document, and the cursor from which it is read first."""

    cursor: dict[str, Any]
    epoch: int
    text: str


class PackedStream(Stream):
    """Windows of seq_len+1 ids; the last id of one is the first of the next, so every id but the first is a label.

    Position: the cursor of the document that the next window starts in, `token`, the offset inside it, and `fixed`,
    what the order depends on: resuming with other values is refused. A subclass defines the documents after a
    cursor."""

    def __init__(
        self, ctx: StreamContext, tokenizer: Tokenizer, first_cursor: dict[str, Any], fixed: dict[str, Any], flag: str
    ):
        self._ctx, self._tokenizer, self._flag = ctx, tokenizer, flag
        self._fixed = {**fixed, "seed": ctx.seed}
        self._cursor_keys = tuple(first_cursor)
        self._start(first_cursor, 0)

    @abstractmethod
    def documents(self, cursor: Mapping[str, Any]) -> Iterator[Document]:
        """Documents from `cursor` on, until the end of `ctx.epochs` if it is set."""

    def position(self) -> dict[str, Any]:
        return {**self._cursor, "token": self._token, **self._fixed}

    def seek(self, position: Mapping[str, Any]) -> None:
        check_position(position, self._fixed, self._flag)
        self._start({key: position[key] for key in self._cursor_keys}, position["token"])

    def _start(self, cursor: dict[str, Any], token: int) -> None:
        self._cursor, self._token = cursor, token
        self._source = self.documents(cursor)
        self._buffer: deque[tuple[dict[str, Any], np.ndarray]] = deque()  # from _cursor on; _token is in the first
        self._buffered = -self._token
        self._last_epoch_with_text: int | None = None

    def mean_tokens(self, texts: Sequence[str]) -> float:
        """Tokens of a document, its end token included, on average over `texts`; of long ones by their beginnings."""
        beginnings = [text[:ESTIMATED_CHARACTERS] for text in texts]
        total = 0.0
        for text, beginning, ids in zip(texts, beginnings, self._tokenizer.encode_batch(beginnings), strict=True):
            total += len(ids) * len(text) / len(beginning) + 1 if text else 0
        return total / max(len(texts), 1)

    def next_sample(self) -> Sample:
        length = self._ctx.seq_len + 1
        while self._buffered < length:
            self._read_more()
        pieces, missing, at = [], length, self._token
        for _, ids in self._buffer:
            pieces.append(ids[at : at + missing])
            missing -= len(pieces[-1])
            if not missing:
                break
            at = 0
        self._advance(self._ctx.seq_len)
        return Sample(np.concatenate(pieces))

    def _advance(self, count: int) -> None:
        self._token += count
        self._buffered -= count
        while self._token >= len(self._buffer[0][1]):
            self._token -= len(self._buffer.popleft()[1])
        self._cursor = self._buffer[0][0]

    def _read_more(self) -> None:
        """Encode a batch of documents, which a tokenizer may do on several threads."""
        batch, characters = [], 0
        for document in self._source:
            if document.text:
                batch.append(document)
                characters += len(document.text)
                self._last_epoch_with_text = document.epoch
            elif self._last_epoch_with_text is None:
                self._last_epoch_with_text = document.epoch
            elif document.epoch > self._last_epoch_with_text + 1:
                raise UserError(f"{self._flag}: every document is empty; there is nothing to train on.")
            if characters >= ENCODE_CHARACTERS or len(batch) >= ENCODE_DOCUMENTS:
                break
        if not batch:
            raise StopIteration
        eos = self._tokenizer.eos_id
        for document, ids in zip(batch, self._tokenizer.encode_batch([d.text for d in batch]), strict=True):
            self._buffer.append((document.cursor, np.array([*ids, eos], dtype=np.int64)))
            self._buffered += len(ids) + 1
        if self._token >= len(self._buffer[0][1]):
            raise UserError(f"{self._flag}: cannot resume: the document in which the position lies is shorter now.")
