"""The codes of a weight: derived from the master, never saved, refreshed once per optimizer step and only read by
forward, backward and recompute.

Where both operands follow from one set of codes, processes may exchange those in place of the weight (`wire_format`).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.gemm.persistent import transpose_8bit_into
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, GRANULARITIES, unpack
from qtrain.kernels.numerics.philox import NEAREST
from qtrain.kernels.quantize.column_groups import BlockGroups
from qtrain.quant.execute import OperandRequest, operands_under_scale, quantize_operands
from qtrain.quant.quantizers import ReuseBuffers, quantize_columns, quantize_dual_layout, quantize_rows
from qtrain.quant.scales import Reduce, center_of_statistic, reduce_all, scale_of_statistic, tensor_statistic
from qtrain.quant.scheme import LowBitScheme, Scheme
from qtrain.quant.tensor_roles import FormatPair
from qtrain.tensors.lazy import allocate
from qtrain.tensors.quantized_tensor import (
    OperandFormat,
    Operands,
    QuantizedTensor,
    flatten_operands,
    unflatten_operands,
)
from qtrain.tensors.stored_weight import STORED_FORMATS, StoredWeight


class WeightCodes(nn.Module):
    """The operands of `output` and `grad_input` in non-persistent buffers, whose addresses CUDA graphs rely on."""

    FIELDS = ("codes", "scale", "tensor_scale")
    output_codes: Tensor

    def __init__(self, operands: Operands, version: int):
        super().__init__()
        tensors, self._layouts = flatten_operands(operands)
        self._names = [f"{gemm}_{field}" for gemm in ("output", "grad_input") for field in self.FIELDS]
        for name, tensor in zip(self._names, tensors, strict=True):
            self.register_buffer(name, tensor, persistent=False)  # moves with the module, is in no checkpoint
        self.version = version
        """Of the master weight when the codes were computed; a different one means that they are stale."""

    def operands(self) -> Operands:
        """What `output` and `grad_input` read; None for a GEMM that reads the master weight."""
        return Operands(*unflatten_operands([getattr(self, name) for name in self._names], self._layouts))

    def free(self) -> None:
        """Free the codes' memory; the buffers stay, and the scales."""
        for name, buffer in self.named_buffers():
            if name.endswith("_codes"):
                buffer.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate memory for codes that have been freed; their values are undefined."""
        for buffer in self.buffers():
            allocate(buffer)

    def update(self, operands: Operands, version: int) -> None:
        """Copy new codes into the buffers."""
        for name, tensor in zip(self._names, flatten_operands(operands)[0], strict=True):
            buffer = getattr(self, name)
            # Codes may be in place, or those of a stored weight.
            if buffer is not None and tensor is not None and buffer is not tensor:
                buffer.copy_(tensor)
        self.version = version

    def derive_second_layout(self) -> None:
        """Have the codes that `grad_input` reads follow from those of `output`, under a scheme with a `wire_format`."""
        rows, columns = self.operands()
        if isinstance(rows, QuantizedTensor) and isinstance(columns, QuantizedTensor) and columns.format.sum_dim != 0:
            transpose_second_layout(columns, rows)


# ---- what a declaration says of a weight's codes ---------------------------------------------------------------------


def wire_format(scheme: LowBitScheme) -> OperandFormat | None:
    """The format of codes that both operands of a weight follow from; None: they follow from no single set, as under
    one scale per row and another per column."""
    if scheme.packed_weight is not None:
        return scheme.packed_weight
    rows, columns = scheme.formats_of("w")
    if rows is None or columns is None or any(scheme.rounds("w")):
        return None
    if rows.scale_dtype != torch.float32:
        return None  # scales in fewer bits need a statistic of their own, as NVFP4's of the tensor
    group_rows, group_columns = GRANULARITIES[rows.granularity]
    # A square block has one scale and the same codes in both layouts; two codes a byte cannot be transposed as bytes.
    square = group_rows == group_columns and FORMATS[rows.fmt].packing == 1
    return rows if columns.sum_dim == 0 or (rows == columns and square) else None


def reads_codes_only(scheme: LowBitScheme) -> bool:
    """Whether no GEMM reads a weight itself, but only codes that are computed from it."""
    return scheme.stored_format is None and None not in scheme.formats_of("w")


def _quantized_formats(scheme: LowBitScheme) -> FormatPair:
    """Of a weight's codes as they are quantized, before GEMMs' operands are made of them."""
    wire = wire_format(scheme)
    return (wire, wire) if wire else scheme.formats_of("w")


def scales_by_amax(scheme: LowBitScheme) -> bool:
    """Whether all that the scale of a weight's codes depends on is its absmax."""
    rows, columns = _quantized_formats(scheme)
    if scheme.stored_format is not None or rows is None or rows != columns:
        return False
    return rows.granularity == "tensorwise" and rows.fmt in EIGHT_BITS


