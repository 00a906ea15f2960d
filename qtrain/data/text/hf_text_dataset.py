"""Dataset type `hf_text`: a dataset of the Hugging Face hub (or any that `datasets` can stream), tokenized while
training, nothing stored on disk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from qtrain.checks import Range
from qtrain.data.hub_rows import RowReader, RowSource
from qtrain.data.permutation import Permutation
from qtrain.data.stream import DATASETS, Dataset, Stream, StreamContext, run_tokenizer
from qtrain.data.text.packing import Document, PackedStream
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@DATASETS.register("hf_text")
@dataclass(frozen=True)
class HfTextDataset(Dataset):
    """A Hugging Face dataset, streamed and tokenized while training

    `dataset` is a hub id, or "json", "parquet", "csv", "text" or "arrow" with `data_files`. `shuffle_buffer`: rows that
    are shuffled among themselves, after the dataset's files are put in random order."""

    dataset: str
    tokenizer: str
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    shuffle_buffer: Annotated[int, Range(1)] = 1000

    def load_tokenizer(self, flag: str) -> Tokenizer:
        return load_tokenizer(self.tokenizer, flag)

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        tokenizer = run_tokenizer(self.tokenizer, ctx, flag)
        source = RowSource(self.dataset, self.subset, self.split, (self.text_column,), self.data_files)
        reader = RowReader(source, ctx.seed, ctx.shuffle, ctx.rank, ctx.world, flag)
        return HfTextStream(reader, self.shuffle_buffer, ctx, tokenizer, flag)


class HfTextStream(PackedStream):
    """Rows in windows of `window` (one rank's), each window in a computed order.

    Cursor: where the window starts (RowReader's cursor) and `index`, the document's place in the window's order."""

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
            if not texts:  # an epoch without rows: let the packing see that it passed
                yield Document({**start, "index": 0}, start["epoch"], "")
            start, index = after, 0

    def _place(self, start: Mapping[str, Any], place: int, count: int) -> int:
        if not self._ctx.shuffle:
            return place
        return Permutation(count, self._ctx.seed, start["epoch"], start["shard"], start["row"])(place)
