"""Gathering the input of a column-parallel linear over tensor ranks as codes: each rank quantizes its tokens.

    x of a rank      [T / ranks, K], in high precision
    output           reads row codes [T, K]: gathered in the forward pass
    grad_weight      reads transposed codes [K, T]: those of the rank's own tokens are kept, and gathered in backward;
                     where they are the row codes (one scale for the tensor), these are kept and nothing is gathered

Rows of experts hold tokens in another order, some several times: `quantize_routed`.

Scales that cover tokens of several ranks, of the tensor or of a column, are computed from the absmax over all ranks:
the codes are those of the whole input, with stochastic rounding drawn anew by each rank. Bytes an element: as many as
the codes have, at most two, as bf16 has; backward keeps a rank's share of the second codes. Formats whose scales cover
a block of tokens, and schemes whose `grad_weight` reads x in high precision, gather x itself (`models`).
"""

import torch
from torch import Tensor

from qtrain.comm.tensor_group import CODES, TensorGroup
from qtrain.kernels.gemm.persistent import transpose_8bit
from qtrain.kernels.grouped.row_groups import RowGroups
from qtrain.kernels.numerics.formats import FORMATS, LINEAR_FORMATS
from qtrain.kernels.quantize.absmax import absmax
from qtrain.kernels.quantize.delayed_scale import record_amax
from qtrain.kernels.quantize.gather_rows import gather_rows
from qtrain.kernels.quantize.operators import quantize, quantize_transposed
from qtrain.kernels.quantize.reference import scale_from_amax_ref
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import BOTH, DelayedScale, NeedsOperand, TensorName
from qtrain.tensors.quantized_tensor import OperandFormat, Operands, QuantizedTensor


def gathers_codes(scheme: LowBitScheme) -> bool:
    """Whether an input in this scheme can be gathered as codes."""
    rows, columns = scheme.input_formats()
    return _takes(rows) and columns is not None and (columns.sum_dim == 0 or _takes(columns))


def gathers_second_codes(scheme: LowBitScheme) -> bool:
    """Whether `grad_weight` reads other codes than `output`, which are gathered in backward."""
    rows, columns = scheme.input_formats()
    one_scale = rows == columns and rows.granularity == "tensorwise" and FORMATS[rows.fmt].packing == 1
    return columns.sum_dim != 0 and not (one_scale and scheme.rounds_both_alike("x"))


def _takes(fmt: OperandFormat | None) -> bool:
    return fmt is not None and fmt.fmt in LINEAR_FORMATS and fmt.granularity in ("tensorwise", "rowwise")


def quantize_tokens(
    scheme: LowBitScheme,
    x: Tensor,
    key: Tensor | None,
    needs: NeedsOperand,
    delayed: DelayedScale | None,
    group: TensorGroup,
) -> Operands:
    """`LowBitScheme.quantize_input` of all ranks' tokens, given those of this rank; see `gathered_columns`."""
    rows, columns = scheme.input_formats()
    rounding, power_of_two = scheme.rounding("x", key), scheme.power_of_two
    scale = None
    if "tensorwise" in (rows.granularity, columns.granularity):
        scale = _tensor_scale(x, rows.fmt, delayed, power_of_two, group)
    given = scale if rows.granularity == "tensorwise" else None
    codes, row_scale = quantize(
        x, rows.fmt, rows.granularity, rounding.row_key, rounding.role, power_of_two, scale=given
    )
    if rows.granularity == "rowwise":
        row_scale = group.gathered(row_scale, CODES)
    of_rows = QuantizedTensor(group.gathered(codes, CODES), row_scale, rows)
    if not needs.columns:
        return Operands(of_rows, None)
    if columns.sum_dim == 0:
        return Operands(of_rows, of_rows.summed_over_rows())
    if rows == columns and given is not None and rounding.same and FORMATS[rows.fmt].packing == 1:
        return Operands(of_rows, of_rows._replace(codes=transpose_8bit(of_rows.codes)))
    if columns.granularity == "rowwise":
        amax = group.maximum(x.abs().amax(dim=0).float())
        scale = scale_from_amax_ref(amax, columns.fmt, "rowwise", (x.shape[1], x.shape[0]), power_of_two)
    codes_t, scale_t = quantize_transposed(
        x, columns.fmt, columns.granularity, rounding.column_key, rounding.role, power_of_two, scale=scale
    )
    return Operands(of_rows, QuantizedTensor(codes_t, scale_t, columns))


