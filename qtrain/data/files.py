"""The files that a user names: paths, globs, folders, `python:stdlib`; and their stable split."""

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from qtrain.core.checks import user_path
from qtrain.core.errors import NotHere, UserError, did_you_mean
from qtrain.core.reading import refuse_special
from qtrain.data.compression import COMPRESSED

COMPRESSIBLE = (".txt", ".py", ".jsonl", ".json", ".csv")
SUFFIXES = (*COMPRESSIBLE, ".parquet", ".arrow")
NAMED_ONLY = (".json", ".csv")  # not taken from a folder, where they mostly are settings and tables, not text
STDLIB = "python:stdlib"
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SPLITS = ("all", "train", "validation")


@dataclass(frozen=True)
class TextFile:
    """A text file. `relative`: its path from the folder that the user gave, which decides its split. `part`: of its
    documents, or of its only document's text: all but the last `validation_fraction`, or those."""

    path: Path
    relative: str
    part: str = "all"
    validation_fraction: float = 0.0


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def format_of(path: Path) -> str:
    """The suffix of a file, that of its contents where it is compressed text."""
    inner = Path(path.stem).suffix
    return inner if path.suffix in COMPRESSED and inner in COMPRESSIBLE else path.suffix


def match_files(entry: str, suffixes: Iterable[str], flag: str, fix: str = "") -> list[TextFile]:
    """The files of a path, a glob (`**` allowed) or a folder, sorted. UserError, with `fix`, when there are none."""
    suffixes = tuple(suffixes)
    path = data_path(entry, flag)
    # A folder is walked and not globbed: names that start with a dot, and unreadable folders, are seen.
    if path.is_dir():
        taken = set(suffixes) - set(NAMED_ONLY)
        root, found = path, sorted(Path(p) for p in files_below(path, flag) if format_of(Path(p)) in taken)
    elif path.is_file():
        if format_of(path) not in suffixes:
            compressed = f", compressed or not ({', '.join(COMPRESSED)})" if suffixes == SUFFIXES else ""
            raise UserError(
                f"{flag}: {entry} has the ending {path.suffix!r}; allowed: {', '.join(suffixes)}{compressed}."
            )
        root, found = path.parent, [path]
    elif glob.has_magic(entry):
        # The part before the first wildcard is what `relative`, and so the split, does not depend on.
        first_magic = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:first_magic])
        found = [p for p in map(Path, glob_files(path)) if format_of(p) in suffixes]
    else:
        hint = did_you_mean(entry, map(str, path.parent.glob("*")))
        raise NotHere(f"{flag}: {entry!r} does not exist.{hint}{fix}")
    for file in found:
        refuse_special(file, flag)
    if not found:
        raise NotHere(f"{flag}: {entry!r} matches no file with the ending {' or '.join(suffixes)}.{fix}")
    return [TextFile(p, p.relative_to(root).as_posix()) for p in found]


def data_path(entry: str, flag: str) -> Path:
    """A path of data as the user gave it, which need not exist. UserError for a FIFO, socket or device, which cannot be
    read twice, and for a link that leads nowhere."""
    path = user_path(entry, flag)
    refuse_special(path, flag)
    return path


def files_below(folder: Path, flag: str) -> list[str]:
    """The paths of all files below a folder, in the same order on every machine. UserError for a folder in it that
    cannot be read. Links to folders are not followed."""

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{flag}: cannot read the folder {error.filename}: {error.strerror}.")

    found = []
    # In place: os.walk then descends in this order.
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        found += [os.path.join(where, name) for name in sorted(names)]
    return found


def glob_files(pattern: str | Path) -> list[str]:
    """What a glob (`**` allowed) matches besides folders, sorted, each name of a file once: `**` follows links to
    folders, also back to a folder that it came from."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(glob.glob(str(pattern), recursive=True)):
        if not os.path.isdir(path):
            folder, name = os.path.split(path)
            # A link of a file with another name is another file: only its folder is resolved.
            found.setdefault((os.path.realpath(folder), name), path)
    return list(found.values())


def match_globs(patterns: str | list[str], flag: str) -> list[str]:
    """The files of globs (`**` allowed), sorted within each. UserError for one that matches none."""
    files: list[str] = []
    for pattern in as_list(patterns):
        found = glob_files(pattern)
        if not found:
            raise NotHere(f"{flag}: {pattern!r} matches no file.")
        for file in found:
            refuse_special(file, flag)
        files += found
    return files


def stdlib_files(flag: str) -> list[TextFile]:
    """The .py files of the running Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    kept = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in STDLIB_SKIPPED]  # not walked into
        # Sorted below: os.walk's order is the file system's.
        kept += [Path(folder, name) for name in names if name.endswith(".py")]
    if not kept:
        raise UserError(f"{flag}: {STDLIB}: this Python has no .py files at {root}; give other files.")
    return [TextFile(path, path.relative_to(root).as_posix()) for path in sorted(kept)]


def text_files(paths: str | list[str], split: str, validation_fraction: float, flag: str) -> list[TextFile]:
    """The files of `paths` that are in `split`, in a fixed order, each once. Where all would be in one split, as one
    file is, each is divided itself."""
    found: dict[Path, TextFile] = {}
    for entry in as_list(paths):
        for file in stdlib_files(flag) if entry == STDLIB else match_files(entry, SUFFIXES, flag):
            found.setdefault(file.path, file)  # a file that two entries match is read once
    if not found:
        raise UserError(f"{flag}: the list of files is empty; give paths, globs, folders or {STDLIB!r}.")
    sides = {split_of(f.relative, validation_fraction) for f in found.values()}
    if split != "all" and len(sides) == 1 and 0 < validation_fraction < 1:
        divided = {"part": split, "validation_fraction": validation_fraction}
        return [dataclasses.replace(f, **divided) for f in found.values()]
    kept = [f for f in found.values() if split == "all" or split == split_of(f.relative, validation_fraction)]
    if not kept:
        raise UserError(
            f"{flag}: none of the {len(found)} files is in the split {split!r} with validation_fraction "
            f"{validation_fraction:g}. Give a fraction between 0 and 1, or separate files."
        )
    return kept


def split_of(key: str, validation_fraction: float) -> str:
    """'train' or 'validation' for an item by a hash of its key alone, so that no other item can move it."""
    data = key.encode(errors="surrogatepass")  # a file's name need not be UTF-8
    # 64 bits of a hash of the key alone
    uniform = int.from_bytes(hashlib.sha256(data).digest()[:8], "little") / 2**64
    return "validation" if uniform < validation_fraction else "train"


def edges(part: str, validation_fraction: float) -> tuple[float, float]:
    """The stretch of the unit interval that `split_of` puts into a part: (start, end)."""
    return {"train": (validation_fraction, 1.0), "validation": (0.0, validation_fraction)}.get(part, (0.0, 1.0))
