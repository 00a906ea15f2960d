"""Checksums of files that a user may have changed, swapped or damaged.

An exported folder has a file with the sha256 of the others, which are compared whenever the folder is loaded. A
folder without that file, such as one from elsewhere, loads unchecked. Training data, which may be terabytes, are told
apart by samples of their bytes.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qtrain.core.checks import check_value, read_json
from qtrain.core.errors import UserError
from qtrain.core.reading import refuse_other

NAME = "checksums.json"


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def first_changed(folder: Path, expected: Mapping[str, str]) -> Path | None:
    """The first of the files that is missing, cannot be read, is no regular file or has another sha256. Several are
    read at once: hashing one takes longer than reading it."""

    def same(name: str) -> bool:
        path = folder / name
        try:
            return path.is_file() and sha256_of(path) == expected[name]
        except OSError:
            return False

    threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1))
    try:
        alike = zip(expected, threads.map(same, expected), strict=True)
        return next((folder / name for name, unchanged in alike if not unchanged), None)
    finally:
        # The first difference decides: what is not hashed yet need not be.
        threads.shutdown(cancel_futures=True)


MAX_BLOCKS, BLOCK_BYTES = 8, 4096


def sampled_checksums(paths: Sequence[Path], max_reads: int = 4096) -> list[str]:
    """Of each file the size and the CRC-32 of some of its bytes: MAX_BLOCKS blocks at even distances, of which one is
    the first and one the last; fewer of each among many files, and always all of a file that is no longer than those.
    It depends on the contents alone, not on names and times. Raises OSError."""
    blocks = min(MAX_BLOCKS, max(1, max_reads // max(len(paths), 1)))
    return [_sampled(path, blocks) for path in paths]


def _sampled(path: Path, blocks: int) -> str:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        # A short file is read whole, so that any change in it is seen.
        if size <= blocks * BLOCK_BYTES:
            return f"{size} {zlib.crc32(file.read()):08x}"
        crc = 0
        for i in range(blocks):
            file.seek((size - BLOCK_BYTES) * i // max(blocks - 1, 1))
            crc = zlib.crc32(file.read(BLOCK_BYTES), crc)
    return f"{size} {crc:08x}"


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write NAME with the sha256 of these files of the folder."""
    record = {"format": "sha256", "files": {name: sha256_of(folder / name) for name in sorted(names)}}
    (folder / NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def check_checksums(folder: Path, flag: str, concerns: Callable[[str], bool] = lambda name: True) -> None:
    """UserError naming the first file, of those whose name `concerns` takes, that is not the one that was exported.
    Nothing is checked in a folder without NAME."""
    path = folder / NAME
    if not os.path.lexists(path):
        return
    fix = f"Copy the folder again; if the change is wanted, delete {path}."
    try:
        refuse_other(path, flag)
        expected = _files(read_json(path, flag), f"{flag} ({path}): files")
    except UserError as error:
        raise UserError(f"{str(error).removesuffix('.')}. {fix}") from None
    if changed := first_changed(folder, {name: sha256 for name, sha256 in expected.items() if concerns(name)}):
        what = f"is not as it was exported: its sha256 is not the one in {NAME}" if changed.is_file() else "is missing"
        raise UserError(f"{flag}: {changed} {what}. {fix}")


def _files(record: Any, where: str) -> dict[str, str]:
    files = check_value(where, record.get("files") if isinstance(record, dict) else None, dict[str, str])
    for name in files:
        if Path(name).name != name:
            raise UserError(f"{where}: {name!r} is not the name of a file in its folder.")
    return files
