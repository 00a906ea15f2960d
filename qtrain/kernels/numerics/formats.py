"""Low-bit number formats and scale granularities: which codes exist, and which elements share a scale.

A value is code * scale, with the scale in fp32. Symmetric: a scale is its group's absmax * (1 / largest code), which
maps the absmax to the largest code. Ternary is the exception: its scale is the group's mean |x|, the rule of BitNet
b1.58 (Ma et al., "The Era of 1-bit LLMs", 2024). Packed formats are packed along the last dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_EPS = 1e-12
"""The smallest scale, that of a group of zeros."""


@dataclass(frozen=True)
class Format:
    """A number format of at most 8 bits. dtype: of the tensor that stores codes, `packing` of them per element."""

    name: str
    dtype: torch.dtype
    max: float  # the largest code's value
    packing: int = 1
    mantissa_bits: int | None = None  # None for integers
    exponent_bias: int = 0
    values: tuple[float, ...] | None = None
    """The value of each code where codes are indices; such formats have quantizers of their own (nvfp4.py, nf4.py)."""

    @property
    def is_float(self) -> bool:
        return self.mantissa_bits is not None


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, as in bitsandbytes."""

FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("int8", torch.int8, 127.0),
        Format("e4m3", torch.float8_e4m3fn, 448.0, mantissa_bits=3, exponent_bias=7),
        Format("e5m2", torch.float8_e5m2, 57344.0, mantissa_bits=2, exponent_bias=15),
        Format("int4", torch.uint8, 7.0, packing=2),
        Format("ternary", torch.uint8, 1.0, packing=4),
        Format("e2m1", torch.uint8, 6.0, packing=2, mantissa_bits=1, exponent_bias=1, values=E2M1_VALUES),
        Format("nf4", torch.uint8, 1.0, packing=2, values=NF4_VALUES),
    )
}

LINEAR_FORMATS = tuple(fmt.name for fmt in FORMATS.values() if fmt.values is None)
"""Formats of `quantize`: value = code * scale."""

EIGHT_BITS = tuple(fmt.name for fmt in FORMATS.values() if fmt.packing == 1)
"""Formats of one code per byte."""

GRANULARITIES: dict[str, tuple[int | None, int | None]] = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "1x128": (1, 128),
    "1x16": (1, 16),
    "1x32": (1, 32),
    "1x64": (1, 64),
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

    1x128: column-major, strides (1, rows). 128x128: row-major, each row padded with zeros to a multiple of 4. The rest
    is contiguous.
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


def empty_codes(
    x: Tensor, fmt: str, granularity: str, transposed: bool = False, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scale of x [M, K], or of its transpose; groups: of rows of x, each with rowwise scales of
    the transpose (`quantize/column_groups.py`)."""
    shape = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    codes = x.new_empty(codes_shape(fmt, *shape), dtype=FORMATS[fmt].dtype)
    if groups > 1 and granularity == "rowwise":
        return codes, x.new_empty(groups * shape[0], dtype=torch.float32)
    return codes, empty_scale(granularity, *shape, x)
