"""Reading DCP's index, a pickle, without running it: an unpickler that knows only its classes, and a check of it."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

INDEX = ".metadata"
"""The file that DCP keeps its index in."""


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes that DCP's index is made of, and no other name."""

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
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of this program does")
        return super().find_class(module, name)


def read_index(path: Path, files: Mapping[str, Any]) -> Metadata:
    """DCP's index, checked: only tensors, each covered by its pieces, each piece in a file of this checkpoint."""
    with (path / INDEX).open("rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("it is not an index")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"{name} is not covered by its pieces")
    for piece, stored in index.storage_data.items():
        if not isinstance(piece, MetadataIndex) or not isinstance(stored, _StorageInfo):
            raise ValueError("a piece is not described as one")
        if stored.relative_path not in files or stored.transform_descriptors:
            raise ValueError(f"{piece.fqn} lies outside the checkpoint")
    return index


class CheckedReader(dcp.FileSystemReader):
    """DCP's reader over an index that has been read and checked already."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self._index = index

    def read_metadata(self) -> Metadata:  # without **kwargs, so that DCP does not look for an index per rank
        return self._index
