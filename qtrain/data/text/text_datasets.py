"""Dataset types `text` (local files) and `hf_text` (the Hugging Face hub): tokenized during training, not stored.

Documents are packed into windows: their ids are concatenated, each document ended by eos, and cut every seq_len ids.
"""

import dataclasses
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.data.batch import Sample
from qtrain.data.files import edges, text_files
from qtrain.data.hub_rows import RowReader, RowSource
from qtrain.data.permutation import Permutation
from qtrain.data.stream import (
    DATASETS,
    ESTIMATED_FROM,
    SKIPPED,
    Dataset,
    Extent,
    Stream,
    StreamContext,
    check_position,
    checked_tokenizer,
)
from qtrain.data.text.documents import BadRecord, DocumentOrder, Documents
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

    _first_bad = ""
    """What is wrong with the first record that was skipped."""

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
        # Documents are encoded again from the cursor's on: only integers are in a position.
        self._source = self.documents(cursor)
        self._buffer: deque[tuple[dict[str, Any], np.ndarray]] = deque()  # from _cursor on; _token is in the first
        self._buffered = -self._token  # ids after _token in the buffer
        self._last_epoch_with_text: int | None = None

    def mean_tokens(self, texts: Sequence[str]) -> float:
        """Tokens of a document, its end token included, on average over `texts`; of long ones by their beginnings."""
        beginnings = [text[:ESTIMATED_CHARACTERS] for text in texts]
        total = 0.0
        for text, beginning, ids in zip(texts, beginnings, self._tokenizer.encode_batch(beginnings), strict=True):
            # A long document is assumed to go on as it begins; + 1 for eos.
            total += len(ids) * len(text) / len(beginning) + 1 if text else 0
        return total / max(len(texts), 1)

    def next_sample(self) -> Sample:
        length = self._ctx.seq_len + 1
        while self._buffered < length:
            self._read_more()
        pieces, missing, at = [], length, self._token  # slices of documents, ids still to find, offset in the first
        for _, ids in self._buffer:
            pieces.append(ids[at : at + missing])
            missing -= len(pieces[-1])
            if not missing:
                break
            at = 0
        self._advance(self._ctx.seq_len)  # one less than the window: its last id is the next one's first
        return Sample(np.concatenate(pieces))

    def _advance(self, count: int) -> None:
        self._token += count
        self._buffered -= count
        while self._token >= len(self._buffer[0][1]):
            self._token -= len(self._buffer.popleft()[1])  # documents that lie wholly before the next window
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
            # A whole epoch without text: the next ones would be read forever.
            elif document.epoch > self._last_epoch_with_text + 1:
                raise UserError(
                    f"{self._flag}: every document is empty; there is nothing to train on.{self._first_bad}"
                )
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


@DATASETS.register("text")
@dataclass(frozen=True)
class TextDataset(Dataset):
    """Local .txt, .py, .jsonl, .json, .csv, .parquet and .arrow files (or python:stdlib), tokenized during training"""

    paths: str | list[str]
    """files (compressed ones too), globs or folders; python:stdlib is the standard library's source"""
    tokenizer: str | None = None
    """name, file, folder or hub id of the tokenizer; null: that of a model with weights"""
    split: Literal["all", "train", "validation"] | None = None
    """which files, by a hash of their path; null: all"""
    part: Literal["all", "train", "validation"] | None = None
    """another name for split"""
    validation_fraction: Annotated[float, Range(0, 1)] = 0.05
    """share of the files in the validation split; of few files, of the documents in each"""
    text_column: str = "text"
    """column or key that holds the text"""
    bad_records: Literal["stop", "skip"] = "stop"
    """a line, record or row that is no text, or lacks the column: stop the run, or skip it and count it"""

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        if self.split and self.part and self.split != self.part:
            raise UserError(f"{flag}: split is {self.split!r} and part is {self.part!r}; they mean the same, give one.")
        files = text_files(self.paths, self.split or self.part or "all", self.validation_fraction, flag)
        tokenizer = checked_tokenizer(self.tokenizer, ctx, flag)
        skip = self.bad_records == "skip"
        stream = TextStream(Documents(files, self.text_column, flag, skip), ctx, tokenizer, flag, skip)
        stream.files = [file.path for file in files]
        stream.reads = [Extent(str(f.path.resolve()), *edges(f.part, f.validation_fraction)) for f in files]
        return stream


