"""The source code that is installed on this machine as token shards: text for pretraining without a network.

python -m qtrain.pairs.source_corpus --output_dir data/source --train_tokenizer 16384

Files of source code and documentation below --roots, each content once, go to the split that a hash of their content
names, in the order of that hash: the corpus depends on which contents are installed, not on where. Files of tables,
of long lines and of other encodings than UTF-8 are left out. Writes OUTPUT_DIR_train and OUTPUT_DIR_validation, which
`--train_ds '{"type":"token","dataset_dir":"..."}'` reads. Files keep the licences of their packages: train on them
here, do not publish the shards.
"""

import hashlib
import json
import os
import string
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qtrain.core.checks import Range, user_path
from qtrain.core.config import parse
from qtrain.core.errors import UserError, os_errors
from qtrain.core.process import run_script
from qtrain.data.text.manifest import FILE_NAME, read_manifest
from qtrain.pairs.results import data_fingerprint
from qtrain.scripts.tokenize_data import main as tokenize_data
from qtrain.train.settings.listing import listing

_LANGUAGES = """
py pyi pyx pxd c cc cpp cxx h hh hpp hxx cu cuh inl inc ipp tcc m mm rs go java pl pm rb lua tcl sh cmake f90 md rst txt
"""
SUFFIXES = frozenset(f".{suffix}" for suffix in _LANGUAGES.split())
FILE_BYTES = range(200, 1_000_000)
LINE_BYTES = 160  # mean length of a line, above which a file is taken for data or generated code
LETTERS = (string.ascii_letters + string.whitespace).encode()
LETTERS_SHARE = 0.6  # share of letters and white space, below which a file is taken for a table


@dataclass(frozen=True)
class SourceCorpusSettings:
    """Write the source code that is installed on this machine as token shards for training and validation."""

    roots: tuple[str, ...] = ()
    """Folders to read; none: /usr, /opt and those of this Python."""
    validation_fraction: Annotated[float, Range(0, 1)] = 0.025
    """Share of the files in the validation split, by a hash of their content."""
    max_mb: Annotated[int, Range(1, 10**6)] = 1000
    """Megabytes of text at most, the first in the order of the hashes."""
    train_tokenizer: Annotated[int, Range(300, 10**6)] = 16384
    """Pieces of the tokenizer that is trained on the training split."""
    output_dir: str = "data/source"
    """Folders to write, with _train and _validation appended."""


@dataclass(frozen=True, order=True)
class SourceFile:
    """A file and the sha256 of its content."""

    digest: str
    path: Path
    size: int

    def is_validation(self, fraction: float) -> bool:
        return int(self.digest[-16:], 16) / 2**64 < fraction  # the first digits are the order, which --max_mb cuts


def main(argv: list[str]) -> None:
    settings = parse(SourceCorpusSettings, argv, "-m qtrain.pairs.source_corpus", listing)
    # Text first, then shards: the validation split is encoded by the tokenizer of the training split.
    output = user_path(settings.output_dir, "--output_dir")
    folders = {split: output.with_name(f"{output.name}_{split}") for split in ("train", "validation")}
    if not all(
        (folder / FILE_NAME).is_file() and read_manifest(folder, "--output_dir").complete for folder in folders.values()
    ):
        text = output.with_name(f"{output.name}_text")
        write_text(settings, text)
        trained = ["--train_tokenizer", str(settings.train_tokenizer)]
        for split, tokenizer in (
            ("train", trained),
            ("validation", ["--tokenizer", f"{folders['train']}/tokenizer.model"]),
        ):
            files = ["--files", str(text / f"{split}.jsonl"), "--split", "all"]
            tokenize_data([*files, *tokenizer, "--output_dir", str(folders[split])])
    specs = [{"type": "token", "dataset_dir": str(folder)} for folder in folders.values()]
    print(f"data fingerprint {data_fingerprint(*specs)}")


def write_text(settings: SourceCorpusSettings, folder: Path) -> None:
    """Write train.jsonl and validation.jsonl into `folder`. UserError where either would be empty."""
    # In the order of hashes: --max_mb takes a random sample, and the same one wherever the contents are the same.
    files = list(_limited(unique_files(_roots(settings.roots)), settings.max_mb * 10**6))
    splits = {
        "train": [file for file in files if not file.is_validation(settings.validation_fraction)],
        "validation": [file for file in files if file.is_validation(settings.validation_fraction)],
    }
    for split, chosen in splits.items():
        if not chosen:
            raise UserError(
                f"--roots: of {len(files)} files with source code none is in the split {split!r}; give more."
            )
    with os_errors(f"--output_dir: cannot write {folder}", end=""):
        folder.mkdir(parents=True, exist_ok=True)
        for split, chosen in splits.items():
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as out:
                for file in chosen:
                    out.write(json.dumps({"text": file.path.read_bytes().decode()}) + "\n")
            print(f"{split}: {len(chosen):,} files, {sum(file.size for file in chosen) / 1e6:,.1f} MB", flush=True)


def _roots(given: tuple[str, ...]) -> list[Path]:
    if not given:
        own = dict.fromkeys(["/usr", "/opt", sys.prefix, sys.base_prefix])
        return [Path(root) for root in own if Path(root).is_dir()]
    roots = [user_path(root, "--roots") for root in given]
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--roots: {root} is not a folder.")
    return roots


def unique_files(roots: Iterable[Path]) -> list[SourceFile]:
    """The files of source code below `roots`, one for each content, in the order of their hashes."""
    with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as pool:
        found = sorted(file for file in pool.map(_opened, dict.fromkeys(_walk(roots)), chunksize=64) if file)
    # Of equal contents the first path stays, whatever the order in which threads found them.
    return list({file.digest: file for file in reversed(found)}.values())[::-1]


def _walk(roots: Iterable[Path]) -> Iterator[str]:
    for root in roots:
        for folder, inner, names in os.walk(root):
            # Assigned in place: os.walk does not enter what is removed.
            inner[:] = [name for name in inner if not name.startswith(".") and name != "__pycache__"]
            yield from (os.path.join(folder, name) for name in names if os.path.splitext(name)[1] in SUFFIXES)


def _opened(path: str) -> SourceFile | None:
    """None of a file that is no source code or cannot be read."""
    try:
        if os.path.islink(path) or os.path.getsize(path) not in FILE_BYTES:
            return None
        data = Path(path).read_bytes()
        data.decode()  # UTF-8, or it is left out
    except (OSError, UnicodeDecodeError):
        return None
    others = len(data.translate(None, LETTERS))  # bytes that are neither letters nor white space
    if len(data) > LINE_BYTES * (data.count(b"\n") + 1) or others > (1 - LETTERS_SHARE) * len(data) or b"\0" in data:
        return None
    return SourceFile(hashlib.sha256(data).hexdigest(), Path(path), len(data))


def _limited(files: Iterable[SourceFile], size: int) -> Iterator[SourceFile]:
    for file in files:
        size -= file.size
        if size < 0:
            return
        yield file


if __name__ == "__main__":
    run_script(main)
