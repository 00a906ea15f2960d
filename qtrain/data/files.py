"""Which files a user means: paths, globs, folders, `python:stdlib`; and a split of them that never changes."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from qtrain.errors import UserError, nearest

SUFFIXES = (".txt", ".py", ".jsonl", ".parquet")
STDLIB = "python:stdlib"
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SPLITS = ("all", "train", "validation")


@dataclass(frozen=True)
class TextFile:
    """A file of text. `relative` is its path from the folder that was given, and decides its split."""

    path: Path
    relative: str


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def match_files(entry: str, suffixes: Iterable[str], flag: str, fix: str = "") -> list[TextFile]:
    """Files meant by a path, a glob (`**` allowed) or a folder, sorted. UserError, with `fix`, when there are none."""
    suffixes = tuple(suffixes)
    path = Path(entry).expanduser()
    if path.is_dir():
        root, found = path, sorted(p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
    elif path.is_file():
        if path.suffix not in suffixes:
            raise UserError(f"{flag}: {entry} has the ending {path.suffix!r}; allowed: {', '.join(suffixes)}.")
        root, found = path.parent, [path]
    elif glob.has_magic(entry):
        first_magic = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
        root, found = Path(*path.parts[:first_magic]), [p for p in matches if p.suffix in suffixes and p.is_file()]
    else:
        close = nearest(entry, [str(p) for p in path.parent.glob("*")]) if path.parent.is_dir() else None
        raise UserError(f"{flag}: {entry!r} does not exist.{f' Did you mean {close!r}?' if close else ''}{fix}")
    if not found:
        raise UserError(f"{flag}: {entry!r} matches no file with the ending {' or '.join(suffixes)}.")
    return [TextFile(p, p.relative_to(root).as_posix()) for p in found]


def stdlib_files(flag: str) -> list[TextFile]:
    """The .py files of the running Python's standard library, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    kept = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in STDLIB_LEFT_OUT]  # not walked into
        kept += [Path(folder, name) for name in names if name.endswith(".py")]
    if not kept:
        raise UserError(f"{flag}: {STDLIB}: this Python keeps no .py files at {root}; give other files.")
    return [TextFile(path, path.relative_to(root).as_posix()) for path in sorted(kept)]


def text_files(paths: str | list[str], split: str, validation_fraction: float, flag: str) -> list[TextFile]:
    """The files of `paths` that fall in `split`, in a fixed order, each once."""
    found: dict[Path, TextFile] = {}
    for entry in as_list(paths):
        for file in stdlib_files(flag) if entry == STDLIB else match_files(entry, SUFFIXES, flag):
            found.setdefault(file.path, file)
    if not found:
        raise UserError(f"{flag}: the list of files is empty; give paths, globs, folders or {STDLIB!r}.")
    kept = [f for f in found.values() if split == "all" or split == split_of(f.relative, validation_fraction)]
    if not kept:
        raise UserError(
            f"{flag}: none of the {len(found)} files falls in the split {split!r} with validation_fraction "
            f"{validation_fraction:g}. Files are split whole: give more files, another fraction, or separate files."
        )
    return kept


def split_of(relative: str, validation_fraction: float) -> str:
    """'train' or 'validation' for a file: by a hash of its relative path, so that no other file can move it."""
    place = int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "little") / 2**64
    return "validation" if place < validation_fraction else "train"
