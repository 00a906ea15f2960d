"""Quantizing by a scheme's declaration.

A tensor is quantized where it is produced, for both of its GEMMs at once: x and dy once per micro-batch, w once per
optimizer step, and only for the GEMMs that run. Both operands of a product are K-major, as 8-bit tensor cores require:
what a GEMM reads along a tensor's columns is quantized into transposed codes. A GEMM in high precision reads the tensor
itself. Quantizers (`quantizers.py`) are looked up by format, and so are products (`LinearArguments.multiply`).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.column_sums import column_sums
from qtrain.kernels.numerics.philox import Rounding
from qtrain.kernels.quantize.absmax import absmax
from qtrain.kernels.quantize.column_groups import NO_GROUPS, BlockGroups
from qtrain.kernels.quantize.delayed_scale import delayed_scale, record_amax
from qtrain.kernels.quantize.gather_rows import GatheredRows, in_memory, with_index
from qtrain.kernels.quantize.operators import quantize_dual_delayed
from qtrain.kernels.quantize.softmax_grad import (
    has_softmax_codes,
    quantize_softmax_grad,
    quantize_softmax_grad_delayed,
    reads_logits,
)
from qtrain.kernels.swiglu.quantize import (
    activation_dots,
    quantize_swiglu,
    quantize_swiglu_delayed,
    supports_swiglu_dual,
    supports_swiglu_rowwise,
)
from qtrain.quant.quantizers import quantize_columns, quantize_dual_layout, quantize_rows
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import (
    BOTH,
    DelayedScale,
    FormatPair,
    NeedsOperand,
    RowwiseQuantization,
    SwiGLUOperands,
    TensorName,
)
from qtrain.tensors.quantized_tensor import OperandFormat, Operands, QuantizedTensor
from qtrain.tensors.softmax_gradient import SoftmaxGradient, SoftmaxSource


class Exchange(Protocol):
    """What the processes that share a linear add to it; a linear of one process has none."""

    def covers(self, request: "OperandRequest") -> bool:
        """Whether the operands depend on rows that other processes hold."""

    def quantize(self, t: Tensor, request: "OperandRequest") -> Operands:
        """`quantize_operands` of a tensor that this covers, given the rows of this process."""

    def regather(self, saved: QuantizedTensor, rows: int) -> QuantizedTensor:
        """In backward: what `grad_weight` reads of all `rows` of x, from the operand that forward saved."""

    def reduce_dx(self, dx: Tensor) -> Tensor:
        """The gradient of this process's rows of x, from a term of that of all rows."""

    def whole(self, t: Tensor, operands: Operands) -> tuple[Tensor, Operands]:
        """For a health sample: what products read, from the rows and the operands of this process."""


class OperandRequest(NamedTuple):
    """Which operands of which tensor are wanted, in which scheme."""

    scheme: LowBitScheme
    name: TensorName
    needs: NeedsOperand = BOTH
    key: Tensor | None = None
    """int64 [3], the Philox key of stochastic rounding: seed, step, number of the linear; None: nearest even."""
    delayed: DelayedScale | None = None
    """The state of delayed scaling; None: the scale is the tensor's own."""
    groups: BlockGroups | None = None
    """The groups of the tensor's rows, each of which a product multiplies on its own (`experts.py`); scales of whole
    columns are then one per group."""
    exchange: Exchange | None = None
    observe: "Observe | None" = None
    """Is given the tensor and its operands; None: nothing looks at them."""

    @property
    def formats(self) -> FormatPair:
        """Of the operands along rows and along columns."""
        return self.scheme.formats_of(self.name, self.needs)

    @property
    def rounding(self) -> Rounding:
        return self.scheme.rounding(self.name, self.key)

    @property
    def held(self) -> Tensor | None:
        """`group_of_block` for quantizers that leave out the rows of no group, which no product reads; None where a
        health sample looks at all rows."""
        return None if self.groups is None or self.observe is not None else self.groups.group_of_block

    @property
    def exchanges(self) -> bool:
        """Whether the operands depend on rows of other processes."""
        return self.exchange is not None and self.exchange.covers(self)


Observe = Callable[[OperandRequest, Tensor, Operands], None]
"""What a health sample does with a tensor [M, K] in memory and what its GEMMs read of it."""


def quantize_operands(t: Tensor | GatheredRows, request: OperandRequest) -> Operands:
    """The operands of t [M, K]; t itself for a GEMM in high precision, or one that does not run."""
    return _observed_operands(t, request, False)[0]


def quantize_with_sums(t: Tensor | GatheredRows, request: OperandRequest) -> tuple[Operands, Tensor]:
    """`quantize_operands`, and the sums of t's columns, fp32 [K]: of dy, the gradient of a bias."""
    operands, sums = _observed_operands(t, request, True)
    return operands, column_sums(in_memory(t)) if sums is None else sums


