"""manifest.json: the contents of a folder of token shards, and the progress of its tokenization."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from qtrain.core.checks import Range, check_fields, read_json
from qtrain.core.checksums import first_changed
from qtrain.core.errors import UserError
from qtrain.core.process import sync_to_disk

FILE_NAME = "manifest.json"
DTYPES = {"uint16": 2, "uint32": 4}  # token dtypes, little-endian, and their size in bytes


@dataclass(frozen=True)
class ShardEntry:
    """One file of raw token ids."""

    file: str
    tokens: Annotated[int, Range(1)]
    sha256: str


@dataclass(frozen=True)
class TokenizerEntry:
    """The tokenizer of the ids. `files`: sha256 of its files in the folder by name; older folders do not say."""

    name: str
    fingerprint: str
    vocab_size: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cursor:
    """Where the next shard starts: the corpus's state, the documents before it, the tokens to skip after it."""

    source: dict[str, Any] | None
    documents: Annotated[int, Range(0)]
    tokens: Annotated[int, Range(0)]


@dataclass
class Manifest:
    """The fields of manifest.json. `cursor`: where an unfinished tokenization continues; None when it is complete.

    `tokenizer`: the fields of TokenizerEntry. `settings`: the command that wrote the folder."""

    settings: dict[str, Any]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    dtype: str = "uint16"
    documents: int = 0
    tokens: int = 0
    max_token_id: int = 0
    shards: list[ShardEntry] = field(default_factory=list)
    complete: bool = False
    cursor: dict[str, Any] | None = None
    format: str = "qtrain-tokens-1"
    layout: str = "raw"
    """Of the shards: raw ids, or a program's with a header (`shards.shard_header`)."""
    masked: bool = False
    """Whether a bit of each id follows the ids."""

    def write(self, folder: Path) -> None:
        record = {"format": self.format, **asdict(self)}
        if self.layout == "raw":  # as it was before there were others
            del record["layout"], record["masked"]
        # A complete folder says the same, however often its tokenization was interrupted.
        if self.cursor is None:
            del record["cursor"]
        write_atomic(folder / FILE_NAME, (json.dumps(record, indent=2) + "\n").encode())


def read_manifest(folder: Path, flag: str) -> Manifest:
    """Read and check the manifest of `folder`. UserError when it is not one of tokenize_data.py."""
    path = folder / FILE_NAME
    where = f"{flag} ({path})"
    record = read_json(path, flag)
    if not isinstance(record, dict) or record.get("format") != Manifest.format:
        raise UserError(f"{where}: not a manifest of token shards; its format must be {Manifest.format!r}.")
    values = check_fields(Manifest, {**record, "shards": []}, where)  # shards are checked below, one by one
    if (dtype := values.get("dtype")) not in DTYPES:
        raise UserError(f"{where}: unknown dtype {dtype!r}; allowed: {', '.join(DTYPES)}.")
    shards = record.get("shards", [])
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        raise UserError(f"{where}: shards must be a list of objects.")
    values["shards"] = [ShardEntry(**check_fields(ShardEntry, shard, f"{where}.shards")) for shard in shards]
    manifest = Manifest(**values)
    if manifest.tokenizer:
        check_fields(TokenizerEntry, manifest.tokenizer, f"{where}.tokenizer")
    elif manifest.complete:
        raise UserError(f"{where}: it does not name its tokenizer; write the folder again with tokenize_data.py.")
    if manifest.cursor is not None:
        check_fields(Cursor, manifest.cursor, f"{where}.cursor")
    if manifest.complete and manifest.tokens != sum(shard.tokens for shard in manifest.shards):
        raise UserError(f"{where}: its shards do not have {manifest.tokens:,} tokens together; copy the file again.")
    for name in (*(shard.file for shard in manifest.shards), *manifest.tokenizer.get("files", {})):
        # A manifest from elsewhere must not name files outside of its folder.
        if Path(name).name != name:
            raise UserError(f"{where}: {name!r} is not the name of a file in its folder.")
    return manifest


def damaged_shard(folder: Path, manifest: Manifest) -> Path | None:
    """The first shard of the folder that is missing or whose sha256 is not the manifest's. Reads all shards."""
    return first_changed(folder, {shard.file: shard.sha256 for shard in manifest.shards})


def check_tokenizer_files(folder: Path, manifest: Manifest, flag: str) -> None:
    """UserError for a file of the folder's tokenizer that is not the one that was written. An export copies them all,
    and not every byte of them shows in the tokenizer's fingerprint."""
    if changed := first_changed(folder, manifest.tokenizer.get("files", {})):
        raise UserError(
            f"{flag}: {changed} is missing or damaged: its sha256 is not the one in {FILE_NAME}. Copy it again from "
            "where the folder was written, or write the folder again."
        )


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file atomically: write a temporary file, fsync it, `publish`."""
    # On the same file system, so that the rename is atomic.
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    publish(temporary, path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a written and synced file to its final name, and sync the folder."""
    os.replace(temporary, path)
    sync_to_disk(path.parent)
