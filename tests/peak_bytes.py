"""Counts the memory of tensors on a CPU, as an allocator of a GPU would."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakBytes(TorchDispatchMode):
    """While active, counts tensors that operations allocate, until they are freed or their storage is resized. peak:
    the most bytes at once; live: those that are not freed.

    known: tensors that exist already, of which operations may return views.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = self._sum = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    @property
    def live(self) -> int:
        return self._sum

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if type(tensor) is torch.Tensor and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if key not in self._live:
            weakref.finalize(storage, self._freed, key)
        self._sum += size - self._live.get(key, (None, 0))[1]
        self._live[key] = weakref.ref(storage), size
        if self._sum > self.peak:  # not if others have been resized to less since they were counted
            self._live = {key: (ref, ref().nbytes()) for key, (ref, _) in self._live.items() if ref() is not None}
            self._sum = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._sum)

    def _freed(self, key: int) -> None:
        self._sum -= self._live.pop(key, (None, 0))[1]
