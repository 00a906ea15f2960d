"""Low-bit number formats and scale granularities: which codes exist, how they are packed, which elements share a scale.

A value is code * scale, with the scale in fp32. Symmetric: a scale is its group's absmax * (1 / largest code), which
maps the absmax to the largest code. Ternary and binary are the exceptions: their scale is the group's mean |x|, the
rule of BitNet b1.58 (Ma et al., "The Era of 1-bit LLMs", 2024) and of BitNet (Wang et al., arXiv:2310.11453).

INT4 codes are two per byte, ternary codes four and binary codes eight, along the last dimension, the first code in the
lowest bits. A row whose length is not a multiple of the packing is padded with bits of zero. Codes are two's
complement, INT4 in -7..7, ternary in -1..1: unpacking is a left shift and an arithmetic right shift. Of binary codes, 1
and -1, the sign bit is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.maybe_none import MaybeNone

SCALE_EPS = 1e-12
"""The smallest scale, that of a group of zeros."""


@dataclass(frozen=True)
class Format:
    """A number format of at most 8 bits. dtype: of the tensor that stores codes, `packing` of them per element."""

    name: str
    dtype: torch.dtype
    max: float  # the largest code's value
    packing: int = 1
    mantissa_bits: int | MaybeNone = None  # None for integers
    exponent_bias: int = 0
    values: tuple[float, ...] | MaybeNone = None
    """The value of each code where codes are indices; such formats have quantizers of their own (nvfp4.py, nf4.py)."""
    signs: bool = False
    """Codes are 1 and -1, with a quantizer of their own (binary.py): there is no code of zero."""

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
        Format("binary", torch.uint8, 1.0, packing=8, signs=True),
        Format("e2m1", torch.uint8, 6.0, packing=2, mantissa_bits=1, exponent_bias=1, values=E2M1_VALUES),
        Format("nf4", torch.uint8, 1.0, packing=2, values=NF4_VALUES),
    )
}

LINEAR_FORMATS = tuple(fmt.name for fmt in FORMATS.values() if fmt.values is None and not fmt.signs)
"""Formats of `quantize`: value = code * scale."""

EIGHT_BITS = tuple(fmt.name for fmt in FORMATS.values() if fmt.packing == 1)
"""Formats of one code per byte."""

GRANULARITIES: dict[str, tuple[int | MaybeNone, int | MaybeNone]] = {
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
    group_rows, group_columns = group_shape(granularity, rows, columns)  # at the edges groups are shorter
    return (-(-rows // group_rows), -(-columns // group_columns))


def empty_scale(granularity: str, rows: int, columns: int, like: Tensor) -> Tensor:
    """Uninitialized fp32 scales of a matrix [rows, columns], laid out as cuBLAS reads them on the device of `like`.

    1x128: column-major, strides (1, rows). 128x128: row-major, each row padded with zeros to a multiple of 4. The rest
    is contiguous.
    """
    shape = scale_shape(granularity, rows, columns)
    if granularity == "1x128":
        return like.new_empty(shape[::-1], dtype=torch.float32).t()  # [rows, K / 128], strides (1, rows)
    if granularity == "128x128":
        padded = shape[0], -(-shape[1] // 4) * 4
        make = like.new_empty if padded == shape else like.new_zeros  # cuBLAS reads the padding
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


def pack(codes: Tensor, fmt: str) -> Tensor:
    """Codes int8 or fp8 [..., K] -> as the format stores them."""
    per_byte = FORMATS[fmt].packing
    if per_byte == 1:
        return codes
    if FORMATS[fmt].signs:
        codes = codes >> 1  # 1 becomes 0, and -1 stays -1: the sign bit in the lowest place
    bits = 8 // per_byte
    fields = F.pad(codes, (0, -codes.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte)).view(torch.uint8)
    packed = fields[..., 0] & (2**bits - 1)  # two's complement: the mask drops the sign's copies
    for i in range(1, per_byte):
        packed = packed | ((fields[..., i] & (2**bits - 1)) << (bits * i))
    return packed


def unpack(stored: Tensor, fmt: str, columns: int) -> Tensor:
    """Stored codes -> one code per element [..., K], int8 or fp8; the fp32 values where codes index a table."""
    per_byte = FORMATS[fmt].packing
    if per_byte == 1:
        return stored
    bits = 8 // per_byte
    # Each field is shifted to the top of the byte, and back as a signed number, which extends its sign.
    fields = torch.stack([stored << (8 - bits * (i + 1)) for i in range(per_byte)], dim=-1)
    codes = (fields.view(torch.int8) >> (8 - bits)).flatten(-2)[..., :columns].contiguous()
    if FORMATS[fmt].signs:
        return codes | 1  # of 0 and -1
    if FORMATS[fmt].values is None:
        return codes
    # Filled on the device: a copy of the table from the host would synchronize.
    values = torch.cat([torch.full((1,), value, device=codes.device) for value in FORMATS[fmt].values])  # fp32 [16]
    return values[codes.int() & 15]  # an index again: unpacking has extended the sign


MX_GROUP = 32
"""Elements along K that share a scale in the OCP microscaling (MX) formats."""


def expand_scale(scale: Tensor, granularity: str, shape: Sequence[int]) -> Tensor:
    """One scale per group (`scale_shape`) -> a tensor that broadcasts with [M, K] = shape."""
    if granularity == "tensorwise":
        return scale
    if granularity == "rowwise":
        return scale[:, None]
    # Blocks at the edges may be shorter: repeated in full, then cut.
    (m, k), (group_m, group_k) = shape, group_shape(granularity, *shape)
    return scale.repeat_interleave(group_m, 0)[:m].repeat_interleave(group_k, 1)[:, :k]


def dequantize(
    codes: Tensor, scale: Tensor, fmt: str, granularity: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """codes and scale of a matrix of this shape, as `quantize` returns them -> values [M, K] in dtype, rounded once."""
    return (unpack(codes, fmt, shape[1]).float() * expand_scale(scale, granularity, shape)).to(dtype)


def dequantize_mx(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes fp8 [M, K], scale float8_e8m0fnu [M, ceil(K / 32)] -> values [M, K]."""
    expanded = scale.float().repeat_interleave(MX_GROUP, 1)[:, : codes.shape[1]]  # [M, K], powers of two or NaN
    return (codes.float() * expanded).to(dtype)
