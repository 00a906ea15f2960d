"""Datasets of examples, each with text to read and text to train on: what `instruct` and `chat` share.

Rows come through `hub_rows`, from the hub and from local files alike. A window of rows is rendered, tokenized and
packed into samples together (`example_packing.py`); the samples of a window are then given in a computed order. A
position is the start of the window, the place in it, and the counts so far."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.data.batch import Sample
from qtrain.data.examples.example_packing import Example, pack_examples, pad_examples
from qtrain.data.files import edges, split_of
from qtrain.data.hub_rows import RowReader, RowSource, valid_unicode
from qtrain.data.permutation import Permutation
from qtrain.data.stream import ESTIMATED_FROM, Dataset, Extent, Stream, StreamContext, check_position, checked_tokenizer
from qtrain.data.tokenizers.tokenizer import Tokenizer

COUNTS = ("read", "dropped", "cut", "empty")
"""Examples read; too long and dropped; too long and cut; without anything to train on, and dropped."""


class Segment(NamedTuple):
    """A stretch of an example's text. trained: whether it is trained on."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ExampleDataset(Dataset):
    """The options of every dataset of examples; a subclass defines how a row becomes segments of text."""

    dataset: str
    """hub id; a local .jsonl, .json, .csv, .parquet or .arrow file (also .gz) or glob; or a format with data_files"""
    tokenizer: str | None = None
    """name, file, folder or hub id of the tokenizer; null: the model's"""
    subset: str | None = None
    """subset (configuration) of the dataset"""
    split: str = "train"
    """split of the dataset; a local file has only train"""
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    """files or globs, or an object of them by split"""
    part: Literal["all", "train", "validation"] = "all"
    """which examples of the split, by a hash of their prompt"""
    validation_fraction: Annotated[float, Range(0, 1)] = 0.05
    """share of the examples in the validation part"""
    train_on_all: bool = False
    """train on prompts too"""
    too_long: Literal["drop", "cut"] = "drop"
    """what happens to examples of more than seq_len+1 tokens"""
    begin_token: bool = False
    """start each example with the tokenizer's begin token"""
    window: Annotated[int, Range(1)] = 1024
    """rows that are packed and shuffled together"""

    @abstractmethod
    def renderer(self, tokenizer: Tokenizer, flag: str) -> "Renderer":
        """What turns rows into segments. UserError for options that cannot be used."""

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        return ExampleStream(*self._reader(ctx, flag), ctx, self, flag)

    def examples(self, ctx: StreamContext, flag: str) -> Iterator[list[Segment]]:
        """The examples of one epoch as text."""
        reader, renderer, _ = self._reader(ctx, flag)
        cursor = reader.first_cursor()
        while cursor["epoch"] == 0:
            rows, cursor = reader.read(cursor, self.window)
            yield from filter(has_target, self.render(rows, renderer))

    def render(self, rows: Sequence[Mapping[str, Any]], renderer: "Renderer") -> Iterator[list[Segment]]:
        """The segments of the rows that are in `part`."""
        for row in rows:
            segments = [Segment(valid_unicode(text), trained) for text, trained in renderer.segments(row)]
            # By the prompt: its answers stay in one part.
            if self.part == "all" or split_of(segments[0].text, self.validation_fraction) == self.part:
                yield segments

    def _reader(self, ctx: StreamContext, flag: str) -> tuple[RowReader, "Renderer", Tokenizer]:
        tokenizer = checked_tokenizer(self.tokenizer, ctx, flag)
        renderer = self.renderer(tokenizer, flag)
        source = RowSource.of(self.dataset, self.subset, self.split, renderer.columns, self.data_files, records=True)
        return RowReader(source, ctx.seed, ctx.shuffle, flag), renderer, tokenizer


class Renderer:
    """Turns rows into segments of text."""

    columns: tuple[str, ...]

    def segments(self, row: Mapping[str, Any]) -> list[Segment]:
        """The example's text in order; the first segment is its prompt. UserError for a row that cannot be used."""
        raise NotImplementedError

    def needs_end_token(self, segments: Sequence[Segment]) -> bool:
        """Whether the tokenizer's end token is to be appended."""
        return True


def has_target(segments: Sequence[Segment]) -> bool:
    """Whether there is any text to train on."""
    return any(segment.trained and segment.text.strip() for segment in segments)


