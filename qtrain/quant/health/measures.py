"""How far codes are from the tensor that they stand for, and products of codes from the products of the tensors.

All in fp32 on the tensor's device. What is read back is sums in fp64, of which measures follow: sums of the parts of a
tensor add up to those of all of it.

- saturated: share of elements beyond the largest code of their scale by more than half of its last step. An element
  that is rounded to the largest code is not saturated.
- flushed: share of the nonzero elements whose code is zero; flushed_sum: their share of the sum of magnitudes. Where
  few large elements set the scale, the first is near 1 although the norm of the error is small.
- amax; crest: amax / root mean square.
- error: Frobenius norm of the difference over that of the tensor.

Squares are summed of tensors divided by their amax: those of small gradients would underflow in fp32.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, unpack
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

NAMES = ("saturated", "flushed", "flushed_sum", "amax", "crest", "error")
"""The measures of a tensor, in the order of `measures`."""

SUMS = ("elements", "saturated", "nonzero", "flushed", "magnitude", "flushed_magnitude", "squares", "error", "amax")
"""What `tensor_sums` has of a tensor: four counts, two sums of magnitudes, two of squares, and no sum but a maximum."""

SAMPLE = 64
"""Rows and columns of a product that its error is computed on; the dimension that it sums over is whole."""

LARGE = 2**23
"""Elements of a tensor that are measured at most: temporaries in fp32 are then a few hundred MiB."""

_TINY = torch.finfo(torch.float32).tiny
_LEAST = 1e-300
"""Of norms that are divided by, in fp64."""


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


def tensor_sums(t: Tensor, quantized: QuantizedTensor) -> Tensor:
    """fp64 [9], SUMS of t [M, K] with codes of its rows. Of a large tensor the amax is that of all rows, the sums are
    of as many, evenly spread, as have LARGE elements."""
    # One reduction over all of t, which may be too large for temporaries in fp32.
    amax = torch.linalg.vector_norm(t, ord=torch.inf, dtype=torch.float32)
    rows = spread(t.shape[0], max(1, LARGE // t.shape[1]), t.device)
    codes = code_values(quantized, t.shape[1], rows)
    t = t[rows].float()
    magnitude = t.abs()
    # A tensor of zeros is divided by the least normal number, not by 0.
    unit = amax.clamp(min=_TINY)
    relative, error = magnitude / unit, (codes.values - t) / unit
    limit = largest_rounded(quantized.format) * codes.scale  # broadcasts with [rows, K]
    zeros = (codes.codes == 0) & (t != 0)
    elements = torch.full((), t.numel(), device=t.device)
    counts = torch.stack([elements, (magnitude > limit).sum(), (t != 0).sum(), zeros.sum()]).double()
    sums = [relative.sum(), torch.where(zeros, relative, 0.0).sum(), relative.square().sum(), error.square().sum()]
    unit = unit.double()
    scaled = torch.stack(sums).double() * torch.stack([unit, unit, unit.square(), unit.square()])
    return torch.cat([counts, scaled, amax.double().view(1)])


def add_sums(parts: Tensor) -> Tensor:
    """[..., 9]: SUMS of a tensor of those of its parts, [parts, ..., 9]; of copies of one tensor `measures` are its."""
    return torch.cat([parts[..., :-1].sum(0), parts[..., -1:].amax(0)], dim=-1)


def measures(sums: Tensor) -> Tensor:
    """fp64 [..., 6], NAMES of SUMS [..., 9]. Of zeros all are 0; where a tensor is not finite, what cannot be said is
    NaN."""
    elements, saturated, nonzero, flushed, magnitude, flushed_magnitude, squares, error, amax = sums.unbind(-1)
    norm = squares.sqrt().clamp(min=_LEAST)
    return torch.stack(
        [
            # One entry for each of NAMES, in that order.
            saturated / elements,
            flushed / nonzero.clamp(min=1),
            flushed_magnitude / magnitude.clamp(min=_LEAST),
            amax,
            torch.where(amax == 0, 0.0, amax * elements.sqrt() / norm),
            error.sqrt() / norm,
        ],
        dim=-1,
    )


def tensor_measures(t: Tensor, quantized: QuantizedTensor) -> Tensor:
    """fp64 [6], NAMES of t [M, K] with codes of its rows."""
    return measures(tensor_sums(t, quantized))


def spread(count: int, wanted: int, device: torch.device) -> Tensor:
    """At most `wanted` of the indices below `count`, int64, evenly spaced with both ends."""
    if count <= wanted:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, wanted, device=device, dtype=torch.float64).round().long()


def product_terms(a: Tensor, b: Tensor, a_read: Tensor, b_read: Tensor) -> Tensor:
    """fp32 [2, n, m]: a · bᵀ of rows a [n, K] and b [m, K], and what a_read · b_readᵀ, which a GEMM reads of them, is
    off. Sums are fp32: it is the error of the codes, without that of the accumulator."""
    exact = a.float() @ b.float().t()
    return torch.stack([exact, a_read.float() @ b_read.float().t() - exact])


def product_squares(terms: Tensor) -> Tensor:
    """fp64 [2]: the sums of squares of `product_terms`."""
    unit = terms.abs().amax().clamp(min=_TINY)
    return (terms / unit).square().sum(dim=(1, 2)).double() * unit.double().square()


def product_error(squares: Tensor) -> Tensor:
    """Of `product_squares` [..., 2], the relative error in the Frobenius norm, [...]. 0 of zeros."""
    exact, error = squares.unbind(-1)
    return error.sqrt() / exact.sqrt().clamp(min=_LEAST)


def direction_sums(low_bit: Tensor, exact: Tensor) -> Tensor:
    """fp64 [3]: a · b, a · a and b · b of two gradients of one shape."""
    a, b = low_bit.float().flatten(), exact.float().flatten()
    a_unit, b_unit = (t.abs().max().clamp(min=_TINY) for t in (a, b))
    a, b = a / a_unit, b / b_unit
    a_unit, b_unit = a_unit.double(), b_unit.double()
    units = torch.stack([a_unit * b_unit, a_unit.square(), b_unit.square()])
    return torch.stack([a @ b, a @ a, b @ b]).double() * units


def direction(sums: Tensor) -> Tensor:
    """fp64 [..., 2]: of `direction_sums` [..., 3] the cosine, and the ratio of the norms. NaN of zeros."""
    product, a, b = sums.unbind(-1)
    return torch.stack([product / (a.sqrt() * b.sqrt()), a.sqrt() / b.sqrt()], dim=-1)