def _observed_operands(t: Tensor | GatheredRows, request: OperandRequest, sums: bool) -> tuple[Operands, Tensor | None]:
    """The operands; and with `sums` those of t's columns where the same read of t gives them, else None."""
    if request.observe is None:
        return _quantize_operands(t, request, sums)
    t = in_memory(t)
    operands, total = _quantize_operands(t, request, sums)
    whole = request.exchange.whole(t, operands) if request.exchange is not None and request.exchanges else (t, operands)
    request.observe(request, *whole)
    return operands, total


def _quantize_operands(t: Tensor | GatheredRows, request: OperandRequest, sums: bool) -> tuple[Operands, Tensor | None]:
    if request.exchange is not None and request.exchanges:
        return request.exchange.quantize(in_memory(t), request), None
    rows, columns = request.formats
    if request.delayed is not None and (rows or columns):
        return _delayed_operands(t, request, request.delayed, sums)
    rounding, power_of_two = request.rounding, request.scheme.power_of_two
    if source := _unread_logits(t, request):
        codes, scale, codes_t, scale_t = quantize_softmax_grad(
            source.logits, source.log_total, source.labels, source.z_loss, rows.fmt, rows.granularity,
            columns.granularity, *rounding, power_of_two,
        )  # fmt: skip
        return Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale_t, columns)), None
    if rows and columns and columns.sum_dim == 1:
        # Both layouts from one read of t, where a kernel has it; gathered rows are never in memory then.
        return Operands(*quantize_dual_layout(t, rows, columns, rounding, power_of_two, request.groups)), None
    return operands_under_scale(in_memory(t), request, None), None


def _delayed_operands(
    t: Tensor | GatheredRows, request: OperandRequest, delayed: DelayedScale, sums: bool
) -> tuple[Operands, Tensor | None]:
    """With the tensorwise scale of earlier steps; the absmax of t is recorded for the next ones."""
    (rows, columns), rounding = request.formats, request.rounding
    # One format: a delayed scale belongs to the tensor, whichever GEMM reads it.
    power_of_two, fmt, amax, total = request.scheme.power_of_two, (rows or columns).fmt, None, None
    if source := _unread_logits(t, request):
        x = t
        codes, codes_t, scale, amax = quantize_softmax_grad_delayed(
            source.logits, source.log_total, source.labels, source.z_loss, fmt, delayed.scale, power_of_two,
            columns is not None,
        )  # fmt: skip
    elif rows and columns:
        # The absmax comes with the codes, from the same read: the next steps' scale costs no pass of its own.
        x, index = with_index(t)
        codes, codes_t, scale, amax, total = quantize_dual_delayed(
            x, fmt, delayed.scale, *rounding, power_of_two, *index, request.held, sums
        )
    else:
        x = in_memory(t)
        scale = delayed_scale(x, delayed.scale, fmt, power_of_two)  # x's own where there is no history yet
        # power_of_two False: a given scale is not rounded again.
        codes: Tensor | MaybeNone = quantize_rows(x, rows, rounding, False, scale).codes if rows else None
        codes_t: Tensor | MaybeNone = (
            quantize_columns(x, columns, rounding, False, scale=scale).codes if columns else None
        )
    if delayed.amax is not None:
        # NaN where the absmax is not finite: given scales saturate, and an Inf must show in the product.
        scale = record_amax(delayed.amax, absmax(x) if amax is None else amax, scale)
    operands = Operands(
        QuantizedTensor(codes, scale, rows) if rows else x, QuantizedTensor(codes_t, scale, columns) if columns else x
    )
    return operands, total if sums else None


def operands_under_scale(
    t: Tensor, request: OperandRequest, scale: Tensor | None, column_scale: Tensor | None = None
) -> Operands:
    """Where scales are tensorwise they are `scale`, fp32 [1]; finer ones are t's own, and all are if it is None.
    column_scale: of t's columns, fp32 [K], in place of its own."""
    rows, columns = request.formats
    rounding, power_of_two = request.rounding, request.scheme.power_of_two
    if scale is not None and rows is not None and rows == columns and rows.granularity == "tensorwise":
        return Operands(*quantize_dual_layout(t, rows, columns, rounding, power_of_two, request.groups, scale=scale))

    def given(fmt: OperandFormat) -> Tensor | None:
        return scale if fmt.granularity == "tensorwise" else None

    if columns and columns.sum_dim == 0:
        # One set of codes: `grad_input` reads those of rows along the other dimension, and dequantizes them.
        fmt = rows or columns
        codes = quantize_rows(t, fmt, rounding, power_of_two, given(fmt))
        return Operands(codes, codes.summed_over_rows())
    if columns and column_scale is None:
        column_scale = given(columns)
    return Operands(
        quantize_rows(t, rows, rounding, power_of_two, given(rows)) if rows else t,
        quantize_columns(t, columns, rounding, power_of_two, request.groups, column_scale) if columns else t,
    )