class ExampleStream(Stream):
    """Samples of packed windows.

    Position: RowReader's cursor of the window's start, `at`, the place in it, and COUNTS, those of a started window
    included."""

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
        assert tokenizer.eos_id is not None  # `checked_tokenizer` refuses one without
        self._end_id = tokenizer.eos_id
        fixed = {"shards": reader.shards, "window": options.window, "seq_len": ctx.seq_len, "seed": ctx.seed}
        share = edges(options.part, options.validation_fraction)
        self.reads = [Extent(source, *share) for source in reader.source.sources()]
        self._fixed: dict[str, Any] = {**fixed, "multiple": ctx.seq_len_multiple, "part": options.part}
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
        self._unusable: bool | None = None  # whether no example was usable since an epoch's start; None: one was
        if at:
            self._samples, self._after, _ = self._window(cursor)  # the counts are in the position already
            if at >= len(self._samples):
                raise UserError(f"{self._flag}: cannot resume: the data now have fewer examples here.")
            self._at = at

    def position(self) -> dict[str, Any]:
        return {**self._cursor, "at": self._at, **self._counts, **self._fixed}

    def seek(self, position: Mapping[str, Any]) -> None:
        check_position(position, self._fixed, self._flag)
        cursor = {key: position[key] for key in self._reader.first_cursor()}
        self._start(cursor, position["at"], {key: position[key] for key in COUNTS})

    def estimated_samples(self) -> float | None:
        rows = self._reader.estimated_rows()
        if rows is None:
            return None
        read, _ = self._reader.read(self._reader.first_cursor(), ESTIMATED_FROM)
        examples, _ = self._examples(read)
        padded = bool(self._ctx.seq_len_multiple)
        samples = len(examples) if padded else sum(len(example.ids) for example in examples) / self._ctx.seq_len
        return rows * samples / max(len(read), 1)

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
            self._unusable = None
            return
        self._cursor = self._after
        if self._unusable is None:
            self._unusable = start["shard"] == start["row"] == 0  # an epoch that was begun in its middle tells nothing
        if self._after["epoch"] > start["epoch"]:
            if self._unusable:
                raise self._no_usable_example()
            self._unusable = True

    def _no_usable_example(self) -> UserError:
        counts, length = self._counts, self._ctx.seq_len + 1
        why = [f"{counts['empty']} have nothing to learn"] if counts["empty"] else []
        why += [f"{counts['dropped']} are longer than seq_len+1 = {length} tokens"] if counts["dropped"] else []
        why += [f"none is in the part {self._options.part!r}"] if not counts["read"] else []
        cut = "" if self._options.too_long == "cut" else ", or set too_long to 'cut'"
        fix = f"Raise --seq_len{cut}." if counts["dropped"] else "Use other data."
        return UserError(f"{self._flag}: of {counts['read']} examples none can be used: {', '.join(why)}. {fix}")

    def _window(self, cursor: Mapping[str, Any]) -> tuple[list[Sample], dict[str, Any], dict[str, int]]:
        """The samples of the window that starts at `cursor`, the cursor after it, and its counts."""
        ctx = self._ctx
        rows, after = self._reader.read(cursor, self._options.window)
        examples, counts = self._examples(rows)
        if not examples:
            return [], after, counts
        # Shuffled below by group: samples of one micro-batch keep a similar length.
        if ctx.seq_len_multiple:
            groups = pad_examples(examples, ctx.seq_len_multiple, ctx.micro_batch_size, self._end_id)
        else:
            groups = [[sample] for sample in pack_examples(examples, ctx.seq_len, self._end_id)]
        order = range(len(groups))
        if ctx.shuffle:
            # keyed by where the window starts: any window can be made without those before it
            order = Permutation(len(groups), ctx.seed, cursor["epoch"], cursor["shard"], cursor["row"]).all().tolist()
        return [sample for index in order for sample in groups[index]], after, counts

    def _examples(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Example], dict[str, int]]:
        counts, longest = dict.fromkeys(COUNTS, 0), self._ctx.seq_len + 1
        rendered = list(self._options.render(rows, self._renderer))
        usable = list(filter(has_target, rendered))
        counts |= {"read": len(rendered), "empty": len(rendered) - len(usable)}
        # One call for the whole window: the tokenizer may use several threads.
        encoded = iter(self._tokenizer.encode_batch([segment.text for segments in usable for segment in segments]))
        examples = []
        for segments in usable:
            example = self._example(segments, [next(encoded) for _ in segments])
            if len(example.ids) > longest:
                example = example.cut(longest)
                # A cut example whose answer is gone would teach nothing.
                kept = self._options.too_long == "cut" and bool(example.trained[1:].any())
                counts["cut" if kept else "dropped"] += 1
                if not kept:
                    continue
            examples.append(example)
        return examples, counts

    def _example(self, segments: Sequence[Segment], encoded: Sequence[list[int]]) -> Example:
        """The ids of an example's segments, between the begin token, if asked for, and the end token."""
        begin = [self._tokenizer.bos_id] if self._options.begin_token and self._tokenizer.bos_id is not None else []
        end = [self._end_id] if self._renderer.needs_end_token(segments) else []
        everything = self._options.train_on_all
        stretches = [(begin, everything), *zip(encoded, (s.trained or everything for s in segments), strict=True)]
        # Without it a model would never stop.
        stretches.append((end, True))  # the end token is always learned
        ids = np.array([i for stretch, _ in stretches for i in stretch], dtype=np.int64)
        return Example(ids, np.array([trained for stretch, trained in stretches for _ in stretch], dtype=bool))