def _tensor_scale(x: Tensor, fmt: str, delayed: DelayedScale | None, power_of_two: bool, group: TensorGroup) -> Tensor:
    """The scale of all ranks' tokens, fp32 [1]."""
    amax = group.maximum(absmax(x).view(1))
    scale = scale_from_amax_ref(amax, fmt, "tensorwise", x.shape, power_of_two)
    if delayed is None:
        return scale
    scale = torch.where(delayed.scale > 0, delayed.scale, scale)
    if delayed.amax is None:
        return scale
    return record_amax(delayed.amax, amax, scale)


def gathered_columns(own: QuantizedTensor, tokens: int, group: TensorGroup) -> QuantizedTensor:
    """What `grad_weight` reads of all `tokens`, from what `quantize_tokens` returned for it."""
    columns = own.codes.shape[1]
    if own.format.sum_dim == 0 or columns * FORMATS[own.format.fmt].packing >= tokens:
        return own
    codes = group.gathered(own.codes, CODES).view(group.ranks, -1, columns)
    return own._replace(codes=codes.transpose(0, 1).reshape(-1, group.ranks * columns))


# ---- one scale for the rows of several ranks -------------------------------------------------------------------------


def has_tensor_scale(scheme: LowBitScheme, name: TensorName, needs: NeedsOperand) -> bool:
    """Whether an operand of the tensor `name` has one scale for all of its rows."""
    return any(fmt is not None and fmt.granularity == "tensorwise" for fmt in scheme.formats_of(name, needs))


def quantize_rows_of_ranks(
    scheme: LowBitScheme,
    name: TensorName,
    t: Tensor,
    key: Tensor | None,
    needs: NeedsOperand,
    delayed: DelayedScale | None,
    group: TensorGroup,
) -> Operands:
    """The operands of this rank's rows of the tensor `name`, under the tensorwise scale of all ranks' rows."""
    rows, columns = scheme.formats_of(name, needs)
    assert all(fmt is None or fmt.granularity == "tensorwise" for fmt in (rows, columns)), "other scales beside it"
    rounding = scheme.rounding(name, key)
    scale = _tensor_scale(t, (rows or columns).fmt, delayed, scheme.power_of_two, group)
    row_codes: QuantizedTensor | Tensor = t
    column_codes: QuantizedTensor | Tensor = t
    if rows:
        codes, _ = quantize(t, rows.fmt, "tensorwise", rounding.row_key, rounding.role, scale=scale)
        row_codes = QuantizedTensor(codes, scale, rows)
    if columns and columns.sum_dim == 0:
        column_codes = row_codes.summed_over_rows()
    elif columns:
        codes, _ = quantize_transposed(t, columns.fmt, "tensorwise", rounding.column_key, rounding.role, scale=scale)
        column_codes = QuantizedTensor(codes, scale, columns)
    return Operands(row_codes, column_codes)


# ---- rows of routed tokens -------------------------------------------------------------------------------------------


def gathers_routed_codes(scheme: LowBitScheme, needs: NeedsOperand = BOTH) -> bool:
    """Whether tokens of other ranks, whose rows are sorted by expert, can be gathered as one set of codes: those of
    `grad_weight` are the same ones, or none. Scales of (expert, column) need the values."""
    rows, columns = scheme.input_formats()
    if not _takes(rows):
        return False
    if not needs.columns:
        return True
    if columns is None or columns.sum_dim == 0:
        return columns is not None
    return not gathers_second_codes(scheme)


def quantize_routed(
    scheme: LowBitScheme,
    x: Tensor,
    key: Tensor | None,
    needs: NeedsOperand,
    delayed: DelayedScale | None,
    group: TensorGroup,
    groups: RowGroups,
) -> Operands:
    """The operands of `groups`' rows of all ranks' tokens, given this rank's tokens x; of a scheme that
    `gathers_routed_codes`."""
    every = quantize_tokens(scheme, x, key, NeedsOperand(columns=False), delayed, group).rows
    codes = gather_rows(every.codes.view(torch.int8), groups.token_of_row).view(every.codes.dtype)
    scale = every.scale
    if every.format.granularity == "rowwise":
        scale = gather_rows(scale.view(-1, 1), groups.token_of_row).view(-1)
    rows = every._replace(codes=codes, scale=scale)
    _, columns = scheme.formats_of("x", needs)
    if columns is None:
        return Operands(rows, None)
    if columns.sum_dim == 0:
        return Operands(rows, rows.summed_over_rows())
    return Operands(rows, rows._replace(codes=transpose_8bit(codes)))
