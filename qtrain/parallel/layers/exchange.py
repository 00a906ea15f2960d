"""What the ranks of a group add to a low-bit linear: codes instead of activations on the wire, scales of all tokens.

    x of a rank      [T / ranks, K], in high precision
    output           reads row codes [T, K]: all-gathered in forward
    grad_weight      reads transposed codes [K, T]: those of the rank's own tokens are saved, and all-gathered in
                     backward; where they are the row codes (one scale for the tensor), these are saved and nothing is
                     gathered

Scales that cover tokens of several ranks, of the tensor or of a column, follow from the absmax over all ranks: the
codes are those of the full input, with stochastic rounding drawn anew by each rank. Bytes an element: as many as the
codes have, at most two, as bf16 has; backward keeps a rank's share of the second codes. Formats whose scales cover a
block of tokens, and schemes whose `grad_weight` reads x in high precision, gather x itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.comm.rank_group import CODES, RankGroup
from qtrain.kernels.gemm.persistent import transpose_8bit
from qtrain.kernels.grouped.token_permutation import TokenPermutation
from qtrain.kernels.numerics.formats import FORMATS, LINEAR_FORMATS
from qtrain.kernels.quantize.gather_rows import gather_dual, gather_rows
from qtrain.quant.arguments import LinearArguments
from qtrain.quant.choices import LinearChoice
from qtrain.quant.execute import OperandRequest, operands_under_scale, quantize_operands
from qtrain.quant.quantizers import quantize_columns, quantize_rows
from qtrain.quant.scales import scale_of_statistic, spanning_scale
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import BOTH, NeedsOperand, TensorName
from qtrain.tensors.quantized_tensor import OperandFormat, Operands, QuantizedTensor


def gathers_codes(scheme: LowBitScheme) -> bool:
    """Whether an input in this scheme can be gathered as codes."""
    rows, columns = scheme.formats_of("x")
    return _takes(rows) and columns is not None and (columns.sum_dim == 0 or _takes(columns))


def gathers_second_codes(scheme: LowBitScheme) -> bool:
    """Whether `grad_weight` reads other codes than `output`, which are gathered in backward."""
    rows, columns = scheme.formats_of("x")
    one_scale = rows == columns and rows.granularity == "tensorwise" and FORMATS[rows.fmt].packing == 1
    rounded_rows, rounded_columns = scheme.rounds("x")
    return columns.sum_dim != 0 and not (one_scale and rounded_rows == rounded_columns)


def gathers_routed_codes(scheme: LowBitScheme, needs: NeedsOperand = BOTH) -> bool:
    """Whether tokens of other ranks, whose rows are sorted by expert, can be gathered as one set of codes: those of
    `grad_weight` are the same ones, or none. Scales of (expert, column) need the values."""
    rows, columns = scheme.formats_of("x")
    if not _takes(rows):
        return False
    if not needs.columns:
        return True
    if columns is None or columns.sum_dim == 0:
        return columns is not None
    return not gathers_second_codes(scheme)


def _takes(fmt: OperandFormat | None) -> bool:
    return fmt is not None and fmt.fmt in LINEAR_FORMATS and fmt.granularity in ("tensorwise", "rowwise")


def reduce_statistics(statistics: Tensor, group: RankGroup) -> Tensor:
    """Statistics of scales over the ranks of a group, as `quant/scales.py` asks for."""
    return group.all_reduce_fp64(statistics) if statistics.dtype is torch.float64 else group.all_reduce_max(statistics)


@dataclass(frozen=True)
class TokenExchange:
    """Of a column-parallel linear whose input is sharded along tokens: an `Exchange` of a scheme that
    `gathers_codes`."""

    group: RankGroup

    def covers(self, request: OperandRequest) -> bool:
        return request.name == "x"

    def quantize(self, t: Tensor, request: OperandRequest) -> Operands:
        """The operands of all ranks' tokens; the second one of this rank's, until `regather`."""
        rows, columns = request.scheme.formats_of("x")
        rounding, power_of_two, group = request.rounding, request.scheme.power_of_two, self.group
        scale = None
        if "tensorwise" in (rows.granularity, columns.granularity):
            scale = spanning_scale(t, rows, group.all_reduce_max, power_of_two, request.delayed)
        # A rowwise scale is of one token, which one rank has: only the tensor's spans ranks.
        given = scale if rows.granularity == "tensorwise" else None
        own = quantize_rows(t, rows, rounding, power_of_two, given)
        row_scale = group.all_gather_no_grad(own.scale, CODES) if rows.granularity == "rowwise" else own.scale
        row_codes = own._replace(codes=group.all_gather_no_grad(own.codes, CODES), scale=row_scale)
        if not request.needs.columns:
            return Operands(row_codes, None)
        if columns.sum_dim == 0:
            return Operands(row_codes, row_codes.summed_over_rows())
        # One scale and one rounding: the transposed codes of all tokens are those just gathered, transposed here.
        if rows == columns and given is not None and rounding.same and FORMATS[rows.fmt].packing == 1:
            return Operands(row_codes, row_codes._replace(codes=transpose_8bit(row_codes.codes)))
        if columns.granularity == "rowwise":
            scale = _column_scale(t, columns, power_of_two, group)
        return Operands(row_codes, quantize_columns(t, columns, rounding, power_of_two, scale=scale))

    def regather(self, saved: QuantizedTensor, rows: int) -> QuantizedTensor:
        columns = saved.codes.shape[1]
        # Codes of all tokens already: forward transposed what it had gathered.
        if saved.format.sum_dim == 0 or columns * FORMATS[saved.format.fmt].packing >= rows:
            return saved
        # [ranks, K, T / ranks]
        codes = self.group.all_gather_no_grad(saved.codes, CODES).view(self.group.ranks, -1, columns)
        return saved._replace(codes=codes.transpose(0, 1).reshape(-1, self.group.ranks * columns))  # [K, T]

    def reduce_dx(self, dx: Tensor) -> Tensor:
        return self.group.reduce_scatter_no_grad(dx)

    def whole(self, t: Tensor, operands: Operands) -> tuple[Tensor, Operands]:
        t, columns = self.group.all_gather_no_grad(t), operands.columns
        if isinstance(columns, QuantizedTensor):
            operands = Operands(operands.rows, self.regather(columns, len(t)))
        return t, operands


@dataclass(frozen=True)
class ScaleExchange:
    """Of a linear whose x and dy have rows on every rank, under one tensorwise scale for all; each rank multiplies its
    own rows."""

    group: RankGroup

    def covers(self, request: OperandRequest) -> bool:
        return any(fmt is not None and fmt.granularity == "tensorwise" for fmt in request.formats)

    def quantize(self, t: Tensor, request: OperandRequest) -> Operands:
        formats = [fmt for fmt in request.formats if fmt is not None]
        # Finer scales would be of this rank's rows alone, and codes not those of one process.
        assert all(fmt.granularity == "tensorwise" for fmt in formats), "a scale that is not tensorwise"
        power_of_two = request.scheme.power_of_two
        scale = spanning_scale(t, formats[0], self.group.all_reduce_max, power_of_two, request.delayed)
        return operands_under_scale(t, request, scale)

    def regather(self, saved: QuantizedTensor, rows: int) -> QuantizedTensor:
        return saved

    def reduce_dx(self, dx: Tensor) -> Tensor:
        return dx

    def whole(self, t: Tensor, operands: Operands) -> tuple[Tensor, Operands]:
        return t, operands


@dataclass(frozen=True)
class ContextExchange(ScaleExchange):
    """Of a linear that multiplies this rank's tokens of a micro-batch, of which the other ranks have the others: scales
    of the tensor, and of its columns, are those of all tokens. Blocks of tokens are those of this rank's."""

    def covers(self, request: OperandRequest) -> bool:
        return super().covers(request) or _by_column(request.formats[1])

    def quantize(self, t: Tensor, request: OperandRequest) -> Operands:
        rows, columns = request.formats
        scale = self._scale(t, rows or columns, request)
        column_scale = None
        if _by_column(columns):
            column_scale = _column_scale(t, columns, request.scheme.power_of_two, self.group)
        elif rows is not None and columns != rows:
            column_scale = self._scale(t, columns, request)  # of another format, or where rows have finer scales
        return operands_under_scale(t, request, scale, column_scale)

    def _scale(self, t: Tensor, fmt: OperandFormat | None, request: OperandRequest) -> Tensor | None:
        if fmt is None or fmt.granularity != "tensorwise":
            return None
        return spanning_scale(t, fmt, self.group.all_reduce_max, request.scheme.power_of_two, request.delayed)