def quantize_swiglu_operands(
    x: Tensor, dy: Tensor | None, request: OperandRequest, router_dots: bool = False, sums: bool = False
) -> SwiGLUOperands:
    """Quantize what a SwiGLU MLP computes between its GEMMs from x [M, 2I], fused where a kernel exists.

    Of "x": operands of swiglu(x) [M, I], the input of the down projection. Of "dy": operands of the gradient [M, 2I] of
    x, given the gradient dy [M, I] of swiglu(x). router_dots: whether `router_dots_ref(dy, x)` is wanted too. sums:
    whether the sums of the tensor's columns are, the gradient of a bias.
    """
    if request.exchanges or request.observe is not None:
        # Scales may span ranks, which no fused kernel knows, or the tensor is looked at: it is quantized in memory.
        return _operands_in_memory(x, dy, request, router_dots, sums)
    (rows, columns), delayed, rounding = request.formats, request.delayed, request.rounding
    power_of_two = request.scheme.power_of_two
    if delayed is not None and rows is not None and columns is not None and rows == columns:
        codes, codes_t, scale, amax, dots, total = quantize_swiglu_delayed(
            x, dy, rows.fmt, delayed.scale, *rounding, power_of_two, router_dots, request.held, sums
        )
        if delayed.amax is not None:
            scale = record_amax(delayed.amax, amax, scale)
        return SwiGLUOperands(
            Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale, columns)),
            dots,
            total if sums else None,
        )
    # The fused kernel writes one format in both layouts; granularities may differ. It has no sums.
    fused = writes_swiglu_codes(request.scheme, request.name, request.needs) and not sums
    if rows is None or columns is None or not fused:
        return _operands_in_memory(x, dy, request, router_dots, sums)
    codes, scale, codes_t, scale_t, dots = quantize_swiglu(
        x, dy, rows.fmt, rows.granularity, columns.granularity, *rounding, power_of_two,
        *(request.groups or NO_GROUPS), router_dots,
    )  # fmt: skip
    return SwiGLUOperands(
        Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale_t, columns)), dots
    )


def _operands_in_memory(
    x: Tensor, dy: Tensor | None, request: OperandRequest, router_dots: bool, sums: bool
) -> SwiGLUOperands:
    """`quantize_swiglu_operands` by quantizing the tensor itself."""
    t, dots = activation_dots(x, dy, router_dots)
    return SwiGLUOperands(quantize_operands(t, request), dots, column_sums(t) if sums else None)


def writes_swiglu_codes(scheme: LowBitScheme, name: TensorName, needs: NeedsOperand = BOTH) -> bool:
    """Whether `quantize_swiglu_operands` quantizes the tensor `name` as it computes it, for both of its GEMMs."""
    rows, columns = scheme.formats_of(name, needs)
    if rows is None or columns is None:
        return False
    if scheme.amax_history:
        return rows == columns
    one_format = columns._replace(granularity=rows.granularity) == rows
    return one_format and supports_swiglu_dual(rows.fmt, rows.granularity, columns.granularity)


def writes_softmax_codes(scheme: LowBitScheme, needs: NeedsOperand, logits: Tensor) -> bool:
    """Whether `quantize_operands` of these logits' `SoftmaxGradient` needs none of its values."""
    return takes_softmax_codes(scheme, needs) and reads_logits(logits)


def takes_softmax_codes(scheme: LowBitScheme, needs: NeedsOperand = BOTH) -> bool:
    """Whether a scheme takes the gradient of logits without its values in memory."""
    (rows, columns), delayed = scheme.formats_of("dy", needs), bool(scheme.amax_history)
    if rows is None or (delayed and any(scheme.rounds("dy"))):
        return False
    if columns is None:  # those of rows alone: of a head that is not trained
        return delayed and not needs.columns and has_softmax_codes(rows.fmt, rows.granularity, rows.granularity, True)
    one_format = columns.sum_dim == 1 and columns._replace(granularity=rows.granularity) == rows
    return one_format and has_softmax_codes(rows.fmt, rows.granularity, columns.granularity, delayed)


def _unread_logits(t: Tensor | GatheredRows, request: OperandRequest) -> SoftmaxSource | None:
    """What t's codes are computed from, if it is a gradient of logits that none of the codes need in memory."""
    if not isinstance(t, SoftmaxGradient) or t.source.in_memory:
        return None
    return t.source if writes_softmax_codes(request.scheme, request.needs, t.source.logits) else None


def rowwise_swiglu(
    scheme: LowBitScheme, name: TensorName, key: Tensor | None = None, needs: NeedsOperand = BOTH
) -> RowwiseQuantization | None:
    """How `quantize_swiglu_operands` quantizes the tensor `name`, if both of its operands have one scale per row.

    A pair of such tensors takes fewer passes in another order (`swiglu_mlp.py`).
    """
    rows, columns = scheme.formats_of(name, needs)
    # One of both, or two formats: no fused kernel.
    if rows is None or rows != columns or not supports_swiglu_rowwise(rows.fmt, rows.granularity):
        return None
    return RowwiseQuantization(rows.fmt, scheme.power_of_two, scheme.rounding(name, key))
