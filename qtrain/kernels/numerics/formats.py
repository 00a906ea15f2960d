"""Low-bit number formats and scale granularities: which codes exist, and which elements share a scale.

A value is code * scale, the scale kept in fp32. Symmetric: a scale is its group's absmax * (1 / largest code), so that
the absmax becomes the largest code. Ternary is the exception: its scale is the group's mean |x|, BitNet b1.58's rule
(Ma et al., "The Era of 1-bit LLMs", 2024). Packed formats are packed along the last dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_EPS = 1e-12
"""The smallest scale, that of a group of zeros."""


@dataclass(frozen=True)
class Format:
    """A way to code a number in at most 8 bits. `dtype` is what codes are stored in, `packing` of them an element."""

    name: str
    dtype: torch.dtype
    max: float  # the largest code's value
    packing: int = 1
    mantissa_bits: int | None = None  # None for integers
    exponent_bias: int = 0

    @property
    def is_float(self) -> bool:
        return self.mantissa_bits is not None


FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("int8", torch.int8, 127.0),
        Format("e4m3", torch.float8_e4m3fn, 448.0, mantissa_bits=3, exponent_bias=7),
        Format("e5m2", torch.float8_e5m2, 57344.0, mantissa_bits=2, exponent_bias=15),
        Format("int4", torch.uint8, 7.0, packing=2),
        Format("ternary", torch.uint8, 1.0, packing=4),
    )
}

EIGHT_BITS = tuple(fmt.name for fmt in FORMATS.values() if fmt.packing == 1)
"""Formats of one code a byte."""

GRANULARITIES: dict[str, tuple[int | None, int | None]] = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "1x128": (1, 128),
    "1x32": (1, 32),
    "128x128": (128, 128),
    "32x32": (32, 32),
}
"""Rows and columns that share a scale; None: all of them."""


def group_shape(granularity: str, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the groups that share a scale in a matrix [rows, columns]; at least one of each."""
    group_rows, group_columns = GRANULARITIES[granularity]
    return group_rows or max(rows, 1), group_columns or max(columns, 1)


def scale_shape(granularity: str, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of a matrix [rows, columns]: [1], [rows], or one scale a block."""
    if granularity == "tensorwise":
        return (1,)
    if granularity == "rowwise":
        return (rows,)
    group_rows, group_columns = group_shape(granularity, rows, columns)
    return (-(-rows // group_rows), -(-columns // group_columns))


def empty_scale(granularity: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialized fp32 scales of a matrix [rows, columns], laid out as cuBLAS reads them on the device of `like`.

    1x128: the rows of a block next to each other, strides (1, rows). 128x128: the blocks of a row next to each other,
    filled up with zeros to a multiple of 4. The rest is contiguous.
    """
    shape = scale_shape(granularity, rows, columns)
    if granularity == "1x128":
        return like.new_empty(shape[::-1], dtype=torch.float32).t()
    if granularity == "128x128":
        padded = shape[0], -(-shape[1] // 4) * 4
        make = like.new_empty if padded == shape else like.new_zeros
        return make(padded, dtype=torch.float32)[:, : shape[1]]
    return like.new_empty(shape, dtype=torch.float32)


def codes_shape(fmt: str, rows: int, columns: int) -> tuple[int, int]:
    """Shape of the codes of a matrix [rows, columns]."""
    return (rows, -(-columns // FORMATS[fmt].packing))