def spanning_format(scheme: LowBitScheme) -> OperandFormat | MaybeNone:
    """The format whose scale covers all of a weight, other processes' parts of it too; None: there is none."""
    if scheme.stored_format is not None:
        return None
    return next(
        (fmt for fmt in _quantized_formats(scheme) if fmt is not None and fmt.granularity == "tensorwise"), None
    )


def in_one_layout(scheme: LowBitScheme) -> LowBitScheme:
    """The scheme with one layout of a weight's codes, from which `grad_input` makes those that it reads, with the same
    bits; the scheme itself where there is no second layout, or where it does not follow from the first."""
    # No option of a scheme, and so no field.
    return scheme.derived(one_weight_layout=True) if _second_layout_follows(scheme) else scheme


@functools.cache  # a plan asks for each linear
def _second_layout_follows(scheme: LowBitScheme) -> bool:
    rows, columns = scheme.formats_of("w")
    if rows is None or columns is None or columns.sum_dim == 0:
        return False
    # Scales of rows and of columns are of different values: those of columns follow from a stored weight alone.
    stored = scheme.stored_format is not None and rows == STORED_FORMATS[scheme.stored_format]
    return wire_format(scheme) is not None or (stored and columns.granularity == "rowwise")


def has_two_layouts(scheme: Scheme) -> bool:
    """Whether `in_one_layout` leaves out a layout of some linear."""
    return any(isinstance(part, LowBitScheme) and in_one_layout(part) is not part for part in scheme.parts())


# ---- computing them --------------------------------------------------------------------------------------------------


def operands_of_codes(
    scheme: LowBitScheme, codes: QuantizedTensor, in_features: int, *, second_layout: bool = True
) -> Operands:
    """The operands of a weight from its codes in `wire_format`: those that `quantize_weight` returns. Without the
    second layout None stands for codes that are not those of the first."""
    if scheme.packed_weight is not None:  # as int8: INT8 tensor cores multiply codes that are not packed
        unpacked = unpack(codes.codes, codes.format.fmt, in_features)
        codes = QuantizedTensor(unpacked, codes.scale, OperandFormat("int8", "tensorwise"))
    columns = scheme.formats_of("w")[1]
    if scheme.forward_only:
        return Operands(codes, None)
    if columns is not None and columns.sum_dim == 0:
        return Operands(codes, codes.summed_over_rows())
    if not second_layout:
        return Operands(codes, None)
    scale = codes.scale if codes.scale.ndim == 1 else codes.scale.t()
    columns = codes._replace(codes=codes.codes.new_empty(codes.codes.shape[::-1]), scale=torch.empty_like(scale))
    transpose_second_layout(columns, codes)
    return Operands(codes, columns)


def transpose_second_layout(columns: QuantizedTensor, rows: QuantizedTensor) -> None:
    """Codes and scales of `grad_input`'s operand from those of `output`'s, written into its tensors."""
    transpose_8bit_into(columns.codes, rows.codes)
    # One for the tensor, or one a block [N / 128, K / 128].
    columns.scale.copy_(rows.scale if rows.scale.ndim == 1 else rows.scale.t())


class WeightRequest(NamedTuple):
    """A weight to quantize."""

    scheme: LowBitScheme
    weight: Tensor
    """[N, K], plain or stored in low bits."""
    key: Tensor | None
    """The Philox key of stochastic rounding; None: nearest even."""
    groups: BlockGroups | None = None
    """The rows of each matrix, if the weight holds several (`grouped_linear.py`)."""
    reuse: ReuseBuffers | None = None


