"""Philox keys of linears that read a tensor in chunks of rows, one after the other.

Random bits follow from a linear's number and the place of an element in the tensor that is quantized, so chunks under
one key would all draw the same bits. Chunk c of linear n draws those of a linear n + c · 2²².
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from qtrain.quant.linear import LowBitLinear

MOST_CHUNKS = 256
"""Of 2³⁰ numbers of linears that a key tells apart (`random_bits_ref`)."""
_STRIDE = 2**30 // MOST_CHUNKS


def rounding_linears(*modules: nn.Module) -> list[LowBitLinear]:
    """The linears within `modules` that round stochastically."""
    found = [m for module in modules for m in module.modules() if isinstance(m, LowBitLinear)]
    return [linear for linear in found if linear.scheme.stochastic_rounding]


@contextlib.contextmanager
def chunk_keys(linears: Sequence[LowBitLinear], chunk: int) -> Iterator[None]:
    """Inside, `linears` draw the random bits of chunk number `chunk`, those of number 0 being a whole tensor's."""
    keys = [linear.key for linear in linears]
    try:
        for linear, key in zip(linears, keys, strict=True):
            # Made on the device: the step in it changes, also when a CUDA graph replays this.
            linear.key = key.clone()
            linear.key[2:].add_(chunk * _STRIDE)
        yield
    finally:
        for linear, key in zip(linears, keys, strict=True):
            linear.key = key
