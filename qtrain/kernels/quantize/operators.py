"""Quantizers: bf16/fp32 to low-bit codes and fp32 scales, at every granularity, along rows, columns or both.

A linear's operand is read by two GEMMs, once along its rows and once along its columns, and 8-bit tensor cores take
both operands K-major only: so column codes come transposed. `quantize_dual` makes both from one read of x where a
scale's group fits in a tile (1x128, 128x128, 32x32, or the scale is given: 4 bytes an element for bf16). Where the
absmax of whole rows and columns is needed there is a pass before, 2 bytes an element more; two separate quantizers and
a transposition would move 12.

The code is made with the reciprocal of the very scale that is stored. Rounding is to nearest even, or stochastic: up
with a probability of the fraction that is lost, so that the mean is right. A group of zeros has the eps scale. A group
that holds a NaN or an Inf has that for its scale and codes of zero, so that the products are NaN: bad values are never
hidden. Where the scale is given, FP8 keeps a NaN and everything else saturates.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.numerics.formats import (
    FORMATS,
    SCALE_EPS,
    Format,
    codes_shape,
    empty_scale,
    group_shape,
    scale_shape,
)
from qtrain.kernels.numerics.packing import pack, pack_int4, pack_ternary, unpack, unpack_int4, unpack_ternary
from qtrain.kernels.numerics.rounding import Rounding
from qtrain.kernels.quantize.absmax import absmax, absmax_ref
from qtrain.kernels.quantize.dual_bf16x2 import launch_dual_bf16x2, supports_dual_bf16x2
from qtrain.kernels.quantize.rowwise import launch_rowwise
from qtrain.kernels.quantize.rowwise_bf16x2 import launch_rowwise_bf16x2, supports_rowwise_bf16x2
from qtrain.kernels.quantize.tiled import launch_tiled

__all__ = [
    "absmax",
    "dequantize",
    "pack_int4",
    "pack_ternary",
    "quantize",
    "quantize_dual",
    "quantize_dual_given_scale",
    "quantize_transposed",
    "unpack_int4",
    "unpack_ternary",
]


# ---- definition ------------------------------------------------------------------------------------------------------


def scale_ref(x: Tensor, fmt: str, granularity: str, power_of_two: bool = False) -> Tensor:
    """x [M, K] -> scale of each group, fp32; its shape is `scale_shape`'s. power_of_two: rounded up to one."""
    groups = _groups(x, granularity)
    if fmt == "ternary":
        scale = _mean_abs(groups, x.shape)
    else:  # times the reciprocal: CUDA does not divide by a number anyway
        scale = groups.abs().amax(dim=(1, 3)).float() * (1 / FORMATS[fmt].max)
    scale = scale.clamp(min=SCALE_EPS)
    if power_of_two:
        bits = scale.view(torch.int32)
        raised = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isfinite(), raised, scale)
    return empty_scale(granularity, *x.shape, x).copy_(scale.reshape(scale_shape(granularity, *x.shape)))


