"""A tensor of which each tensor rank holds pieces, as checkpoints see it: the whole's shape, the pieces' memory.

torch.distributed.checkpoint asks any tensor which chunks of the whole it holds (the methods in double underscores), so
what a group of any size has written is read by one of any other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from qtrain.tensors.partition import Partition

_aten = torch.ops.aten
_PIECEWISE = {_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.empty_like.default}


class SplitTensor(Tensor):
    """pieces: first element of each in the whole, by dimension, and its memory."""

    pieces: list[tuple[tuple[int, ...], Tensor]]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor, pieces: list[tuple[tuple[int, ...], Tensor]]):
        # The whole's shape, no memory.
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.pieces = pieces
        return made

    @classmethod
    def of(cls, own: Tensor, split: Partition) -> "SplitTensor":
        """A rank's part of a tensor, itself perhaps a shard by rows."""
        shape, first = split.full_shape(own.shape), 0
        if isinstance(own, DTensor):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            # The shard's first row in this rank's part.
            first = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)[1][0]
            own = own.to_local()
        own, pieces = own.detach(), []
        for start, at, length in split.pieces():
            offset = [0] * own.ndim
            # Columns: each piece is a range of columns of this shard's rows.
            if split.dim:
                offset[0], offset[split.dim] = first, start
                piece = own.narrow(split.dim, at, length)
            else:
                # Rows that this shard has of a piece.
                low, high = max(at, first), min(at + length, first + own.shape[0])
                offset[0] = start + low - at
                piece = own[low - first : max(high, low) - first]
            if piece.numel():  # a shard may have no rows of q, k or v
                pieces.append((tuple(offset), piece))
        return cls(shape, own, pieces)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), piece.shape) for offset, piece in self.pieces]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece for offset, piece in self.pieces if torch.Size(offset) == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Copies, as a checkpoint in the background makes them, are copies of the pieces."""
        own, kwargs = args[0], kwargs or {}
        if func in _PIECEWISE:
            pieces = [(offset, func(piece, *args[1:], **kwargs)) for offset, piece in own.pieces]
            like = pieces[0][1] if pieces else func(torch.empty(0, dtype=own.dtype, device=own.device), **kwargs)
            return cls(own.shape, like, pieces)
        if func is _aten.copy_.default and isinstance(args[1], SplitTensor):
            for (_, target), (_, source) in zip(own.pieces, args[1].pieces, strict=True):
                target.copy_(source, *args[2:], **kwargs)
            return own
        raise NotImplementedError(f"{func} of {tree_map_only(Tensor, lambda t: tuple(t.shape), args)}")
