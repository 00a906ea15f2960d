"""Parameters whose values are made when they are needed, so that a model that is stored in low bits, or sharded, is
never whole in high precision.

A lazy parameter has its shape, dtype and device, but no memory, and a function that makes its value. So a model can be
built, swapped and sharded as any other, and whoever quantizes or shards it asks for one value after the other
(`quant/swap.py`). With full sharding its own memory comes when the parameter is used, with what is gathered then
(`parallel/sharding/full_shard.py`).
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qtrain.tensors.stored_weight import StoredWeight

StoredInitializer = Callable[[str], StoredWeight | None]
"""Format -> the value in codes of this format that exist already; None: there are none."""

# Keyed by identity, as == of tensors is elementwise; weak, so that an entry goes with its parameter.
_initializers: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Lazy parameter -> the function that makes its value, and its StoredInitializer or None."""


def plain_tensors(p: Tensor) -> list[Tensor]:
    """What a parameter consists of: itself, or a stored weight's codes and scale."""
    p = p.data
    return list(p.inner.values()) if isinstance(p, StoredWeight) else [p]


def make_lazy(p: Tensor, make: Callable[[], Tensor], stored: StoredInitializer | None = None) -> None:
    """Free the memory of `p`. make: returns its value, in new memory; stored: in codes that exist already."""
    for tensor in plain_tensors(p):
        tensor.untyped_storage().resize_(0)
    _initializers[p] = make, stored


def is_lazy(p: Tensor) -> bool:
    return p in _initializers


def initial_value(p: Tensor) -> Tensor:
    """The value that training begins with: of a lazy parameter in new memory, else its own."""
    return _initializers[p][0]() if is_lazy(p) else p.data


def existing_codes(p: Tensor, format: str) -> StoredWeight | None:
    """The initial value of a lazy parameter in codes of a stored format that exist already: nothing is rounded. None:
    there are none."""
    _, stored = _initializers.get(p, (None, None))
    return None if stored is None else stored(format)


def drop_initializer(p: Tensor) -> None:
    """Drop the initializer; the shards hold the value now."""
    _initializers.pop(p, None)


def materialize(p: Tensor) -> None:
    """Allocate a lazy parameter and give it its value; others are left alone."""
    if not is_lazy(p):
        return
    for own, value in zip(plain_tensors(p), plain_tensors(initial_value(p)), strict=True):
        allocate(own)
        own.copy_(value)
    drop_initializer(p)


def allocate(tensor: Tensor) -> None:
    """Allocate the memory of a contiguous tensor that has been freed; any other is left alone."""
    if not tensor.untyped_storage().nbytes():
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


@contextlib.contextmanager
def with_zeros(p: Tensor) -> Iterator[None]:
    """Inside, a lazy plain parameter has memory and is zero; others are left alone."""
    if not is_lazy(p):
        yield
        return
    allocate(p)
    p.data.zero_()
    yield
    p.untyped_storage().resize_(0)
