"""A rounding request: what a quantizer rounds stochastically, and the random bits that it draws for it.

A tensor is quantized along its rows, along its columns, or both. Each layout is rounded to nearest even or
stochastically: up with a probability equal to the discarded fraction, which is unbiased. Both layouts share one draw
per element; they never meet in one product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.numerics.philox import random_bits_ref


class Rounding(NamedTuple):
    """How the codes of one tensor [M, K] are rounded. Custom ops take it unpacked: `quantize_dual(..., *rounding)`.

    key: int64 [3] on the tensor's device: seed, step, tensor number; None: both layouts to nearest even.
    role: index into `philox.ROUNDED_TENSORS`.
    rows, columns: whether the row codes, the transposed (column) codes are rounded stochastically, given a key.
    """

    key: Tensor | None
    role: int
    rows: bool = True
    columns: bool = True

    @property
    def row_key(self) -> Tensor | None:
        """Key of the row codes; None: nearest even."""
        return self.key if self.rows else None

    @property
    def column_key(self) -> Tensor | None:
        """Key of the transposed codes; None: nearest even."""
        return self.key if self.columns else None

    @property
    def same(self) -> bool:
        """Whether both layouts are rounded the same way."""
        return self.key is None or self.rows == self.columns

    def bits(self, shape: torch.Size | tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
        """16 random bits per element, int32 [M, K] = shape, for row codes and for column codes; None: nearest even."""
        if self.row_key is None and self.column_key is None:
            return None, None
        bits = random_bits_ref(shape, self.key, self.role)
        return (bits if self.rows else None), (bits if self.columns else None)


NEAREST = Rounding(None, 0)
"""Both layouts to nearest even."""
