"""Local text as indexed documents with random access, so a shuffled order needs no storage.

A .txt or .py file is one document, the other formats have one per line, record or row. Opening a .jsonl file indexes
the starts of its lines (8 bytes per line), an .arrow file is mapped into memory. Opening a .txt or .py file reads it,
so that one that is not text is refused before the run. A .parquet file is read by row group; a compressed .jsonl file,
and any .json or .csv file, is decoded whole; what was used recently is cached decoded. `DocumentOrder` accounts for
that: it permutes blocks (files, row groups), takes as many at a time as fit the cache, and permutes the documents
within them. Without such files that is one permutation of all documents.
"""

import dataclasses
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrain.core.checks import json_type
from qtrain.core.errors import UserError, first_line
from qtrain.core.maybe_none import MaybeNone
from qtrain.data.compression import DAMAGED, MAX_DOCUMENT, MAX_RECORD, open_decompressed
from qtrain.data.files import TextFile, format_of
from qtrain.data.hub_rows import missing_column, valid_unicode
from qtrain.data.permutation import Permutation
from qtrain.data.text.decoded import check_text_column, is_decoded_whole, text_column

if TYPE_CHECKING:
    import pyarrow

CACHE_BYTES = 256 << 20
READ_BYTES = 16 << 20


class BadRecord(UserError):
    """A line, record or row that is no document, in a file that can be read otherwise."""


@dataclass(frozen=True)
class Block:
    """Documents that are stored together: a file, or one row group of a .parquet file."""

    file: TextFile
    count: int
    starts: np.ndarray | MaybeNone = None  # int64 [count + 1], .jsonl: where each line starts, and the end of the last
    row_group: int | None = None  # .parquet
    cached: bool = False  # read through the cache of decoded rows
    decoded_bytes: int = 0  # their size there; 0 of an .arrow file, whose memory the system manages
    skip: int = 0  # documents that are stored before the first
    cut: bool = False  # whether of its only document a part of the text is meant


