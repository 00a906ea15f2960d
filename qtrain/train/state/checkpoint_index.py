"""DCP's index of a checkpoint, a pickle, read without running code from it, and checked."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

INDEX = ".metadata"
"""The file name of DCP's index."""


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
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of qtrain contains")
        return super().find_class(module, name)


def read_index(path: Path, files: Mapping[str, Any]) -> Metadata:
    """DCP's index, checked: only tensors, each covered by its chunks, each chunk in a file of this checkpoint."""
    with (path / INDEX).open("rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("it is not an index")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"{name} is not covered by its chunks")
    for chunk, stored in index.storage_data.items():
        if not isinstance(chunk, MetadataIndex) or not isinstance(stored, _StorageInfo):
            raise ValueError("the description of a chunk has another type")
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