def spanning_scales(scheme: LowBitScheme, name: TensorName) -> int:
    """How often a `ContextExchange` reduces an absmax of the tensor `name`, for a product with it and its gradient."""
    rows, columns = scheme.formats_of(name)
    return any(fmt is not None and fmt.granularity == "tensorwise" for fmt in (rows, columns)) + _by_column(columns)


def _by_column(fmt: OperandFormat | None) -> bool:
    """Whether each column of a tensor has a scale of its own, over all tokens."""
    return fmt is not None and _takes(fmt) and fmt.sum_dim != 0 and fmt.granularity == "rowwise"


def _column_scale(t: Tensor, columns: OperandFormat, power_of_two: bool, group: RankGroup) -> Tensor:
    """fp32 [K]: a column's scale covers the tokens of all ranks."""
    amax = torch.linalg.vector_norm(t, torch.inf, dim=0, dtype=torch.float32)  # one read, no copy of |t|
    amax = group.all_reduce_max(amax.abs())  # a NaN may have a sign
    return scale_of_statistic(amax, columns, (t.shape[1], t.shape[0]), power_of_two)


def quantize_routed(linear: LinearArguments, x: Tensor, needs: NeedsOperand, group: RankGroup) -> Operands:
    """The operands of the rows of `linear.groups`, which are of all ranks' tokens, given this rank's tokens x."""
    groups, request = linear.groups, linear.request("x", needs)
    if not gathers_routed_codes(linear.scheme, needs):
        tokens = gather_rows(group.all_gather_no_grad(x), groups.token_of_row)
        return quantize_operands(tokens, request)
    # Of tokens, not of rows: T codes are sent, and sorted into rows by expert after they have arrived.
    token_request = linear._replace(groups=None).request("x", NeedsOperand(columns=False))
    operands = _routed_operands(TokenExchange(group).quantize(x, token_request).codes, groups, request)
    if linear.observe is not None:  # looks at the values too
        tokens = gather_rows(group.all_gather_no_grad(x), groups.token_of_row)
        linear.observe(request, tokens, operands)
    return operands