class TextStream(PackedStream):
    """The documents of the shuffled epochs, epoch after epoch.

    Cursor: `document`, the index in that order, counted over epochs; with skip_bad also `skipped`, how many bad records
    were passed over before it."""

    def __init__(
        self, documents: Documents, ctx: StreamContext, tokenizer: Tokenizer, flag: str, skip_bad: bool = False
    ):
        self._documents, self._skip_bad = documents, skip_bad
        self._order = DocumentOrder(documents, ctx.seed, ctx.shuffle)
        first = {"document": 0, **({SKIPPED: 0} if skip_bad else {})}
        super().__init__(ctx, tokenizer, first, {"documents": len(documents)}, flag)

    def seek(self, position: Mapping[str, Any]) -> None:
        super().seek({SKIPPED: 0, **position})  # of a run that stopped at a bad record, resumed to skip it

    def documents(self, cursor: Mapping[str, Any]) -> Iterator[Document]:
        cursor, count = dict(cursor), len(self._documents)
        while self._ctx.epochs is None or cursor["document"] < self._ctx.epochs * count:
            epoch, place = divmod(cursor["document"], count)
            text = self._read(self._order(epoch, place))
            yield Document(dict(cursor), epoch, text or "")
            cursor["document"] += 1
            if text is None:
                cursor[SKIPPED] += 1

    def _read(self, index: int) -> str | None:
        """The text of a document; None: a bad record to be skipped."""
        try:
            return self._documents.read(index)
        except BadRecord as error:
            if not self._skip_bad:
                raise
            self._first_bad = self._first_bad or f" The first of its bad records is {error}"
            return None

    def estimated_samples(self) -> float:
        count = len(self._documents)
        first = (self._order(0, place) for place in range(min(count, ESTIMATED_FROM)))
        return count * self.mean_tokens([self._read(index) or "" for index in first]) / self._ctx.seq_len


@DATASETS.register("hf_text")
@dataclass(frozen=True)
class HfTextDataset(Dataset):
    """A Hugging Face dataset, streamed and tokenized during training"""

    dataset: str
    """hub id; a local file or glob; or json, parquet, csv, text or arrow with data_files"""
    tokenizer: str | None = None
    """name, file, folder or hub id of the tokenizer; null: that of a model with weights"""
    subset: str | None = None
    """subset (configuration) of the dataset"""
    split: str = "train"
    """split of the dataset"""
    text_column: str = "text"
    """column that holds the text"""
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    """files or globs, or an object of them by split"""
    shuffle_buffer: Annotated[int, Range(1)] = 1000
    """rows that are shuffled together, after the dataset's files are shuffled"""

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        tokenizer = checked_tokenizer(self.tokenizer, ctx, flag)
        source = RowSource.of(self.dataset, self.subset, self.split, (self.text_column,), self.data_files)
        reader = RowReader(source, ctx.seed, ctx.shuffle, flag)
        return HfTextStream(reader, self.shuffle_buffer, ctx, tokenizer, flag)


class HfTextStream(PackedStream):
    """The rows in windows of `window` rows, each window in a computed order.

    Cursor: RowReader's cursor of the window's start, and `index`, the document's place in the window's order."""

    def __init__(self, reader: RowReader, window: int, ctx: StreamContext, tokenizer: Tokenizer, flag: str):
        self._reader, self._window = reader, window
        fixed = {"shards": reader.shards, "shuffle_buffer": window}
        super().__init__(ctx, tokenizer, {**reader.first_cursor(), "index": 0}, fixed, flag)
        self.reads = [Extent(source) for source in reader.source.sources()]

    def documents(self, cursor: Mapping[str, Any]) -> Iterator[Document]:
        start = {key: value for key, value in cursor.items() if key != "index"}  # RowReader's part
        index = cursor["index"]
        while self._ctx.epochs is None or start["epoch"] < self._ctx.epochs:
            texts, after = self._reader.read(start, self._window)
            for place in range(index, len(texts)):
                yield Document({**start, "index": place}, start["epoch"], texts[self._place(start, place, len(texts))])
            if not texts:  # an epoch without rows: PackedStream counts epochs without text
                yield Document({**start, "index": 0}, start["epoch"], "")
            start, index = after, 0

    def _place(self, start: Mapping[str, Any], place: int, count: int) -> int:
        if not self._ctx.shuffle:
            return place
        return Permutation(count, self._ctx.seed, start["epoch"], start["shard"], start["row"])(place)

    def estimated_samples(self) -> float | None:
        rows = self._reader.estimated_rows()
        if rows is None:
            return None
        texts, _ = self._reader.read(self._reader.first_cursor(), ESTIMATED_FROM)
        return rows * self.mean_tokens(texts) / self._ctx.seq_len
