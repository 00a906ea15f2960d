"""Dataset type `text`: local files, tokenized during training."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.data.files import text_files
from qtrain.data.stream import DATASETS, ESTIMATED_FROM, Dataset, Stream, StreamContext, checked_tokenizer
from qtrain.data.text.documents import DocumentOrder, Documents
from qtrain.data.text.packing import Document, PackedStream
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@DATASETS.register("text")
@dataclass(frozen=True)
class TextDataset(Dataset):
    """Local .txt, .py, .jsonl, .json, .csv, .parquet and .arrow files (or python:stdlib), tokenized during training"""

    paths: str | list[str]
    """files (compressed ones too), globs or folders; python:stdlib is the standard library's source"""
    tokenizer: str
    """name, file, folder or hub id of the tokenizer"""
    split: Literal["all", "train", "validation"] | None = None
    """which files, by a hash of their path; null: all"""
    part: Literal["all", "train", "validation"] | None = None
    """another name for split"""
    validation_fraction: Annotated[float, Range(0, 1)] = 0.05
    """share of the files in the validation split"""
    text_column: str = "text"
    """column or key that holds the text"""

    def load_tokenizer(self, flag: str) -> Tokenizer:
        return load_tokenizer(self.tokenizer, flag)

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        if self.split and self.part and self.split != self.part:
            raise UserError(f"{flag}: split is {self.split!r} and part is {self.part!r}; they mean the same, give one.")
        files = text_files(self.paths, self.split or self.part or "all", self.validation_fraction, flag)
        tokenizer = checked_tokenizer(self.tokenizer, ctx, flag)
        stream = TextStream(Documents(files, self.text_column, flag), ctx, tokenizer, flag)
        stream.files = [file.path for file in files]
        return stream


class TextStream(PackedStream):
    """The documents of the shuffled epochs, epoch after epoch.

    Cursor: `document`, the index in that order, counted over epochs."""

    def __init__(self, documents: Documents, ctx: StreamContext, tokenizer: Tokenizer, flag: str):
        self._documents = documents
        self._order = DocumentOrder(documents, ctx.seed, ctx.shuffle)
        super().__init__(ctx, tokenizer, {"document": 0}, {"documents": len(documents)}, flag)

    def documents(self, cursor: Mapping[str, Any]) -> Iterator[Document]:
        index, count = cursor["document"], len(self._documents)
        while self._ctx.epochs is None or index < self._ctx.epochs * count:
            epoch, place = divmod(index, count)
            yield Document({"document": index}, epoch, self._documents.read(self._order(epoch, place)))
            index += 1

    def estimated_samples(self) -> float:
        count = len(self._documents)
        first = (self._order(0, place) for place in range(min(count, ESTIMATED_FROM)))
        return count * self.mean_tokens([self._documents.read(index) for index in first]) / self._ctx.seq_len
