"""Reading within bounds: compressed files by the ending of their names (.gz, .bz2, .xz, .zst), lines and whole files of
at most so many bytes, and JSON of at most so many levels. A few megabytes of a compressed file can be more than memory
holds, and pyarrow's JSON parser recurses: beyond some 10,000 levels it ends the process without a word.
"""

import bz2
import errno
import functools
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

CORRUPT = (EOFError, zlib.error, lzma.LZMAError)
"""What decompressing a damaged or truncated file raises, besides OSErrors and ValueErrors."""
DAMAGED = (OSError, *CORRUPT)

MAX_RECORD = 1 << 28  # bytes of one record at most: a line of JSON, or a row of a .csv file
MAX_DOCUMENT = 1 << 30  # bytes of a file at most that is one document


def open_decompressed(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """The contents of a file that is decoded whole, decompressed where its ending says that it is compressed. Raises
    OSError; reading raises one of DAMAGED, and OSError after `max_bytes`, None: half of the memory."""
    opened = _OPENERS.get(path.suffix, functools.partial(open, mode="rb"))(path)
    return io.BufferedReader(_Bounded(opened, max_bytes), 1 << 20)


def bounded_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1 on. Raises OSError for one longer than MAX_RECORD."""
    number = 0
    while line := stream.readline(MAX_RECORD + 1):  # one more byte tells a line that is too long
        number += 1
        if len(line) > MAX_RECORD:
            raise OSError(errno.EFBIG, f"line {number} is longer than {MAX_RECORD:,} bytes; divide it")
        if line.strip():
            yield number, line


class _Checked(io.RawIOBase):
    """A file whose contents are checked while they are read. close: closes that file too."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def check(self, data: bytes) -> None:
        """Raise OSError for data, the next of the file, that is not to be read."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))  # may be less than asked for, and is empty at the end only
        self.check(data)
        buffer[: len(data)] = data  # a buffer may be longer than what is left
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Bounded(_Checked):
    """A file of at most `max_bytes`; None: half of the memory, which is asked for beyond MAX_DOCUMENT."""

    def __init__(self, file: BinaryIO, max_bytes: int | None):
        super().__init__(file)
        self._limit, self._read = max_bytes, 0

    def check(self, data: bytes) -> None:
        self._read += len(data)
        if self._read > MAX_DOCUMENT and self._limit is None:
            from qtrain.core.hardware.memory import host_memory  # imports torch

            # Decoded, a file takes more memory than its bytes: half of it leaves room for that.
            self._limit = max(MAX_DOCUMENT, (host_memory() or 0) // 2)
        if self._limit is not None and self._read > self._limit:
            raise OSError(
                errno.EFBIG, f"it holds more than {self._limit:,} bytes, too many to be read whole; divide it"
            )


class _BoundedLines(_Checked):
    """A file of lines of at most MAX_RECORD bytes, unless it is a JSON list, which may be one line."""

    def __init__(self, file: BinaryIO, name: str):
        super().__init__(file)
        self._name, self._line = name, 0
        self._is_list: bool | None = None

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        self._line = 0
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def check(self, data: bytes) -> None:
        if self._is_list is None:
            self._is_list = data.lstrip().startswith(b"[")  # told by the first bytes alone
        newline = data.rfind(b"\n")
        # Bytes since the last newline: of lines that end within `data` only the first could be longer, by a buffer.
        self._line = self._line + len(data) if newline < 0 else len(data) - newline - 1
        if self._line > MAX_RECORD and not self._is_list:
            raise OSError(errno.EFBIG, f"{self._name} has a line longer than {MAX_RECORD:,} bytes; divide it")


def _open_zstd(file: Any, mode: str = "rb", **_: Any) -> BinaryIO:
    """pyarrow's reader as a file object; Python has its own from 3.14 on."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".zst": lambda path: _open_zstd(path.open("rb")),
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
COMPRESSED = tuple(_OPENERS)


# ---- what `datasets` reads -------------------------------------------------------------------------------------------


def register_openers() -> None:
    """Have fsspec, and with it `datasets`, refuse compressed files with a line longer than MAX_RECORD, which would be
    read whole, and open .zst files, which needs one more package without this."""
    from fsspec.compression import compr, register_compression

    known: Mapping[Any, Any] = compr
    endings = {"gzip": "gz", "bz2": "bz2", "xz": "xz", "lzma": "xz", "zstd": "zst"}
    for name, ending in endings.items():
        opener = known.get(name, _open_zstd)
        if not isinstance(opener, functools.partial):  # not registered yet  # a second call would wrap the wrapper
            register_compression(name, functools.partial(_open_lines, opener), ending, force=True)


def _open_lines(opener: Callable[..., BinaryIO], file: Any, mode: str = "rb", **options: Any) -> BinaryIO:
    # fsspec names the file in `path`, Python's own files in `name`.
    opened = opener(file, mode=mode, **options)
    name = getattr(file, "path", None) or getattr(file, "name", "a file")
    return opened if mode[0] in "wax" else io.BufferedReader(_BoundedLines(opened, str(name)), 1 << 20)


MAX_DEPTH = 1000  # levels at most, about those of Python's own parser


def depth_of(data: bytes) -> int:
    """The most brackets that are open at a time in a line of JSON, those in strings included."""
    read = np.frombuffer(data, np.uint8)
    # Brackets in strings count too: an upper bound, in one pass over the bytes without a parser.
    opened = ((read == ord("[")) | (read == ord("{"))).astype(np.int8)
    change = opened - ((read == ord("]")) | (read == ord("}")))
    level = np.cumsum(change, dtype=np.int32)  # open brackets after each byte
    starts = np.concatenate([[0], np.flatnonzero(read[:-1] == ord("\n")) + 1])
    # Each line starts at 0: an unbalanced one does not add to those after it.
    before = np.where(starts > 0, level[starts - 1], 0)
    return int((np.maximum.reduceat(level, starts) - before).max()) if len(read) else 0


def guard_datasets() -> None:
    """Have the JSON reader of `datasets` refuse such JSON with a RecursionError."""
    from datasets.packaged_modules.json import json

    reader: Any = json
    if not isinstance(reader.paj, _GuardedReader):
        reader.paj = _GuardedReader(reader.paj)


class _GuardedReader:
    """pyarrow.json with another `read_json`."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def read_json(self, source: io.BytesIO, *args: Any, **options: Any) -> Any:
        if (depth := depth_of(source.getvalue())) > MAX_DEPTH:
            raise RecursionError(f"a record of JSON opens {depth:,} brackets; at most {MAX_DEPTH:,} are read")
        return self._module.read_json(source, *args, **options)
