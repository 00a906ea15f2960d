"""Compressed files by the ending of their names: .gz, .bz2, .xz and .zst."""

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
CORRUPT = (EOFError, zlib.error, lzma.LZMAError)
"""What decompressing a damaged or truncated file raises, besides OSErrors and ValueErrors."""
DAMAGED = (OSError, *CORRUPT)


def open_decompressed(path: Path) -> BinaryIO:
    """The contents of a file, decompressed where its ending says that it is compressed. Raises OSError; reading raises
    one of DAMAGED."""
    match path.suffix:
        case ".gz":
            return gzip.open(path)
        case ".bz2":
            return bz2.open(path)
        case ".xz":
            return lzma.open(path)
        case ".zst":
            return _open_zstd(path.open("rb"))
    return path.open("rb")


def register_zstd() -> None:
    """Have fsspec, and with it `datasets`, open .zst files. Without this they need one more package."""
    from fsspec.compression import compr, register_compression

    if "zstd" not in compr:
        register_compression("zstd", _open_zstd, "zst")


def _open_zstd(file: Any, mode: str = "rb", **_: Any) -> BinaryIO:
    """pyarrow's reader as a file object; Python has its own from 3.14 on."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
