"""Rows of a dataset, streamed through the `datasets` library shard by shard, resumable at any row.

The library's own `shuffle(buffer)` does not resume exactly, so the order is computed here: each epoch permutes the
shards (the files of a dataset), and each shard is read in order as a dataset of its own, whose `state_dict` is exact.
"""

import contextlib
import glob
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrain.core.errors import NotHere, UserError, did_you_mean, first_line, unknown_name
from qtrain.core.hub import reaching_hub
from qtrain.core.maybe_none import MaybeNone
from qtrain.data.compression import COMPRESSED, CORRUPT, DAMAGED, guard_datasets, open_decompressed, register_openers
from qtrain.data.files import as_list, data_path, glob_files, match_globs
from qtrain.data.named_sets import named_set
from qtrain.data.permutation import Permutation

if TYPE_CHECKING:
    import datasets


def missing_column(
    flag: str, where: str, column: str, columns: list[str], fix: str = "Set text_column to one."
) -> UserError:
    """The error for rows of `where` that lack `column`."""
    hint = did_you_mean(column, columns)
    return UserError(f"{flag}: {where} has no column {column!r}.{hint} Its columns: {', '.join(columns)}. {fix}")


def valid_unicode(text: str) -> str:
    """`text` with lone surrogates, which JSON can spell but UTF-8 cannot encode, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


BEGINNING = 1 << 20  # bytes at the start of a file whose lines are counted


def estimate_rows(files: Iterable[str]) -> float | None:
    """Rows of .parquet files as they state them, of text files by the lines in their first bytes; None for others."""
    total = 0.0
    for path in map(Path, files):
        match path.suffix:
            case ".parquet":
                import pyarrow.parquet

                total += pyarrow.parquet.read_metadata(path).num_rows
            case ".jsonl" | ".txt" | ".csv":
                with path.open("rb") as stream:
                    beginning = stream.read(BEGINNING)
                lines = beginning.count(b"\n") + (not beginning.endswith(b"\n"))
                total += lines * path.stat().st_size / max(len(beginning), 1)
            case _:
                return None
    return total


LOCAL_READERS = ("arrow", "csv", "json", "parquet", "text")
"""Dataset names that mean a file format instead of a hub id; the files are in `data_files`."""

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
"""Suffix of a local file -> the name of its reader in `datasets`."""


def reader_of(path: str) -> str | None:
    """The reader of a file by its suffix, that of its contents where it is compressed; None for another suffix."""
    name = Path(path)
    return READERS.get(Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix)


MAX_COLUMNS = 10_000  # of a .csv file

FIX = "Check the name, or use local files, which need no network (dataset type text, or tokenize_data.py --files)."


@dataclass(frozen=True)
class RowSource:
    """What to read: a hub id, a local folder, or a file format with `data_files` (paths or globs; a dictionary names
    splits). `columns`: a single text column or, with `records`, columns of any type."""

    dataset: str
    subset: str | None
    split: str
    columns: tuple[str, ...]
    data_files: str | list[str] | dict[str, Any] | None
    records: bool = False
    fix: str = FIX
    """What to do where the hub cannot serve it."""

    @staticmethod
    def of(
        dataset: str,
        subset: str | None,
        split: str,
        columns: tuple[str, ...],
        data_files: Any,
        *,
        records: bool = False,
    ) -> "RowSource":
        """A source whose `dataset` may also be a local file, a glob of files, or one of NAMED_SETS."""
        if data_files is None and not Path(dataset).exists() and (known := named_set(dataset)):
            dataset, subset = known.hub_id, subset or known.subset
            columns = columns if records else tuple(known.text_column if c == "text" else c for c in columns)
        if data_files is None and (reader := reader_of(dataset)) and not Path(dataset).is_dir():
            dataset, data_files = reader, dataset
        return RowSource(dataset, subset, split, columns, data_files, records)

    @property
    def name(self) -> str:
        """For messages: of a file format the file, or the first of several; else the dataset."""
        files = self._files() if self.dataset in LOCAL_READERS else []
        return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else files[0] if files else self.dataset

    def open(self, flag: str) -> "datasets.IterableDataset":
        """The streaming dataset; files, split and columns are checked. Raises UserError naming `flag`."""
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its complaints become one UserError
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each opening calls the hub, of local files too
        register_openers()
        guard_datasets()
        self._check_files(flag)
        with self.reading(flag):
            splits = datasets.load_dataset(self.dataset, self.subset, data_files=self.data_files, streaming=True)
            if self.split not in splits:
                fix = 'To divide the rows of a file, give "part" instead.' if self.records and self._is_local() else ""
                raise unknown_name(flag, f"split of {self.name!r}", self.split, map(str, splits), fix)
            rows = splits[self.split]
            # A first row tells columns and types: of a stream the library often does not know them.
            first = next(iter(rows), None)
        if first is None:
            raise UserError(f"{flag}: the dataset {self.name!r} has no rows in the split {self.split!r}.")
        for column in self.columns:
            if column not in first:
                fix = "Name one of these in the template." if self.records else "Set text_column to one."
                raise missing_column(flag, f"the dataset {self.name!r}", column, list(first), fix)
            if not self.records and not isinstance(first[column], str | None):
                raise UserError(f"{flag}: the column {column!r} of {self.name!r} is not text.")
        # Other columns are not decoded, which saves most of the time of wide tables.
        return rows.select_columns(list(self.columns))

    def n_rows(self, flag: str) -> int | None:
        """Number of rows of the split, where the dataset states it."""
        import datasets

        with self.reading(flag):
            info = datasets.load_dataset_builder(self.dataset, self.subset, data_files=self.data_files).info
        return (info.splits[self.split].num_examples or None) if info.splits and self.split in info.splits else None

    def estimated_rows(self, flag: str) -> float | None:
        """About how many rows the split has: as the hub states it, or from the sizes of local files; else None."""
        if not self._is_local():
            with contextlib.suppress(UserError):  # an estimate ends no run
                return self.n_rows(flag)
            return None
        files = self.data_files.get(self.split) if isinstance(self.data_files, dict) else self.data_files
        if self.dataset not in LOCAL_READERS or files is None:
            return None
        return estimate_rows(path for pattern in as_list(files) for path in glob.glob(pattern, recursive=True))

    @contextlib.contextmanager
    def reading(self, flag: str) -> Iterator[None]:
        """Wrap any reading of this source: failures of the hub and of the library become one UserError."""
        what = f"the dataset {self.name!r}"

        def unreadable(reason: str) -> UserError:
            return UserError(f"{flag}: {what} cannot be read: {reason}")

        # Errors of the hub are told apart only where it is asked: a local file has no network to check.
        local = self._is_local() and not any("://" in file for file in self._files())
        with contextlib.nullcontext() if local else reaching_hub(flag, what, self.fix):
            try:
                yield
            except StopIteration:  # the library's, from a file without rows
                raise unreadable("a file of it is empty.") from None
            # The library names the subsets in its message, not in an attribute.
            except (ValueError, RuntimeError, *CORRUPT, zipfile.BadZipFile) as error:  # pyarrow's are ValueErrors
                if found := re.search(r"Available: (\[.*\])", str(error)):
                    names = re.findall(r"'([^']+)'", found.group(1))
                    raise unknown_name(flag, f"subset of {self.dataset!r}", str(self.subset), names) from None
                raise unreadable(first_line(error)) from None
            except MemoryError:
                raise unreadable("a record of it does not fit into memory. Divide it.") from None
            except ImportError as error:  # fsspec's, for a protocol in data_files whose package is not installed
                raise unreadable(f"{first_line(error)}. Or download the files and give their paths.") from None
            except OSError as error:
                if not local:
                    raise
                raise unreadable(first_line(error.strerror or error)) from None

    def sources(self) -> list[str]:
        """What it reads, spelled alike however it was named: local files, or a dataset with subset and split."""
        if files := self.local_files():
            return [str(Path(file).resolve()) for file in files]
        name = str(Path(self.dataset).resolve()) if self._is_local() else self.dataset
        files = sorted(self._files())
        return [" ".join(part for part in (name, self.subset, self.split, *files) if part)]

    def local_files(self) -> list[str]:
        """The files that data_files names on this machine."""
        local = [pattern for pattern in self._files() if "://" not in pattern]
        return [file for pattern in local for file in glob_files(pattern)] if self.dataset in LOCAL_READERS else []

    def _is_local(self) -> bool:
        return self.dataset in LOCAL_READERS or self.dataset.startswith((".", "/")) or Path(self.dataset).is_dir()

    def _files(self) -> list[str]:
        files = self.data_files or []
        return [f for group in files.values() for f in as_list(group)] if isinstance(files, dict) else as_list(files)

    def _check_files(self, flag: str) -> None:
        if self.dataset not in LOCAL_READERS:
            if self._is_local():
                data_path(self.dataset, flag)
            if Path(self.dataset).is_file():
                known = ", ".join(READERS)
                raise UserError(f"{flag}: {self.dataset!r} cannot be read by its ending; allowed: {known}.")
            if self._is_local() and not Path(self.dataset).is_dir():
                raise NotHere(f"{flag}: the folder {self.dataset!r} does not exist.")
        elif not self._files():
            raise UserError(f"{flag}: the dataset {self.dataset!r} is a file format; name its files in data_files.")
        for pattern in self._files() if self.dataset in LOCAL_READERS else []:
            for file in match_globs(pattern, f"{flag}: data_files") if "://" not in pattern else []:
                self._check_columns(Path(file), flag)

    def _check_columns(self, file: Path, flag: str) -> None:
        """A .csv file of very many columns would take minutes to be opened."""
        if self.dataset != "csv":
            return
        with contextlib.suppress(*DAMAGED), open_decompressed(file) as stream:  # reading says what is wrong with it
            if (columns := stream.readline(1 << 22).count(b",") + 1) > MAX_COLUMNS:
                raise UserError(f"{flag}: {str(file)!r} has {columns:,} columns; at most {MAX_COLUMNS:,} are read.")


class RowReader:
    """Texts (or records) of the rows, epoch after epoch. A cursor is {epoch, shard, row, state}: shards finished
    in this epoch, rows read from the next one, and the library's state there (None at its start)."""

    def __init__(self, source: RowSource, seed: int, shuffle: bool, flag: str):
        self.source, self._flag = source, flag
        self._dataset = source.open(flag)
        self.shards: int = self._dataset.num_shards
        self._seed, self._shuffle = seed, shuffle
        self._cursor: dict[str, Any] | MaybeNone = None

    @staticmethod
    def first_cursor() -> dict[str, Any]:
        return {"epoch": 0, "shard": 0, "row": 0, "state": None}

    def estimated_rows(self) -> float | None:
        return self.source.estimated_rows(self._flag)

    def _open(self, cursor: Mapping[str, Any]) -> None:
        self._cursor = dict(cursor)
        shuffled = Permutation(self.shards, self._seed, cursor["epoch"]).all().tolist() if self._shuffle else None
        self._order = shuffled or [*range(self.shards)]
        self._open_shard()

    def _open_shard(self) -> None:
        # As many shards as files: each is one file.
        self._shard = self._dataset.shard(self.shards, self._order[self._cursor["shard"]])
        if self._cursor["state"] is not None:
            self._shard.load_state_dict(self._cursor["state"])
        self._rows = iter(self._shard)

    def read(self, cursor: Mapping[str, Any], count: int) -> tuple[list[Any], dict[str, Any]]:
        """Up to `count` texts or records from `cursor` on, and the cursor after them. Fewer than `count` only at the
        end of an epoch, where the cursor is the start of the next one."""
        with self.source.reading(self._flag):
            # Reading on from where the last call stopped, the usual case, keeps the open shard.
            if cursor != self._cursor:
                self._open(cursor)
            at, texts = self._cursor, []
            while len(texts) < count:
                row = next(self._rows, None)
                if row is not None:
                    texts.append(dict(row) if self.source.records else self._text(row))
                    at["row"] += 1
                elif at["shard"] + 1 < len(self._order):  # the shard has ended
                    at |= {"shard": at["shard"] + 1, "row": 0, "state": None}
                    self._open_shard()
                else:
                    self._cursor = None
                    return texts, {**self.first_cursor(), "epoch": at["epoch"] + 1}
            # Once a call, not once a row: it is a deep copy.
            at["state"] = self._shard.state_dict()
        return texts, dict(at)

    def _text(self, row: Mapping[str, Any]) -> str:
        (column,) = self.source.columns
        text = row[column]
        if not isinstance(text, str | None):
            raise UserError(f"{self._flag}: the column {column!r} holds {text!r}, which is not text.")
        return valid_unicode(text or "")
