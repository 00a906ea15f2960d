"""Scales of weights that are divided over a tensor group: those that cover a whole weight are those of the whole.

A tensorwise scale needs the absmax of all ranks' parts, BitNet's the mean of all their elements: ranks reduce them, for
all linears of a model at once. Then a rank's codes are its part of the whole weight's codes. Scales that cover less, of
a row, a column or a block, are those of the rank's own part: equal to the whole's where they do not cross a cut, else
finer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.comm.tensor_group import TensorGroup
from qtrain.kernels.numerics.formats import SCALE_EPS
from qtrain.kernels.quantize.absmax import absmax
from qtrain.kernels.quantize.column_groups import BlockGroups
from qtrain.kernels.quantize.operators import quantize, quantize_transposed
from qtrain.kernels.quantize.reference import scale_from_amax_ref
from qtrain.quant.quantizers import quantize_columns, quantize_rows
from qtrain.quant.scheme import LowBitScheme
from qtrain.tensors.quantized_tensor import OperandFormat, Operands, QuantizedTensor
from qtrain.tensors.stored_weight import StoredWeight


def spans_ranks(scheme: LowBitScheme) -> bool:
    """Whether a weight has a scale that covers all of it."""
    return scheme.stored_format is None and any(map(_tensorwise, _formats(scheme)))


def _formats(scheme: LowBitScheme) -> tuple[OperandFormat | None, OperandFormat | None]:
    """Of the weight's codes, as they are quantized."""
    wire = scheme.wire_format()
    return (wire, wire) if wire else scheme.weight_formats()


def _tensorwise(fmt: OperandFormat | None) -> bool:
    return fmt is not None and fmt.granularity == "tensorwise"


class DividedWeight(NamedTuple):
    """A rank's part of a weight, and the arguments of `quantize_weight`. amax: of this part, if it is known."""

    scheme: LowBitScheme
    weight: Tensor
    key: Tensor | None
    groups: BlockGroups | None = None
    amax: Tensor | None = None


def quantize_divided(weights: Sequence[DividedWeight], group: TensorGroup) -> list[Operands]:
    """`quantize_weight` with scales over the ranks. Every rank calls it with its parts."""
    statistics = [_statistics(w) for w in weights]
    amax, sums = ([s for s in statistics if s.dtype is dtype] for dtype in (torch.float32, torch.float64))
    if amax:
        amax = list(group.maximum(torch.cat(amax)).split(1))
    if sums:
        sums = list(group.total_exactly(torch.cat(sums)).split(2))
    reduced = [(amax if s.dtype is torch.float32 else sums).pop(0) for s in statistics]
    return [_operands(weight, of) for weight, of in zip(weights, reduced, strict=True)]


def _statistics(divided: DividedWeight) -> Tensor:
    """The absmax, fp32 [1]; for a mean the sum of |w| and the number of elements, fp64 [2]."""
    w = divided.weight
    assert not isinstance(w, StoredWeight)
    if _is_mean(divided.scheme):
        total = w.abs().sum(dtype=torch.float64)
        return torch.stack([total, torch.full_like(total, w.numel())])
    return absmax(w).view(1).float() if divided.amax is None else divided.amax.view(torch.float32)


def _is_mean(scheme: LowBitScheme) -> bool:
    wire = scheme.wire_format()
    return wire is not None and wire.fmt == "ternary"


def _operands(divided: DividedWeight, statistics: Tensor) -> Operands:
    scheme, w, key, groups, _ = divided
    rows, columns = _formats(scheme)
    if _is_mean(scheme):
        scale = (statistics[:1] / statistics[1:]).float().clamp(min=SCALE_EPS)
    else:
        fmt = next(f.fmt for f in (rows, columns) if _tensorwise(f))
        scale = scale_from_amax_ref(statistics, fmt, "tensorwise", w.shape, scheme.power_of_two)
    if (wire := scheme.wire_format()) is not None:
        codes = quantize(w, wire.fmt, wire.granularity, scale=scale)[0]
        return scheme.operands_of(QuantizedTensor(codes, scale, wire), w.shape[1])
    rounding, power_of_two = scheme.rounding("w", key), scheme.power_of_two
    own_rows = own_columns = None
    if _tensorwise(rows):
        codes = quantize(w, rows.fmt, "tensorwise", rounding.row_key, rounding.role, scale=scale)[0]
        own_rows = QuantizedTensor(codes, scale, rows)
    elif rows:
        own_rows = quantize_rows(w, rows, rounding, power_of_two)
    if _tensorwise(columns):
        codes = quantize_transposed(w, columns.fmt, "tensorwise", rounding.column_key, rounding.role, scale=scale)[0]
        own_columns = QuantizedTensor(codes, scale, columns)
    elif columns:
        own_columns = quantize_columns(w, columns, rounding, power_of_two, groups)
    return Operands(own_rows, own_columns)
