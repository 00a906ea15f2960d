"""The files of a checkpoint, read without trusting them: its marker, which says that it is complete, with the sizes and
checksums of all others; and DCP's index, a pickle, read without running code from it."""

import contextlib
import json
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from qtrain.core.process import sync_to_disk
from qtrain.core.reading import read_small

# ---- the marker -----------------------------------------------------------------------------------------------------

INDEX = ".metadata"
"""The file name of DCP's index."""
MARKER = "COMPLETE"
META = "meta.json"
MAX_BYTES = 1 << 28
"""A marker or a meta is not longer; what is, such as a link to /dev/zero, is not one."""


@dataclass(frozen=True)
class Marker:
    """The content of COMPLETE."""

    step: int
    saved_at: float
    """Seconds since 1970."""
    files: dict[str, tuple[int, int]]
    """(bytes, CRC-32) of each file, by name."""


class IncompleteCheckpoint(Exception):
    """A folder is not a complete checkpoint; the message gives the reason."""


def read_marker(path: Path) -> Marker:
    """The marker of a checkpoint all of whose files exist with their full size. Raises IncompleteCheckpoint."""
    if path.is_symlink() and not path.exists():
        raise IncompleteCheckpoint("it is a link to a folder that is not there")
    try:
        raw = json.loads(read_small(path / MARKER, MAX_BYTES))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        marker = Marker(int(raw["step"]), float(raw["saved_at"]), files)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteCheckpoint(f"it has no {MARKER} file, so it was not written to the end") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise IncompleteCheckpoint(f"its {MARKER} file is damaged") from None
    named = re.fullmatch(r"(?:\.old-)?(\d{8,})(?:-\d+)?", path.name)
    if named and int(named[1]) != marker.step:
        raise IncompleteCheckpoint(f"its {MARKER} file is damaged: it says step {marker.step}")
    if not {META, INDEX} <= files.keys() or any(Path(name).name != name for name in files):
        raise IncompleteCheckpoint(f"its {MARKER} file is damaged")
    for name, (size, _) in files.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            raise IncompleteCheckpoint(f"its file {name} is missing") from None
        if actual != size:
            raise IncompleteCheckpoint(f"its file {name} has {actual:,} of {size:,} bytes")
    return marker


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def seal(path: Path) -> tuple[int, int]:
    """Force a written file to disk. Returns its size and CRC-32."""
    sync_to_disk(path)  # DCP fsyncs its index before Python's buffer is flushed
    return path.stat().st_size, checksum(path)


def complete_checkpoints(folder: Path) -> list[tuple[Path, Marker]]:
    """The complete checkpoints in `folder`, the highest step first. Checksums are not read."""
    found = []
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        # .old-* is the previous checkpoint of a step that is being replaced, complete until the new one has the name.
        if path.name.isdigit() or path.name.startswith(".old-"):
            with contextlib.suppress(IncompleteCheckpoint):
                found.append((path, read_marker(path)))
    return sorted(found, key=lambda entry: entry[1].step, reverse=True)


def newest_complete(folder: Path) -> tuple[Path, Marker] | None:
    """The complete checkpoint of the highest step in `folder`; None if there is none."""
    return next(iter(complete_checkpoints(folder)), None)


def incomplete_checkpoints(folder: Path, after: int = -1) -> dict[Path, str]:
    """The folders in `folder` that are named like steps beyond `after` and are no complete checkpoints, the newest
    first, and why they are not. What a killed save leaves is not named like a step."""
    found = {}
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        if path.name.isdecimal() and int(path.name) > after and (path.is_dir() or path.is_symlink()):
            try:
                read_marker(path)
            except IncompleteCheckpoint as reason:
                found[path] = str(reason)
    return found


# ---- DCP's index ----------------------------------------------------------------------------------------------------


class _IndexUnpickler(pickle.Unpickler):
    """Resolves the classes that DCP's index consists of, and no other name."""

    KNOWN = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of qtrain contains")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """A member of an Enum by its name: Python 3.11.0 to 3.11.3 pickle one as `getattr` of these."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)) or name not in kind.__members__:
        raise pickle.UnpicklingError("it looks up an attribute, which no checkpoint of qtrain does")
    return kind.__members__[name]


def read_index(path: Path, files: Mapping[str, Any]) -> Metadata:
    """DCP's index, checked: only tensors, each covered by its chunks, each chunk in a file of this checkpoint."""
    with (path / INDEX).open("rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("it is not an index")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        # A chunk that is missing would leave a part of the tensor as it was allocated.
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"{name} is not covered by its chunks")
    for chunk, stored in index.storage_data.items():
        if not isinstance(chunk, MetadataIndex) or not isinstance(stored, _StorageInfo):
            raise ValueError("the description of a chunk has another type")
        # A path out of the folder would read other files; a transformation would run code on them.
        if stored.relative_path not in files or stored.transform_descriptors:
            raise ValueError(f"{chunk.fqn} lies outside the checkpoint")
    return index


class CheckedReader(dcp.FileSystemReader):
    """DCP's reader with an index that is read and checked already."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self._index = index

    def read_metadata(self) -> Metadata:  # without **kwargs: DCP looks for no index per rank then
        return self._index
