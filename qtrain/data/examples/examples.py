"""Datasets of examples, each with text to read and text to learn to write: what `instruct` and `chat` share.

Rows come through `hub_rows`, from the hub or from local files alike. A window of them is rendered, tokenized and
arranged into samples at once (`arrange.py`); the samples of a window are then given in a computed order. A position is
the window's start, the place in it, and what has been counted so far.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from qtrain.checks import Range
from qtrain.data.examples.example_packing import Example, pack, pad
from qtrain.data.hub_rows import RowReader, RowSource
from qtrain.data.permutation import Permutation
from qtrain.data.stream import Dataset, Sample, Stream, StreamContext, check_position, run_tokenizer
from qtrain.data.text.documents import valid_unicode
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from qtrain.errors import UserError

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Endings of local files, and what `datasets` calls them."""

COUNTS = ("read", "dropped", "cut", "empty")
"""Examples read; too long and left out; too long and cut; without anything to learn, and left out."""


class Part(NamedTuple):
    """A stretch of an example's text; `trained`: whether it is to be learned."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ExampleDataset(Dataset):
    """The options that every dataset of examples has; a further one says how a row becomes parts of text."""

    dataset: str
    tokenizer: str | None = None
    subset: str | None = None
    split: str = "train"
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    part: Literal["all", "train", "validation"] = "all"
    validation_fraction: Annotated[float, Range(0, 1)] = 0.05
    train_on_all: bool = False
    too_long: Literal["drop", "cut"] = "drop"
    begin_token: bool = False
    window: Annotated[int, Range(1)] = 1024

    @abstractmethod
    def renderer(self, tokenizer: Tokenizer, flag: str) -> "Renderer":
        """What turns rows into parts. UserError for options that cannot be used."""

    def load_tokenizer(self, flag: str) -> Tokenizer | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer, flag)

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        return ExampleStream(*self._reader(ctx, flag), ctx, self, flag)

    def records(self, ctx: StreamContext, flag: str) -> Iterator[list[Part]]:
        """The examples of one epoch as text, those of this rank."""
        reader, renderer, _ = self._reader(ctx, flag)
        cursor = reader.first_cursor()
        while cursor["epoch"] == 0:
            rows, cursor = reader.read(cursor, self.window)
            yield from (parts for row in rows if self.takes(parts := renderer.parts(row)) and any_answer(parts))

    def takes(self, parts: Sequence[Part]) -> bool:
        """Whether an example is in the chosen part: by a hash of its prompt, so that no other row can move it."""
        if self.part == "all":
            return True
        digest = hashlib.sha256(parts[0].text.encode()).digest()
        in_validation = int.from_bytes(digest[:8], "little") / 2**64 < self.validation_fraction
        return in_validation == (self.part == "validation")

    def _reader(self, ctx: StreamContext, flag: str) -> tuple[RowReader, "Renderer", Tokenizer]:
        name = self.tokenizer if ctx.tokenizer is None or self.tokenizer else ctx.tokenizer.name
        if name is None:
            raise UserError(f'{flag}: it does not say its tokenizer; add "tokenizer":"NAME" to it.')
        tokenizer = run_tokenizer(name, ctx, flag)
        renderer = self.renderer(tokenizer, flag)
        dataset, files = self.dataset, self.data_files
        if files is None and Path(dataset).suffix in FORMATS:  # a local file stands for itself
            dataset, files = FORMATS[Path(dataset).suffix], dataset
        source = RowSource(dataset, self.subset, self.split, renderer.columns, files, records=True)
        return RowReader(source, ctx.seed, ctx.shuffle, ctx.rank, ctx.world, flag), renderer, tokenizer


class Renderer:
    """Rows to parts of text."""

    columns: tuple[str, ...]

    def parts(self, row: Mapping[str, Any]) -> list[Part]:
        """The example's text, in order; the first part is its prompt. UserError for a row that cannot be used."""
        raise NotImplementedError

    def ends(self, parts: Sequence[Part]) -> bool:
        """Whether the tokenizer's end token is still to be put after them."""
        return True


def any_answer(parts: Sequence[Part]) -> bool:
    return any(part.trained and part.text.strip() for part in parts)