class Documents:
    """The documents of `files`, indexed in order. Raises UserError naming a file that cannot be used. tolerant: a
    record that is none is refused where it is read (`BadRecord`), not where its file is opened."""

    def __init__(self, files: list[TextFile], text_column: str, flag: str, tolerant: bool = False):
        self._column, self._flag, self._tolerant = text_column, flag, tolerant
        self.blocks: list[Block] = []
        self._cache: OrderedDict[int, pyarrow.ChunkedArray] = OrderedDict()  # decoded blocks, last used at the end
        self._sizes: dict[int, int] = {}
        for file in files:
            self.blocks += _part(self._open(file), file)
        # int64 [blocks]: the first document after each block
        self._ends = np.cumsum([block.count for block in self.blocks], dtype=np.int64)
        if len(self) == 0:
            raise UserError(f"{flag}: {_list(files)}: no documents; every file is empty.")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _open(self, file: TextFile) -> list[Block]:
        try:
            if file.path.suffix == ".parquet":
                return self._open_parquet(file)
            if is_decoded_whole(file.path):
                # Decoded to be counted, kept to be read.
                rows = self._remember(len(self.blocks), self._decode(file.path), file.path)
                return [Block(file, len(rows), cached=True, decoded_bytes=_cached_size(rows, file.path))]
            if file.path.suffix == ".jsonl":
                starts = _line_starts(file.path)
                if len(starts) > 1 and np.diff(starts).max() > MAX_RECORD:
                    at = int(starts[np.diff(starts).argmax()])
                    where = f"{self._flag}: {file.path}, line at byte {at}"
                    raise UserError(f"{where}: it is longer than {MAX_RECORD:,} bytes; divide it.")
                block = Block(file, len(starts) - 1, starts)
                if block.count and not self._tolerant:
                    self._read_line(block, 0)  # refuses a wrong column before the run
                return [block]
            return [Block(file, int(len(self._text(file.path)) > 0))]
        except OSError as error:
            raise UserError(f"{self._flag}: cannot read {file.path}: {first_line(error.strerror or error)}") from None

    def _open_parquet(self, file: TextFile) -> list[Block]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(file.path) as parquet:
                schema, meta = parquet.schema_arrow, parquet.metadata
                check_text_column(schema, file.path, self._column, self._check_column, self._flag)
                groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
        except pyarrow.ArrowException as error:
            raise UserError(f"{self._flag}: {file.path} is not a readable parquet file: {first_line(error)}") from None
        return [
            Block(file, g.num_rows, None, i, True, sum(_column_bytes(g, c, self._column) for c in range(g.num_columns)))
            for i, g in enumerate(groups)
        ]

    def _check_column(self, where: str, columns: list[str]) -> None:
        if self._column not in columns:
            raise missing_column(self._flag, where, self._column, columns)

    def read(self, index: int) -> str:
        """Text of document `index`; may be empty. Raises BadRecord."""
        at = int(np.searchsorted(self._ends, index, side="right"))  # the block that holds the document
        block = self.blocks[at]
        row = index - (int(self._ends[at]) - block.count) + block.skip
        try:
            if block.cached:
                text = self._row(at, row)
            else:
                text = self._read_line(block, row) if block.starts is not None else self._text(block.file.path)
            return _cut(text, block.file) if block.cut else text
        except OSError as error:
            raise UserError(
                f"{self._flag}: cannot read {block.file.path}: {first_line(error.strerror or error)}"
            ) from None

    def _row(self, index: int, row: int) -> str:
        """Text of a row of block `index`, which is decoded as a whole."""
        path, group = self.blocks[index].file.path, self.blocks[index].row_group
        where = f"{path}, row {row}{'' if group is None else f' of row group {group}'}"
        try:
            text = self._rows(index)[row].as_py()
        except UnicodeDecodeError:
            raise BadRecord(f"{self._flag}: {where}: not UTF-8 text.") from None
        if text is None and format_of(path) in (".json", ".jsonl"):  # as `_decode` stores it
            raise BadRecord(f"{self._flag}: {where}: not a JSON object with the text {self._column!r}.")
        return text or ""

    def _text(self, path: Path) -> str:
        """The contents of a .txt or .py file."""
        try:
            with open_decompressed(path, MAX_DOCUMENT) as stream:
                return stream.read().decode()
        except DAMAGED as error:
            reason = first_line(getattr(error, "strerror", None) or error)
            raise UserError(f"{self._flag}: cannot read {path}: {reason}") from None
        except MemoryError:
            raise UserError(f"{self._flag}: {path} does not fit into memory as one document. Divide it.") from None
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._flag}: {path} is not UTF-8 text (byte {error.start}). Convert it, or give paths without it."
            ) from None

    def _read_line(self, block: Block, row: int) -> str:
        with block.file.path.open("rb") as stream:
            stream.seek(int(block.starts[row]))
            line = stream.read(int(block.starts[row + 1] - block.starts[row]))
        return self._record_text(line, f"{block.file.path}, line at byte {int(block.starts[row])}")

    def _record_text(self, record: Any, where: str) -> str:
        """The text of a JSON object: a line (bytes), or decoded."""
        try:
            record = json.loads(record) if isinstance(record, bytes) else record
        except UnicodeDecodeError:
            raise BadRecord(f"{self._flag}: {where}: not UTF-8 text.") from None
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"{self._flag}: {where}: not valid JSON ({error}).") from None
        if not isinstance(record, dict):
            raise BadRecord(f"{self._flag}: {where}: not a JSON object.")
        if self._column not in record:
            raise BadRecord(str(missing_column(self._flag, where, self._column, list(record))))
        text = record[self._column]
        if not isinstance(text, str | None):
            raise BadRecord(f"{self._flag}: {where}: {self._column!r} is {json_type(text)}, not text.")
        return valid_unicode(text or "")

    def _rows(self, index: int) -> "pyarrow.ChunkedArray":
        """The decoded text column of block `index`."""
        import pyarrow
        import pyarrow.parquet

        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        block = self.blocks[index]
        if block.row_group is None:
            return self._remember(index, self._decode(block.file.path), block.file.path)
        try:
            with pyarrow.parquet.ParquetFile(block.file.path) as parquet:
                rows = parquet.read_row_group(block.row_group, columns=[self._column])[self._column]
        except pyarrow.ArrowException as error:
            raise UserError(f"{self._flag}: {block.file.path} is damaged: {first_line(error)}") from None
        return self._remember(index, rows, block.file.path)

    def _decode(self, path: Path) -> "pyarrow.ChunkedArray":
        def text_or_none(record: Any, where: str) -> str | None:
            try:
                return self._record_text(record, where)
            except BadRecord:
                if not self._tolerant:
                    raise
                return None

        return text_column(path, self._column, text_or_none, self._check_column, self._flag)

    def _remember(self, index: int, rows: "pyarrow.ChunkedArray", path: Path) -> "pyarrow.ChunkedArray":
        """Cache the rows of block `index`; the least recently used ones are evicted."""
        self._cache[index] = rows
        self._sizes[index] = _cached_size(rows, path)
        # Twice a window's size: the next window is decoded while documents of the last are still read.
        while sum(self._sizes[i] for i in self._cache) > 2 * CACHE_BYTES and len(self._cache) > 1:
            self._cache.popitem(last=False)
        return rows