def _routed_operands(tokens: QuantizedTensor, groups: TokenPermutation, request: OperandRequest) -> Operands:
    columns, scale = request.formats[1], tokens.scale
    if tokens.format.granularity == "rowwise":
        scale = gather_rows(scale.view(-1, 1), groups.token_of_row).view(-1)
    if columns is not None and columns.sum_dim != 0:
        codes, codes_t = gather_dual(tokens.codes, groups.token_of_row, request.held)
        rows = tokens._replace(codes=codes, scale=scale)
        return Operands(rows, rows._replace(codes=codes_t))
    # Any 8-bit dtype: its bits are copied.
    codes = gather_rows(tokens.codes.view(torch.int8), groups.token_of_row).view(tokens.codes.dtype)
    rows = tokens._replace(codes=codes, scale=scale)
    return Operands(rows, None if columns is None else rows.summed_over_rows())


# ---- the plan's lines ------------------------------------------------------------------------------------------------


def describe_inputs(linears: Sequence[LinearChoice]) -> str:
    """The plan's line on what tensor ranks gather before attention and MLP."""
    inputs = [linear.scheme for linear in linears if linear.name.endswith(("qkv", "gate_up"))]
    codes = sum(scheme is not None and gathers_codes(scheme) for scheme in inputs)
    low_bit = sum(scheme is not None for scheme in inputs)
    if codes == len(inputs):
        return "tensor  inputs of qkv and gate_up are gathered as codes"
    line = (
        f"tensor  inputs of qkv and gate_up are gathered in the model's dtype: {len(inputs) - codes} of {len(inputs)}"
    )
    if codes < low_bit:
        line += "; the scheme scales blocks, or its grad_weight reads the input itself"
    return line


def describe_tokens(experts: int, linears: Sequence[LinearChoice], ranks: int) -> str:
    """The plan's line on what ranks send each other for their experts."""
    inputs = [linear.scheme for linear in linears if linear.name.endswith("experts.gate_up")]
    codes = sum(scheme is not None and gathers_routed_codes(scheme) for scheme in inputs)
    how = (
        "as codes (with adapters of experts, or with --deterministic and no --tp, in the model's dtype)"
        if codes
        else "in the model's dtype"
    )
    how += f" in {codes} of {len(inputs)} layers" * (0 < codes < len(inputs))
    return (
        f"experts {experts // ranks} of {experts} on each process; tokens are gathered "
        f"{how}, sums and gradients are sent in the model's dtype"
    )
