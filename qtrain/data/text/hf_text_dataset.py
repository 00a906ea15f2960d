"""Dataset type `hf_text`: a dataset of the Hugging Face hub, or any that `datasets` streams, tokenized during training.
Nothing is stored on disk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from qtrain.core.checks import Range
from qtrain.data.hub_rows import RowReader, RowSource
from qtrain.data.permutation import Permutation
from qtrain.data.stream import DATASETS, ESTIMATED_FROM, Dataset, Stream, StreamContext, checked_tokenizer
from qtrain.data.text.packing import Document, PackedStream
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@DATASETS.register("hf_text")
@dataclass(frozen=True)
class HfTextDataset(Dataset):
    """A Hugging Face dataset, streamed and tokenized during training"""

    dataset: str
    """hub id; a local file or glob; or json, parquet, csv, text or arrow with data_files"""
    tokenizer: str
    """name, file, folder or hub id of the tokenizer"""
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

    def load_tokenizer(self, flag: str) -> Tokenizer:
        return load_tokenizer(self.tokenizer, flag)

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

    def documents(self, cursor: Mapping[str, Any]) -> Iterator[Document]:
        start = {key: value for key, value in cursor.items() if key != "index"}
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