class DocumentOrder:
    """The order of documents in each epoch: as stored, or shuffled by (seed, epoch)."""

    def __init__(self, documents: Documents, seed: int, shuffle: bool):
        self._counts = np.array([b.count for b in documents.blocks], dtype=np.int64)
        self._sizes = np.array([b.decoded_bytes for b in documents.blocks], dtype=np.int64)
        self._first = np.cumsum(self._counts) - self._counts  # first document of each block, as stored
        self._seed, self._shuffle, self._epoch = seed, shuffle, -1

    def __call__(self, epoch: int, place: int) -> int:
        """Index of the document at `place` of `epoch`."""
        if not self._shuffle:
            return place
        if epoch != self._epoch:
            self._shuffle_blocks(epoch)
        # Within a window any document may come next: all of its blocks fit into the cache.
        window = int(np.searchsorted(self._window_ends, place, side="right"))
        start = int(self._window_ends[window - 1]) if window else 0
        place = start + Permutation(int(self._window_ends[window]) - start, self._seed, epoch, window)(place - start)
        at = int(np.searchsorted(self._ends, place, side="right"))
        block = self._blocks[at]
        return int(self._first[block] + place - (self._ends[at] - self._counts[block]))

    def _shuffle_blocks(self, epoch: int) -> None:
        """Permute the blocks and cut them into windows: runs of blocks whose decoded size fits the cache."""
        self._blocks = Permutation(len(self._counts), self._seed, epoch).all()
        self._ends = np.cumsum(self._counts[self._blocks])
        size, cuts = 0, []
        for at, block_size in enumerate(self._sizes[self._blocks].tolist()):
            if size and block_size and size + block_size > CACHE_BYTES:  # blocks that need no cache never end a window
                cuts.append(at - 1)
                size = 0
            size += block_size
        self._window_ends = self._ends[[*cuts, len(self._ends) - 1]]
        self._epoch = epoch


def _part(blocks: list[Block], file: TextFile) -> list[Block]:
    """The documents that are in the file's part: of two or more each part has one at least."""
    count = sum(block.count for block in blocks)
    if file.part == "all" or count == 0:
        return blocks
    if count == 1:
        return [dataclasses.replace(block, cut=True) for block in blocks if block.count]
    edge = min(max(1, round(count * (1 - file.validation_fraction))), count - 1)
    first, last = (0, edge) if file.part == "train" else (edge, count)
    kept, before = [], 0
    for block in blocks:
        skip, end = max(first - before, 0), min(last - before, block.count)
        if skip < end:
            kept.append(dataclasses.replace(block, skip=skip, count=end - skip))
        before += block.count
    return kept


def _cut(text: str, file: TextFile) -> str:
    """The part of a file's only document: divided before a line, where it has lines."""
    edge = round(len(text) * (1 - file.validation_fraction))
    edge = text.rfind("\n", 0, edge) + 1 or edge
    return text[:edge] if file.part == "train" else text[edge:]


def _cached_size(rows: "pyarrow.ChunkedArray", path: Path) -> int:
    return 0 if path.suffix == ".arrow" else rows.nbytes


def _list(files: list[TextFile]) -> str:
    return ", ".join(str(f.path) for f in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _column_bytes(group: Any, index: int, column: str) -> int:
    chunk = group.column(index)
    return chunk.total_uncompressed_size if chunk.path_in_schema == column else 0


def _line_starts(path: Path) -> np.ndarray:
    """Offsets of the non-blank lines, and the end of the last one: int64 [lines + 1].

    A blank line belongs to the line before it, where the JSON parser ignores it."""
    starts, offset, after_newline = [], 0, True
    with path.open("rb") as stream:
        while data := stream.read(READ_BYTES):
            read = np.frombuffer(data, np.uint8)
            newline = read == ord("\n")
            # A line starts after a newline; a byte that is one itself, or \r, is a blank line's.
            is_first = np.concatenate([[after_newline], newline[:-1]])
            starts.append(np.flatnonzero(is_first & ~newline & (read != ord("\r"))) + offset)
            offset, after_newline = offset + len(data), bool(newline[-1])
    return np.concatenate([*starts, [offset]]).astype(np.int64)
