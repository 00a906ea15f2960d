"""Dataset type `text`: local files, tokenized while training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from qtrain.checks import Range
from qtrain.data.files import text_files
from qtrain.data.stream import DATASETS, Dataset, Stream, StreamContext, run_tokenizer
from qtrain.data.text.documents import DocumentOrder, Documents
from qtrain.data.text.packing import Document, PackedStream
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@DATASETS.register("text")
@dataclass(frozen=True)
class TextDataset(Dataset):
    """Local .txt, .py, .jsonl and .parquet files (or python:stdlib), tokenized while training"""

    paths: str | list[str]
    tokenizer: str
    split: Literal["all", "train", "validation"] = "all"
    validation_fraction: Annotated[float, Range(0, 1)] = 0.05
    text_column: str = "text"

    def load_tokenizer(self, flag: str) -> Tokenizer:
        return load_tokenizer(self.tokenizer, flag)

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        files = text_files(self.paths, self.split, self.validation_fraction, flag)
        return TextStream(Documents(files, self.text_column, flag), ctx, run_tokenizer(self.tokenizer, ctx, flag), flag)


class TextStream(PackedStream):
    """Rank r of W reads the documents r, r+W, ... of the shuffled epochs, one epoch after the other.

    Cursor: `document`, the number in that order, counted over epochs and ranks."""

    def __init__(self, documents: Documents, ctx: StreamContext, tokenizer: Tokenizer, flag: str):
        self._documents = documents
        self._order = DocumentOrder(documents, ctx.seed, ctx.shuffle)
        super().__init__(ctx, tokenizer, {"document": ctx.rank}, {"documents": len(documents)}, flag)

    def documents(self, cursor: Mapping[str, Any]) -> Iterator[Document]:
        number, count = cursor["document"], len(self._documents)
        while self._ctx.epochs is None or number < self._ctx.epochs * count:
            epoch, place = divmod(number, count)
            yield Document({"document": number}, epoch, self._documents.read(self._order(epoch, place)))
            number += self._ctx.world
