"""Operands of a GEMM: the format and granularity that it reads, and the codes and scales that hold it.

An operand is described as its GEMM reads it. `sum_dim` is the dimension of the codes that the GEMM sums over: 1 for
K-major codes [rows, K], which 8-bit tensor cores take; 0 for codes that were quantized along the tensor's other
dimension, which a GEMM can only read dequantized.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, codes_shape, dequantize, scale_shape
from qtrain.kernels.quantize.nf4 import dequantize_nf4


class OperandFormat(NamedTuple):
    """What a GEMM reads: a format of `FORMATS` with scales of a granularity of `GRANULARITIES`."""

    fmt: str
    granularity: str
    scale_dtype: torch.dtype = torch.float32
    sum_dim: int = 1
    hadamard: bool = False
    """Whether values are rotated before they are quantized, 16 at a time along the sum (NVFP4's `grad_weight`)."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of a code and its share of a block's scale; a scale per row or per tensor is not counted."""
        rows, columns = GRANULARITIES[self.granularity]
        scale = self.scale_dtype.itemsize / (rows * columns) if rows and columns else 0  # e.g. 4 / 128 of 1x128 in fp32
        # A byte holds `packing` codes: one of 8 bits, two of 4, four ternary ones, eight binary ones.
        return 1 / FORMATS[self.fmt].packing + scale


class QuantizedTensor(NamedTuple):
    """A matrix as codes and scales: value = code * scale (* tensor_scale)."""

    codes: Tensor
    """[rows, columns], packed formats [rows, ceil(columns / packing)]."""
    scale: Tensor
    """One scale per group, shaped as `scale_shape`, in `format.scale_dtype`."""
    format: OperandFormat
    tensor_scale: Tensor | MaybeNone = None
    """fp32 [1], where block scales are low-bit themselves (NVFP4)."""

    @classmethod
    def empty(
        cls, format: OperandFormat, shape: Sequence[int], device: torch.device | str | None = None
    ) -> "QuantizedTensor":
        """Uninitialized codes and scales of a matrix of this shape."""
        codes = torch.empty(codes_shape(format.fmt, *shape), dtype=FORMATS[format.fmt].dtype, device=device)
        scale = torch.empty(scale_shape(format.granularity, *shape), dtype=format.scale_dtype, device=device)
        return cls(codes, scale, format, torch.empty(1, device=device) if format.fmt == "e2m1" else None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """codes * scale [rows, columns] in `dtype`, computed in fp32 and rounded once; `tensor_scale` is left out.

        Packed formats hold an even number of columns.
        """
        fmt, granularity = self.format.fmt, self.format.granularity
        shape = (self.codes.shape[0], self.codes.shape[1] * FORMATS[fmt].packing)
        if fmt == "nf4":
            return dequantize_nf4(self.codes, self.scale, shape[1], dtype)
        return dequantize(self.codes, self.scale.float(), fmt, granularity, shape, dtype)

    def values(self, dtype: torch.dtype) -> Tensor:
        """codes * scale (* tensor_scale) [rows, columns] in `dtype`, rounded once."""
        if self.tensor_scale is None:
            return self.dequantize(dtype)
        return (self.dequantize(torch.float32) * self.tensor_scale).to(dtype)

    def summed_over_rows(self) -> "QuantizedTensor":
        """The same codes for a GEMM that sums over their rows."""
        return self._replace(format=self.format._replace(sum_dim=0))


Operand = QuantizedTensor | Tensor
"""What a GEMM reads; a plain tensor where it runs in high precision."""


class Operands(NamedTuple):
    """A tensor as its two GEMMs read it: along its rows (of x: `output`) and along its columns (`grad_weight`).

    None: that GEMM does not run or, of a weight, reads the weight itself.
    """

    rows: Operand | MaybeNone
    columns: Operand | MaybeNone

    @property
    def codes(self) -> QuantizedTensor:
        """`rows`, of a tensor that is quantized."""
        assert isinstance(self.rows, QuantizedTensor)
        return self.rows


Layout = OperandFormat | None
"""The format of a quantized operand; None of a plain or a missing one."""


def flatten_operands(operands: Sequence[Operand | None]) -> tuple[list[Tensor | None], list[Layout]]:
    """Operands as three tensors each (None where there is none), which autograd can save, and their layouts."""
    tensors: list[Tensor | None] = []
    layouts: list[Layout] = []
    for operand in operands:
        if isinstance(operand, QuantizedTensor):
            # Three each, so that the inverse needs no lengths.
            tensors += [operand.codes, operand.scale, operand.tensor_scale]
            layouts.append(operand.format)
        else:
            tensors += [operand, None, None]
            layouts.append(None)
    return tensors, layouts


def unflatten_operands(tensors: Sequence[Tensor | MaybeNone], layouts: Sequence[Layout]) -> list[Operand | None]:
    """The inverse of `flatten_operands`."""
    operands: list[Operand | None] = []
    for i, layout in enumerate(layouts):
        codes, scale, tensor_scale = tensors[3 * i : 3 * i + 3]
        operands.append(codes if layout is None else QuantizedTensor(codes, scale, layout, tensor_scale))
    return operands
