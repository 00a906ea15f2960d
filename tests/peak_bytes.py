"""Counts the memory of tensors on a CPU, as an allocator of a GPU would."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakBytes(TorchDispatchMode):
    """While active, counts tensors that operations allocate, until they are freed or their storage is resized. peak:
    the most bytes at once.

    known: tensors that exist already, of which operations may return views.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if type(tensor) is torch.Tensor and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        # Counted anew after every operation: a storage can be resized without one.
        self.peak = max(self.peak, sum(s.nbytes() for ref in self._live.values() if (s := ref()) is not None))
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self._live[key] = weakref.ref(storage)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._known.discard(key)
        self._live.pop(key, None)