class ExampleStream(Stream):
    """Samples of arranged windows, without end, or until `ctx.epochs` are over.

    Position: RowReader's cursor of the window, `at`, the place in it, and COUNTS, with those of a window begun."""

    def __init__(
        self,
        reader: RowReader,
        renderer: Renderer,
        tokenizer: Tokenizer,
        ctx: StreamContext,
        options: ExampleDataset,
        flag: str,
    ):
        self._reader, self._renderer, self._tokenizer = reader, renderer, tokenizer
        self._ctx, self._options, self._flag = ctx, options, flag
        self._fixed = {"shards": reader.shards, "window": options.window, "seq_len": ctx.seq_len, "seed": ctx.seed}
        self._fixed |= {"multiple": ctx.seq_len_multiple, "rank": ctx.rank, "world": ctx.world, "part": options.part}
        if ctx.seq_len_multiple and ctx.seq_len % ctx.seq_len_multiple:
            raise UserError(
                f"--seq_len_multiple: {ctx.seq_len_multiple} does not divide --seq_len {ctx.seq_len}; give one that "
                "does, or 0 to pack."
            )
        self._fixed |= {"together": ctx.micro_batch_size} if ctx.seq_len_multiple else {}
        self._start(reader.first_cursor(), 0, dict.fromkeys(COUNTS, 0))

    def _start(self, cursor: dict[str, Any], at: int, counts: dict[str, int]) -> None:
        self._cursor, self._at, self._counts = cursor, 0, counts
        self._samples: list[Sample] = []
        self._barren: bool | None = None  # whether no example could be used since an epoch's start; None: one could
        if at:
            self._samples, self._after, _ = self._window(cursor)
            if at >= len(self._samples):
                raise UserError(f"{self._flag}: cannot resume: the data have fewer examples here now.")
            self._at = at

    def position(self) -> dict[str, Any]:
        return {**self._cursor, "at": self._at, **self._counts, **self._fixed}

    def seek(self, position: Mapping[str, Any]) -> None:
        check_position(position, self._fixed, self._flag)
        cursor = {key: position[key] for key in self._reader.first_cursor()}
        self._start(cursor, position["at"], {key: position[key] for key in COUNTS})

    def next_sample(self) -> Sample:
        while not self._samples:
            self._read_window()
        sample = self._samples[self._at]
        self._at += 1
        if self._at == len(self._samples):
            self._cursor, self._samples, self._at = self._after, [], 0
        return sample

    def _read_window(self) -> None:
        start = self._cursor
        if self._ctx.epochs is not None and start["epoch"] >= self._ctx.epochs:
            raise StopIteration
        self._samples, self._after, counts = self._window(start)
        self._counts = {key: self._counts[key] + counts[key] for key in COUNTS}
        if self._samples:
            self._barren = None
            return
        self._cursor = self._after
        if self._barren is None:
            self._barren = start["shard"] == start["row"] == 0
        if self._after["epoch"] > start["epoch"]:
            if self._barren:
                raise self._nothing()
            self._barren = True

    def _nothing(self) -> UserError:
        counts, length = self._counts, self._ctx.seq_len + 1
        why = [f"{counts['empty']} have nothing to learn"] if counts["empty"] else []
        why += [f"{counts['dropped']} are longer than seq_len+1 = {length} tokens"] if counts["dropped"] else []
        why += [f"none is in the part {self._options.part!r}"] if not counts["read"] else []
        fix = "Raise --seq_len, or set too_long to 'cut'." if counts["dropped"] else "Give other data."
        return UserError(f"{self._flag}: of {counts['read']} examples none can be used: {', '.join(why)}. {fix}")

    def _window(self, cursor: Mapping[str, Any]) -> tuple[list[Sample], dict[str, Any], dict[str, int]]:
        """The samples of the window that starts at `cursor`, the cursor after it, and what it counts."""
        ctx = self._ctx
        rows, after = self._reader.read(cursor, self._options.window)
        examples, counts = self._examples(rows)
        if not examples:
            return [], after, counts
        if ctx.seq_len_multiple:
            groups = pad(examples, ctx.seq_len_multiple, ctx.micro_batch_size, self._tokenizer.eos_id)
        else:
            groups = [[sample] for sample in pack(examples, ctx.seq_len, self._tokenizer.eos_id)]
        order = range(len(groups))
        if ctx.shuffle:
            order = Permutation(len(groups), ctx.seed, cursor["epoch"], cursor["shard"], cursor["row"]).all().tolist()
        return [sample for number in order for sample in groups[number]], after, counts

    def _examples(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Example], dict[str, int]]:
        counts, longest = dict.fromkeys(COUNTS, 0), self._ctx.seq_len + 1
        kept: list[list[Part]] = []
        for row in rows:
            parts = [Part(valid_unicode(text), trained) for text, trained in self._renderer.parts(row)]
            if self._options.takes(parts):
                counts["read"] += 1
                counts["empty"] += not any_answer(parts)
                kept += [parts] if any_answer(parts) else []
        encoded = iter(self._tokenizer.encode_batch([part.text for parts in kept for part in parts]))
        examples = []
        for parts in kept:
            example = self._example(parts, [next(encoded) for _ in parts])
            if len(example.ids) > longest:
                example = example.cut(longest)
                usable = self._options.too_long == "cut" and example.trained[1:].any()
                counts["cut" if usable else "dropped"] += 1
                if not usable:
                    continue
            examples.append(example)
        return examples, counts

    def _example(self, parts: Sequence[Part], encoded: Sequence[list[int]]) -> Example:
        """The ids of an example's parts, between the begin token, if asked for, and the end token."""
        begin = [self._tokenizer.bos_id] if self._options.begin_token and self._tokenizer.bos_id is not None else []
        end = [self._tokenizer.eos_id] if self._renderer.ends(parts) else []
        ids = [begin, *encoded, end]
        trained = [self._options.train_on_all, *(part.trained or self._options.train_on_all for part in parts), True]
        mask = [flag for flag, of_part in zip(trained, ids, strict=True) for _ in of_part]
        return Example(np.array([i for of_part in ids for i in of_part], dtype=np.int64), np.array(mask, dtype=bool))
