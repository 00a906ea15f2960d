"""The text column of files that cannot be read from the middle: .arrow, .json, .csv, and compressed .jsonl.

They are decoded whole, except .arrow, which is mapped into memory.
"""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qtrain.core.errors import UserError, first_line
from qtrain.data.compression import COMPRESSED, DAMAGED, MAX_RECORD, bounded_lines, open_decompressed
from qtrain.data.files import format_of

if TYPE_CHECKING:
    import pyarrow

CHUNK_CHARACTERS = 1 << 26  # of texts that become one chunk of a column


def is_decoded_whole(path: Path) -> bool:
    """Whether a file of text is read by `text_column`."""
    form = format_of(path)
    return form in (".arrow", ".json", ".csv") or (form == ".jsonl" and path.suffix in COMPRESSED)


TextOf = Callable[[Any, str], str | None]
"""The text of a record, given as a line of JSON (bytes) or decoded, and its place for messages; None: it has none."""
Check = Callable[[str, list[str]], None]  # refuses the columns of a place that lack the one asked for


def text_column(path: Path, column: str, text_of: TextOf, check: Check, flag: str) -> "pyarrow.ChunkedArray":
    """The column `column` of the file's rows. UserError for a file without it, and for one that is damaged."""
    import pyarrow

    try:
        match format_of(path):
            case ".arrow" | ".csv" as form:
                table = _mapped(path) if form == ".arrow" else _csv(path, column)
                check_text_column(table.schema, path, column, check, flag)
                return table[column]
            case ".json":
                return _in_chunks(_json_texts(path, text_of))
            case _:
                with open_decompressed(path) as lines:
                    return _in_chunks(_line_texts(lines, path, text_of))
    except (pyarrow.ArrowException, *DAMAGED) as error:
        reason = first_line(getattr(error, "strerror", None) or error)
        raise UserError(f"{flag}: cannot read {path}: {reason}.") from None
    except MemoryError:
        raise UserError(
            f"{flag}: {path} is decoded whole, and does not fit into memory. Divide it, or convert it to .parquet."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {path} is not UTF-8 text (byte {error.start}).") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag}: {path}: not valid JSON ({error}).") from None


def _in_chunks(texts: Iterator[str | None]) -> "pyarrow.ChunkedArray":
    """A column of texts of any number: of those of one chunk only, Python's strings are in memory too."""
    import pyarrow

    # Python's strings take several times the memory of Arrow's: at most one chunk is held as such.
    chunks, held, size = [], [], 0
    for text in texts:
        held.append(text)
        size += len(text or "")
        if size >= CHUNK_CHARACTERS:
            chunks.append(pyarrow.array(held, pyarrow.large_string()))
            held, size = [], 0
    return pyarrow.chunked_array([*chunks, pyarrow.array(held, pyarrow.large_string())])


def _line_texts(lines: BinaryIO, path: Path, text_of: TextOf) -> Iterator[str | None]:
    return (text_of(line, f"{path}, line {number}") for number, line in bounded_lines(lines))


def _json_texts(path: Path, text_of: TextOf) -> Iterator[str | None]:
    """Of a list of records, or of lines as in a .jsonl file."""
    with open_decompressed(path) as stream:
        data = stream.read()
    if data.lstrip().startswith(b"["):  # a list of records; else lines, though the file is named .json
        return (text_of(record, f"{path}, record {i}") for i, record in enumerate(json.loads(data)))
    return _line_texts(io.BytesIO(data), path, text_of)


def check_text_column(schema: "pyarrow.Schema", path: Path, column: str, check: Check, flag: str) -> None:
    """UserError for a file without the column, or whose column is not text."""
    import pyarrow

    check(str(path), schema.names)
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{flag}: {path}: the column {column!r} is {kind}, not text.")


def _mapped(path: Path) -> "pyarrow.Table":
    """Both of Arrow's formats, of files and of streams; `datasets` writes the second."""
    import pyarrow
    from pyarrow import ipc

    source = pyarrow.memory_map(str(path))  # the system loads what is read, and drops it
    try:
        return ipc.open_file(source).read_all()  # no copy: columns point into the mapped file
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return ipc.open_stream(source).read_all()


def _csv(path: Path, column: str) -> "pyarrow.Table":
    import pyarrow
    from pyarrow import csv

    with open_decompressed(path) as stream:
        return csv.read_csv(
            stream,
            read_options=csv.ReadOptions(block_size=MAX_RECORD),  # a row must fit into a block
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(column_types={column: pyarrow.large_string()}),
        )