def quantize_ref(
    x: Tensor,
    fmt: str,
    granularity: str,
    bits: Tensor | None = None,
    power_of_two: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes as `codes_shape`, scale fp32 as `scale_shape`.

    bits: 16 random bits for each element, int32 [M, K], for stochastic rounding. scale: fp32 [1], given (tensorwise).
    """
    x = x.float()
    if scale is None:
        scale = scale_ref(x, fmt, granularity, power_of_two)
        x = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # the scale is bad already
    reciprocal = scale.reciprocal().nan_to_num(nan=0.0)
    scaled = x * expand_scale(reciprocal, granularity, x.shape)
    codes = _encode(scaled, FORMATS[fmt], bits).contiguous()  # of a transpose only now, of a byte each
    return pack(codes, fmt), scale


def quantize_transposed_ref(
    x: Tensor,
    fmt: str,
    granularity: str,
    bits: Tensor | None = None,
    power_of_two: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_ref` of the transpose of x; `bits` is [M, K], as x."""
    if fmt == "ternary" and granularity == "tensorwise" and scale is None:
        scale = scale_ref(x, fmt, granularity, power_of_two)  # a sum in the order of x: the same as in `quantize_ref`
    return quantize_ref(x.t(), fmt, granularity, None if bits is None else bits.t(), power_of_two, scale)


def expand_scale(scale: Tensor, granularity: str, shape: tuple[int, int]) -> Tensor:
    """One scale a group -> a tensor that broadcasts with [M, K] = shape."""
    if granularity == "tensorwise":
        return scale
    if granularity == "rowwise":
        return scale[:, None]
    (m, k), (group_m, group_k) = shape, group_shape(granularity, *shape)
    return scale.repeat_interleave(group_m, 0)[:m].repeat_interleave(group_k, 1)[:, :k]


def _groups(x: Tensor, granularity: str) -> Tensor:
    """x [M, K] -> [groups down, rows of one, groups across, columns of one], filled up with zeros."""
    m, k = x.shape
    group_m, group_k = group_shape(granularity, m, k)
    counts = scale_shape(granularity, m, k)
    down, across = counts if len(counts) == 2 else (counts[0], 1)
    x = F.pad(x, (0, across * group_k - k, 0, down * group_m - m))
    return x.reshape(down, group_m, across, group_k)


def _mean_abs(groups: Tensor, shape: tuple[int, int]) -> Tensor:
    """Mean |x| of each group, the zeros that fill up the last ones not counted; in whatever order x lies."""
    down, group_m, across, group_k = groups.shape
    rows = (shape[0] - torch.arange(down, device=groups.device) * group_m).clamp(1, group_m)
    columns = (shape[1] - torch.arange(across, device=groups.device) * group_k).clamp(1, group_k)
    total = torch.linalg.vector_norm(groups, ord=1, dim=(1, 3), dtype=torch.float64)
    return (total / (rows[:, None] * columns)).float()


def _encode(scaled: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """x / scale, fp32, to codes one an element: int8 or fp8."""
    clamped = scaled.clamp(-fmt.max, fmt.max)
    if not fmt.is_float:
        clamped.nan_to_num_(nan=0.0)
        if bits is None:
            return clamped.round_().to(torch.int8)
        # Fixed point with 15 bits after the point, the noise added below the point: exact in fp32, and on the GPU
        # one addition to the bit pattern.
        fixed = clamped.mul_(2.0**15).round_()
        return fixed.add_(bits >> 1).mul_(2.0**-15).floor_().to(torch.int8)
    nan = scaled.isnan()
    if bits is None:
        codes = clamped.to(fmt.dtype).view(torch.uint8)
    else:
        # Moved to the exponents at which fp32 has its own subnormals, a number's fp32 pattern is the FP8 pattern with
        # more mantissa bits, subnormals included; the noise is added below the mantissa bits that are kept.
        dropped = 23 - fmt.mantissa_bits
        pattern = (clamped * 2.0 ** (fmt.exponent_bias - 127)).view(torch.int32)
        noise = (bits << (dropped - 16)) + (1 << (dropped - 17))  # centred: right on average, 0 for exact numbers
        codes = ((pattern & 0x7FFFFFFF) + noise) >> dropped
        codes = (codes | ((pattern >> 24) & 0x80)).to(torch.uint8)
    return codes.masked_fill_(nan, 0x7F).view(fmt.dtype)


def dequantize(
    codes: Tensor,
    scale: Tensor,
    fmt: str,
    granularity: str,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """codes and scale as `quantize` gives them for a matrix of this shape -> values [M, K] in dtype."""
    return (unpack(codes, fmt, shape[1]).float() * expand_scale(scale, granularity, shape)).to(dtype)


# ---- operators -------------------------------------------------------------------------------------------------------


def _kernel_takes(x: Tensor, rounding: Rounding) -> bool:
    """Stochastic rounding draws eight elements at a time, which must lie in one row."""
    return x.is_cuda and x.numel() > 0 and (rounding.key is None or x.shape[1] % 8 == 0)


def _given(
    x: Tensor, fmt: str, granularity: str, scale: Tensor | None, power_of_two: bool, transposed: bool = False
) -> Tensor | None:
    """The scale that a kernel is to read: a mean is torch's to make, so that it does not depend on the tiles."""
    if fmt != "ternary" or scale is not None:
        return scale
    return scale_ref(x.t() if transposed and granularity != "tensorwise" else x, fmt, granularity, power_of_two)


def empty_codes(x: Tensor, fmt: str, granularity: str, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Uninitialized codes and scale of x [M, K], or of its transpose."""
    shape = (x.shape[1], x.shape[0]) if transposed else (x.shape[0], x.shape[1])
    codes = x.new_empty(codes_shape(fmt, *shape), dtype=FORMATS[fmt].dtype)
    return codes, empty_scale(granularity, *shape, x)


def _launch(
    x: Tensor, fmt: str, granularity: str, rounding: Rounding, power_of_two: bool, given: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize`."""
    if given is None and supports_rowwise_bf16x2(x, fmt, granularity, rounding.row_key is not None):
        return launch_rowwise_bf16x2(x, fmt, granularity, rounding, power_of_two)
    if given is None and granularity in ("rowwise", "1x128", "1x32"):
        return launch_rowwise(x, fmt, granularity, rounding, power_of_two)
    return launch_tiled(x, fmt, granularity, None, rounding, power_of_two, given)


@torch.library.custom_op("qtrain::quantize", mutates_args=())
def quantize(
    x: Tensor,
    fmt: str,
    granularity: str,
    key: Tensor | None = None,
    role: int = 0,
    power_of_two: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes [M, K] (packed formats [M, ceil(K / packing)]), scale fp32 (`scale_shape`).

    key, role: rounds stochastically under `random_bits_ref`; None rounds to nearest even. scale: fp32 [1], given for
    the whole tensor (delayed scaling; tensorwise only), returned as a copy.
    """
    rounding = Rounding(key, role)
    if not _kernel_takes(x, rounding):
        codes, used = quantize_ref(x, fmt, granularity, rounding.bits(x.shape)[0], power_of_two, scale)
        return codes, used if scale is None else used.clone()
    x = x.contiguous()
    return _launch(x, fmt, granularity, rounding, power_of_two, _given(x, fmt, granularity, scale, power_of_two))


@quantize.register_fake
def _(x, fmt, granularity, key=None, role=0, power_of_two=False, scale=None):
    return empty_codes(x, fmt, granularity)


@torch.library.custom_op("qtrain::quantize_transposed", mutates_args=())
def quantize_transposed(
    x: Tensor,
    fmt: str,
    granularity: str,
    key: Tensor | None = None,
    role: int = 0,
    power_of_two: bool = False,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `quantize` of the transpose of x [M, K]: codes [K, M] and its scale ("1x128": 128 rows of x share one).

    Random bits belong to the elements of x: they are the same as in `quantize`.
    """
    rounding = Rounding(key, role)
    if not _kernel_takes(x, rounding):
        codes, used = quantize_transposed_ref(x, fmt, granularity, rounding.bits(x.shape)[1], power_of_two, scale)
        return codes, used if scale is None else used.clone()
    x, given = x.contiguous(), _given(x, fmt, granularity, scale, power_of_two, transposed=True)
    return launch_tiled(x, fmt, None, granularity, rounding, power_of_two, scale_t=given)


@quantize_transposed.register_fake
def _(x, fmt, granularity, key=None, role=0, power_of_two=False, scale=None):
    return empty_codes(x, fmt, granularity, transposed=True)


@torch.library.custom_op("qtrain::quantize_dual", mutates_args=())
def quantize_dual(
    x: Tensor,
    fmt: str,
    granularity: str,
    granularity_t: str,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    fmt_t: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize` and `quantize_transposed` of x in one: codes, scale, codes_t, scale_t. fmt_t: format of the latter.

    key, role, rows, columns: a `Rounding`.
    """
    fmt_t, rounding = fmt_t or fmt, Rounding(key, role, rows, columns)
    if not _kernel_takes(x, rounding):
        row_bits, column_bits = rounding.bits(x.shape)
        codes, used = quantize_ref(x, fmt, granularity, row_bits, power_of_two, scale)
        codes_t, used_t = quantize_transposed_ref(x, fmt_t, granularity_t, column_bits, power_of_two, scale)
        return (codes, used, codes_t, used_t) if scale is None else (codes, used.clone(), codes_t, used_t.clone())
    x, given = x.contiguous(), _given(x, fmt, granularity, scale, power_of_two)
    given_t = _given(x, fmt_t, granularity_t, scale, power_of_two, transposed=True)
    if (fmt, granularity) == (fmt_t, granularity_t) and supports_dual_bf16x2(x, fmt, granularity, given is not None):
        return launch_dual_bf16x2(x, fmt, granularity, rounding, power_of_two, given)
    if (given is None) != (given_t is None) or not rounding.same:
        row_codes = _launch(x, fmt, granularity, rounding, power_of_two, given)
        return *row_codes, *launch_tiled(x, fmt_t, None, granularity_t, rounding, power_of_two, scale_t=given_t)
    return launch_tiled(x, fmt, granularity, granularity_t, rounding, power_of_two, given, fmt_t, given_t)


@quantize_dual.register_fake
def _(
    x, fmt, granularity, granularity_t,
    key=None, role=0, rows=True, columns=True, power_of_two=False, scale=None, fmt_t=None,
):  # fmt: skip
    return *empty_codes(x, fmt, granularity), *empty_codes(x, fmt_t or fmt, granularity_t, transposed=True)


@torch.library.custom_op("qtrain::quantize_dual_given_scale", mutates_args=())
def quantize_dual_given_scale(
    x: Tensor,
    fmt: str,
    scale: Tensor,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    fmt_t: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] with its scale fp32 [1] given -> codes [M, K], codes_t [K, M], absmax fp32 [1] of x, from one read.

    key, role, rows, columns: a `Rounding`.
    """
    fmt_t, rounding = fmt_t or fmt, Rounding(key, role, rows, columns)
    if not _kernel_takes(x, rounding):
        row_bits, column_bits = rounding.bits(x.shape)
        codes, _ = quantize_ref(x, fmt, "tensorwise", row_bits, scale=scale)
        codes_t, _ = quantize_transposed_ref(x, fmt_t, "tensorwise", column_bits, scale=scale)
        return codes, codes_t, absmax_ref(x)
    x, most = x.contiguous(), torch.zeros(1, dtype=torch.int32, device=x.device)
    if fmt == fmt_t and supports_dual_bf16x2(x, fmt, "tensorwise", True):
        codes, _, codes_t, _ = launch_dual_bf16x2(x, fmt, "tensorwise", rounding, False, scale, most)
    elif not rounding.same:
        codes, _ = launch_tiled(x, fmt, "tensorwise", None, rounding, False, scale, absmax=most)
        codes_t, _ = launch_tiled(x, fmt_t, None, "tensorwise", rounding, scale_t=scale)
    else:
        codes, _, codes_t, _ = launch_tiled(
            x, fmt, "tensorwise", "tensorwise", rounding, False, scale, fmt_t, scale, most
        )
    return codes, codes_t, most.view(torch.float32)


@quantize_dual_given_scale.register_fake
def _(x, fmt, scale, key=None, role=0, rows=True, columns=True, fmt_t=None):
    codes_t = empty_codes(x, fmt_t or fmt, "tensorwise", transposed=True)[0]
    return empty_codes(x, fmt, "tensorwise")[0], codes_t, x.new_empty(1, dtype=torch.float32)