def quantize_weight(request: WeightRequest) -> Operands:
    """The operands of (output, grad_input); None where a GEMM reads the weight itself."""
    scheme, w, key, groups, reuse = request
    if isinstance(w, StoredWeight):
        return _stored_operands(scheme, w, groups)
    if scheme.packed_weight is not None:
        return operands_of_codes(scheme, quantize_rows(w, scheme.packed_weight, NEAREST, False), w.shape[1])
    rows, columns = scheme.formats_of("w")
    if rows and columns and columns.sum_dim == 1:
        rounding = scheme.rounding("w", key)
        return Operands(*quantize_dual_layout(w, rows, columns, rounding, scheme.power_of_two, groups, reuse))
    if columns and columns.sum_dim == 0 and reuse is not None:
        # One layout. The codes' own memory: of a matrix of 1 GiB that comes from the host they would take half as much.
        before = reuse.operands.codes
        codes = quantize_rows(w, rows or columns, scheme.rounding("w", key), scheme.power_of_two, before=before)
        return Operands(codes, codes.summed_over_rows())
    own_rows, own_columns = quantize_operands(w, OperandRequest(scheme, "w", key=key, groups=groups))
    return Operands(None if own_rows is w else own_rows, None if own_columns is w else own_columns)


def _stored_operands(scheme: LowBitScheme, w: StoredWeight, groups: BlockGroups | None) -> Operands:
    """The stored codes where a GEMM reads those; else codes of the dequantized weight, to nearest even."""
    rows, columns = scheme.formats_of("w")
    if scheme.forward_only and rows == STORED_FORMATS[w.format]:
        return Operands(w.quantized, None)
    if columns.sum_dim == 0:
        # The stored codes themselves: no memory of their own.
        return Operands(w.quantized, w.quantized.summed_over_rows())
    # `output` reads the stored codes; `grad_input` sums along the other dimension, which needs other scales.
    if wire_format(scheme) == STORED_FORMATS[w.format]:
        return operands_of_codes(scheme, w.quantized, w.shape[1])  # square blocks: the same codes, transposed
    if rows == STORED_FORMATS[w.format]:
        return Operands(w.quantized, quantize_columns(w.dequantize(), columns, NEAREST, False, groups))
    return Operands(*quantize_dual_layout(w.dequantize(), rows, columns, NEAREST, False, groups))


def quantize_spanning_weights(requests: Sequence[WeightRequest], reduce: Reduce) -> list[Operands]:
    """`quantize_weight` of parts of weights whose scales cover the other processes' parts too (`spanning_format`), with
    one reduction for all. Then a part's codes are its part of the whole weight's codes. Scales that cover less, of a
    row, a column or a block, are those of the part: equal to the whole's where no cut crosses them, else finer."""
    formats = [spanning_format(request.scheme) for request in requests]
    statistics = [
        tensor_statistic(request.weight, fmt, None if request.reuse is None else request.reuse.amax)
        for request, fmt in zip(requests, formats, strict=True)
    ]
    found = []
    for request, fmt, statistic in zip(requests, formats, reduce_all(statistics, reduce), strict=True):
        scheme, w, key, groups, reuse = request
        assert not isinstance(w, StoredWeight)  # its scales are per row or per 128 of one: none spans processes
        row_format, column_format = scheme.formats_of("w")
        if reuse is not None and row_format == column_format and scales_by_amax(scheme):
            # Both layouts, written in place by one kernel.
            found.append(quantize_weight(request._replace(reuse=reuse._replace(amax=statistic.view(torch.int32)))))
            continue
        scale = scale_of_statistic(statistic, fmt, w.shape, scheme.power_of_two)  # the whole weight's, on every process
        if (wire := wire_format(scheme)) is not None:
            codes = quantize_rows(w, wire, NEAREST, False, scale, center_of_statistic(statistic, fmt))
            found.append(operands_of_codes(scheme, codes, w.shape[1]))
            continue
        rows, columns = operands_under_scale(w, OperandRequest(scheme, "w", key=key, groups=groups), scale)
        found.append(Operands(None if rows is w else rows, None if columns is w else columns))
    return found
