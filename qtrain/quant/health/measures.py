"""How far codes are from the tensor that they stand for, and products of codes from the products of the tensors.

All in fp32 on the tensor's device; results are 0-dimensional tensors there, so that a sample is read back at once.

- saturated: share of elements beyond the largest code of their scale by more than half of its last step. An element
  that is rounded to the largest code is not saturated.
- flushed: share of the nonzero elements whose code is zero; flushed_sum: their share of the sum of magnitudes. Where
  few large elements set the scale, the first is near 1 although the norm of the error is small.
- amax; crest: amax / root mean square.
- error: Frobenius norm of the difference over that of the tensor.

Norms are computed of tensors divided by their amax: squares of small gradients would underflow.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, unpack
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

NAMES = ("saturated", "flushed", "flushed_sum", "amax", "crest", "error")
"""The measures of a tensor, in the order of `tensor_measures`."""

SAMPLE = 64
"""Rows and columns of a product that its error is computed on; the dimension that it sums over is whole."""

LARGE = 2**23
"""Elements of a tensor that are measured at most: temporaries in fp32 are then a few hundred MiB."""

_TINY = torch.finfo(torch.float32).tiny


class CodeValues(NamedTuple):
    """Elements of a tensor as fp32: the values of their codes, and the scale of each."""

    codes: Tensor
    scale: Tensor
    """Broadcasts with the codes; with the tensor's own scale in it where there is one."""

    @property
    def values(self) -> Tensor:
        return self.codes * self.scale


def code_values(
    quantized: QuantizedTensor,
    width: int,
    rows: Tensor,
    columns: Tensor | None = None,
    group: int | None = None,
    groups: int = 1,
) -> CodeValues:
    """Of the elements at `rows` and `columns` (None: all `width` of them) of the codes as they are stored, which are
    transposed where a GEMM sums over the tensor's columns. group: that of the columns, among `groups` with scales of
    rows of their own."""
    granularity, scale = quantized.format.granularity, quantized.scale
    codes = unpack(quantized.codes[rows], quantized.format.fmt, width).float()  # [rows, width] fp32
    codes = codes if columns is None else codes[:, columns]
    if granularity == "rowwise":
        scale = scale.view(groups, -1)[group or 0][rows, None]  # [rows, 1]
    elif granularity != "tensorwise":
        group_rows, group_columns = GRANULARITIES[granularity]
        # A scale per block [group_rows, group_columns]: integer division gives each element's.
        every = torch.arange(width, device=rows.device) if columns is None else columns
        scale = scale[rows // group_rows].float()[:, every // group_columns]
    scale = scale.float()
    return CodeValues(codes, scale if quantized.tensor_scale is None else scale * quantized.tensor_scale)


def largest_rounded(fmt: OperandFormat) -> float:
    """The largest magnitude, before the scale, that rounding brings to the largest code: what is above is cut off."""
    info = FORMATS[fmt.fmt]
    # Spacing of the codes in the binade of the largest one; integers are 1 apart.
    step = 1.0 if info.mantissa_bits is None else 2.0 ** (math.floor(math.log2(info.max)) - info.mantissa_bits)
    return info.max + step / 2


def tensor_measures(t: Tensor, quantized: QuantizedTensor) -> Tensor:
    """fp32 [6], NAMES of t [M, K] with codes of its rows. Of zeros all are 0; where t is not finite, what cannot be
    said is NaN. Of a large tensor the amax is that of all rows, the rest of as many, evenly spread, as have LARGE
    elements."""
    # One reduction over all of t, which may be too large for temporaries in fp32.
    amax = torch.linalg.vector_norm(t, ord=torch.inf, dtype=torch.float32)
    rows = spread(t.shape[0], max(1, LARGE // t.shape[1]), t.device)
    codes = code_values(quantized, t.shape[1], rows)
    t = t[rows].float()
    magnitude = t.abs()
    # A tensor of zeros is divided by the least normal number, not by 0.
    unit = amax.clamp(min=_TINY)
    values = codes.values
    relative, error = t / unit, (values - t) / unit
    limit = largest_rounded(quantized.format) * codes.scale  # broadcasts with [rows, K]
    zeros = (codes.codes == 0) & (t != 0)
    nonzero, total = (t != 0).sum().clamp(min=1), (magnitude / unit).sum().clamp(min=_TINY)
    norm = relative.square().sum().sqrt()
    return torch.stack(
        [
            # One entry for each of NAMES, in that order.
            (magnitude > limit).sum() / t.numel(),
            zeros.sum() / nonzero,
            torch.where(zeros, magnitude / unit, 0.0).sum() / total,
            amax,
            # amax / rms = sqrt(n) / norm, as `relative` is divided by amax already.
            torch.where(amax == 0, 0.0, (t.numel() ** 0.5) / norm.clamp(min=_TINY)),
            error.square().sum().sqrt() / norm.clamp(min=_TINY),
        ]
    )


def spread(count: int, wanted: int, device: torch.device) -> Tensor:
    """At most `wanted` of the indices below `count`, int64, evenly spaced with both ends."""
    if count <= wanted:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, wanted, device=device, dtype=torch.float64).round().long()


def product_error(a: Tensor, b: Tensor, a_read: Tensor, b_read: Tensor) -> Tensor:
    """Relative error of a_read · b_readᵀ, what a GEMM reads of the rows a [n, K] and b [m, K], in the Frobenius norm of
    a · bᵀ. Sums are fp32: it is the error of the codes, without that of the accumulator. 0 of zeros."""
    exact = a.float() @ b.float().t()  # [n, m]
    unit = exact.abs().max().clamp(min=_TINY)
    error = (a_read.float() @ b_read.float().t() - exact) / unit
    return error.square().sum().sqrt() / (exact / unit).square().sum().sqrt().clamp(min=_TINY)


def direction(low_bit: Tensor, exact: Tensor) -> Tensor:
    """fp32 [2]: the cosine of two gradients of one shape, and the ratio of their norms. NaN of zeros."""
    a, b = low_bit.float().flatten(), exact.float().flatten()
    a_unit, b_unit = (t.abs().max().clamp(min=_TINY) for t in (a, b))
    a, b = a / a_unit, b / b_unit
    a_norm, b_norm = a.norm(), b.norm()
    # Each was divided by its own amax; the ratio of norms takes that back.
    return torch.stack([a @ b / (a_norm * b_norm), a_norm * a_unit / (b_norm * b_unit)])
