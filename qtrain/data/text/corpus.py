"""What tokenize_data.py reads: documents in a fixed order, in chunks, each with a state to resume from."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Protocol

from qtrain.core.checks import Range, check_value
from qtrain.core.errors import UserError, nearest
from qtrain.data.files import text_files
from qtrain.data.hub_rows import RowReader, RowSource
from qtrain.data.named_sets import NAMED_SETS, named_set
from qtrain.data.text.documents import DocumentOrder, Documents

CHUNK_CHARACTERS = 1 << 18
CHUNK_DOCUMENTS = 256

Document = str | tuple[str, str]
"""A text, or a prompt with its answer, of which the answer is trained on."""


class Render(Protocol):
    """Makes a row of `columns` into a prompt and its answer (`examples.instruct_dataset.Template`)."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def fill(self, row: Mapping[str, Any], where: str) -> tuple[str, str]: ...


class LocalCorpus:
    """Local files, in the order of their paths."""

    def __init__(self, paths: list[str], split: str, validation_fraction: float, text_column: str, flag: str):
        files = text_files(paths, split, validation_fraction, flag)
        self._documents = Documents(files, text_column, flag)
        self.n_documents = len(self._documents)
        # Names and sizes, not contents: hashing a corpus would take as long as tokenizing it.
        sizes = "".join(f"{file.relative}\0{file.path.stat().st_size}\n" for file in files)
        self.max_tokens, self.notes = 0, []
        if any(file.part != "all" for file in files):
            sizes += f"divided by {validation_fraction}"
            self.notes = [
                f"too few files to be split whole: the last {validation_fraction:g} of each are validation data"
            ]
        self.fingerprint = hashlib.sha256(sizes.encode(errors="surrogatepass")).hexdigest()[:16]

    def chunks(self, state: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], list[Document]]]:
        """(state, texts) of each chunk from `state` on (None: from the start). Reading from a chunk's state gives that
        chunk and those after it."""
        at = 0
        if state is not None:
            where = "manifest.json: cursor.source.document"
            at = check_value(where, state.get("document"), Annotated[int, Range(0)])
        while at < self.n_documents:
            start, texts, characters = at, [], 0
            while at < self.n_documents and characters < CHUNK_CHARACTERS and len(texts) < CHUNK_DOCUMENTS:
                texts.append(self._documents.read(at))
                characters += len(texts[-1])
                at += 1
            yield {"document": start}, texts  # the state of its first document: read again from there

    def sample(self) -> Iterator[str]:
        """All texts, in an order whose first texts a tokenizer can be trained on."""
        # Shuffled: a tokenizer that is trained on the first texts sees all folders.
        order = DocumentOrder(self._documents, seed=0, shuffle=True)
        return (self._documents.read(order(0, place)) for place in range(self.n_documents))


class HubCorpus:
    """A dataset of the hub, or a local file or folder of the same formats, streamed in its stored order."""

    def __init__(
        self, dataset: str, subset: str | None, split: str, text_column: str, flag: str, template: Render | None = None
    ):
        """template: makes rows into prompts with answers; None: documents are those of `text_column`."""
        # A name without a slash is a typo of a short name, or a file.
        named = named_set(dataset)
        close = nearest(dataset, NAMED_SETS) if "/" not in dataset and named is None else None
        if close:
            raise UserError(
                f"{flag}: unknown dataset {dataset!r}. Did you mean {close!r}? "
                f"Allowed: {', '.join(NAMED_SETS)}, or a hub id such as ORG/NAME."
            )
        self._template = template
        self.max_tokens, self.notes = (named.max_tokens, [named.describe()]) if named else (0, [])
        columns = (text_column,) if template is None else template.columns
        source = RowSource.of(dataset, subset, split, columns, None, records=template is not None)
        self._flag = flag
        self._reader = RowReader(source, seed=0, shuffle=False, flag=flag)
        self.n_documents = source.n_rows(flag)
        sizes = [os.path.getsize(file) for file in source.local_files()]
        # The hub does not state sizes.
        self.fingerprint = f"{self._reader.shards} files" + (f" of {sizes} bytes" if sizes else "")

    def chunks(self, state: dict[str, Any] | None) -> Iterator[tuple[dict[str, Any], list[Document]]]:
        state = state or self._reader.first_cursor()
        while state["epoch"] == 0:
            rows, after = self._reader.read(state, CHUNK_DOCUMENTS)
            if rows:
                yield state, rows if self._template is None else [self._template.fill(row, self._flag) for row in rows]
            state = after

    def sample(self) -> Iterator[str]:
        texts = (text for _, texts in self.chunks(None) for text in texts)
        return (text if isinstance(text, str) else "".join(text) for text in texts)


Corpus = LocalCorpus | HubCorpus
"""`n_documents`: None when the source does not state it. `fingerprint`: differs when the source has changed.
`max_tokens`: how many tokens of it are meant; 0: all. `notes`: lines for the user."""
