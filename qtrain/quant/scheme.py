"""What a scheme is: the format and granularity in which each of a linear's three GEMMs reads its two operands.

    output       y  [M, N] = x  [M, K] · w [N, K]ᵀ
    grad_input   dx [M, K] = dy [M, N] · w [N, K]
    grad_weight  dw [N, K] = dy [M, N]ᵀ · x [M, K]

Each of x, w and dy is read by two GEMMs, once along its rows and once along its columns. A tensor is quantized where it
is produced, for both GEMMs at once: x and dy once per micro-batch, w once per optimizer step, and only for the GEMMs
that run. Both operands of a product are K-major, as 8-bit tensor cores require: what a GEMM reads along a tensor's
columns is quantized into transposed codes. A GEMM in high precision reads the tensor itself.

A scheme is one file in `schemes/`: a frozen dataclass registered in SCHEMES whose fields are the keys of
`--quantize_kwargs`. It states its operand formats; quantizers (`quantizers.py`) and products (`gemm_table.py`) are
looked up by them.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.core.hardware import lacks_fp8
from qtrain.core.registry import Registry
from qtrain.kernels.gemm.persistent import transpose_8bit
from qtrain.kernels.grouped.row_groups import RowGroups
from qtrain.kernels.numerics.formats import EIGHT_BITS, FORMATS, GRANULARITIES
from qtrain.kernels.numerics.philox import NEAREST, ROUNDED_TENSORS, Rounding
from qtrain.kernels.quantize.column_groups import NO_GROUPS, BlockGroups
from qtrain.kernels.quantize.gather_rows import GatheredRows, in_memory
from qtrain.kernels.swiglu.quantize import (
    activation_dots,
    quantize_swiglu,
    supports_swiglu_dual,
    supports_swiglu_rowwise,
)
from qtrain.quant.gemm_table import Gemm, multiply
from qtrain.quant.grouped_table import multiply_grouped
from qtrain.quant.quantizers import Former, quantize_columns, quantize_dual_layout, quantize_rows
from qtrain.quant.tensor_roles import (
    BOTH,
    HIGH_PRECISION,
    READERS,
    DelayedScale,
    NeedsOperand,
    RowwiseQuantization,
    SwiGLUOperands,
    TensorName,
)
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, Operands, QuantizedTensor
from qtrain.tensors.stored_weight import STORED_FORMATS, StoredWeight


class Scheme(ABC):
    """A choice of `--quantize`. A scheme that is not a LowBitScheme swaps nothing."""

    @abstractmethod
    def gemm_dtypes(self) -> dict[Gemm, str]:
        """The arithmetic of each GEMM ('int8', 'fp8', 'bf16'), for the plan and the speed of light."""

    def parts(self) -> list[tuple[float, "Scheme"]]:
        """The schemes that a model's linears run in, each with its share of the weights."""
        return [(1.0, self)]

    def for_linear(self, in_features: int, out_features: int, *, head: bool = False) -> "Scheme":
        """The scheme of a linear of this shape; head: of a model's output head."""
        return self


class LowBitScheme(Scheme):
    """A scheme that swaps linears, given by `low_bit_formats`. A subclass is a frozen dataclass.

    All tensors are 2-D. `key`: int64 [3], the Philox key of stochastic rounding; None: round to nearest even. `groups`:
    of a tensor's rows, each of which a product multiplies on its own (`experts.py`); scales of whole columns are then
    one per group.
    """

    output: str
    grad_input: str
    grad_weight: str
    """The arithmetic of each GEMM."""

    stochastic_rounding: bool | tuple[Gemm, ...] = False
    """Whether operands are rounded stochastically; a tuple names the GEMMs whose operands are."""

    fast_accum: bool | tuple[Gemm, ...] = True
    """Whether FP8 products accumulate in the tensor cores' own accumulator instead of fp32; a tuple names the GEMMs."""

    power_of_two: bool = False
    """Whether scales are rounded up to powers of two."""

    name: str = ""
    """The scheme's name where it is no choice of `--quantize`."""

    amax_history: int = 0
    """Steps of absmax history per linear for delayed scaling; 0: scales are dynamic."""

    amax_formats: tuple[str, str] = ("e4m3", "e4m3")
    """The formats of x and dy under delayed scaling."""

    stored_format: str | None = None
    """The format that the weight itself is stored in (`tensors/stored_weight.py`); None: high precision."""

    latent: bool = False
    """Whether `output` multiplies other values than the weight's own, so that an export needs `exported_weight`."""

    sub_norm: bool = False
    """Whether the input of every linear is normalized; a native decoder adds the norms that it lacks."""

    def __post_init__(self) -> None:
        """UserError for stochastic rounding of a GEMM in high precision."""
        named = self.stochastic_rounding if isinstance(self.stochastic_rounding, tuple) else ()
        for gemm in named:
            if self.operand_formats(gemm) == HIGH_PRECISION:
                raise UserError(
                    f"--quantize_kwargs.stochastic_rounding: {gemm!r} is not allowed, for {gemm} runs in bf16 and "
                    "rounds nothing; take it out of the list or give that GEMM a low-bit arithmetic."
                )

    def for_linear(self, in_features: int, out_features: int, *, head: bool = False) -> "LowBitScheme":
        """An output head rounds stochastically where it has integer codes of dy.

        The gradient of logits is -1 at the label and close to 0 elsewhere. Rounded to nearest, with a step of 1/127 of
        the largest, most of it is lost, which costs 5 to 6% of a small model's loss.
        """
        read = {gemm: self.operand_formats(gemm)[i] for gemm, i in READERS["dy"]}
        integer = [gemm for gemm, fmt in read.items() if fmt is not None and not FORMATS[fmt.fmt].is_float]
        nearest = [gemm for gemm in integer if not applies(self.stochastic_rounding, gemm)]
        if not (head and nearest):
            return self
        others = [gemm for gemm in get_args(Gemm) if applies(self.stochastic_rounding, gemm)]
        return replace(self, stochastic_rounding=(*others, *nearest))

    @abstractmethod
    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        """What `gemm` reads of its operands (x, w), (dy, w) or (dy, x) where its arithmetic is not bf16."""

    def operand_formats(self, gemm: Gemm) -> tuple[OperandFormat | None, OperandFormat | None]:
        """What `gemm` reads of its operands; None: the tensor itself, in high precision."""
        return HIGH_PRECISION if self.gemm_dtypes()[gemm] == "bf16" else self.low_bit_formats(gemm)

    # ---- what the swap, the plan and the export ask ------------------------------------------------------------------

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        """Why a linear of this shape stays in high precision on this device; None if it is swapped. The device meta
        stands for a GPU that is not here, in plans.

        Kernels take any shape, but operands that tensor cores cannot read in place are slower than bf16.
        """
        if device.type != "cpu" and (in_features % 16 or out_features % 16):
            return "8-bit tensor cores take in- and out-features in multiples of 16"
        return lacks_fp8(device) if "fp8" in self.gemm_dtypes().values() else None

    def weight_bytes(self, element: int) -> float:
        """Bytes per element of the weight itself in a model whose dtype has `element` bytes."""
        return element if self.stored_format is None else STORED_FORMATS[self.stored_format].bytes_per_element

    def code_bytes(self) -> float:
        """Bytes of codes kept beside the master weight, per weight element."""
        return self._kept_bytes(*self.formats_of("w"))

    @property
    def reads_codes_only(self) -> bool:
        """Whether no GEMM reads a weight itself, but only codes that are computed from it."""
        return self.stored_format is None and None not in self.formats_of("w")

    def kept_input_bytes(self, element: int) -> float:
        """Bytes of a linear's input kept for backward, per element of `element` bytes."""
        kept = self.formats_of("x")[1]
        return kept.bytes_per_element if kept else element

    def exported_weight(self, w: Tensor) -> Tensor:
        """The plain weight that an export holds, in w's dtype: the values that `output` multiplies with."""
        return w.dequantize(w.dtype) if isinstance(w, StoredWeight) else w.detach()

    # ---- what the linear calls ---------------------------------------------------------------------------------------

    def quantize_weight(
        self, w: Tensor, key: Tensor | None, groups: BlockGroups | None = None, former: Former | None = None
    ) -> Operands:
        """w [N, K] -> operands of (output, grad_input); None where a GEMM reads w itself. former: those of its former
        value."""
        rows, columns = self._operands(w, "w", key, groups=groups, former=former)
        return Operands(None if rows is w else rows, None if columns is w else columns)

    def weight_formats(self) -> tuple[OperandFormat | None, OperandFormat | None]:
        """What `output` and `grad_input` read of a weight; None: the weight itself."""
        return self.formats_of("w")

    def input_formats(self) -> tuple[OperandFormat | None, OperandFormat | None]:
        """What `output` and `grad_weight` read of an input; None: the input itself."""
        return self.formats_of("x")

    @property
    def scales_weight_by_amax(self) -> bool:
        """Whether all that the scale of a weight's codes depends on is its absmax."""
        wire = self.wire_format()
        rows, columns = (wire, wire) if wire else self.formats_of("w")
        if self.stored_format is not None or rows is None or rows != columns:
            return False
        return rows.granularity == "tensorwise" and rows.fmt in EIGHT_BITS

    def wire_format(self) -> OperandFormat | None:
        """The format of codes that processes may exchange in place of a weight, since both operands follow from one
        set of codes; None: they do not, as under one scale per row and another per column."""
        rows, columns = self.formats_of("w")
        if rows is None or columns is None or self.rounds_stochastically("w"):
            return None
        group_rows, group_columns = GRANULARITIES[rows.granularity]
        square = group_rows == group_columns and FORMATS[rows.fmt].packing == 1
        return rows if columns.sum_dim == 0 or (rows == columns and square) else None

    def operands_of(self, codes: QuantizedTensor, in_features: int) -> Operands:
        """The operands of a weight from its codes in `wire_format`: those that `quantize_weight` returns."""
        columns = self.formats_of("w")[1]
        if columns is not None and columns.sum_dim == 0:
            return Operands(codes, codes.summed_over_rows())
        scale = codes.scale if codes.scale.ndim == 1 else codes.scale.t()
        return Operands(codes, codes._replace(codes=transpose_8bit(codes.codes), scale=scale))

    def quantize_input(
        self,
        x: Tensor | GatheredRows,
        key: Tensor | None,
        needs: NeedsOperand,
        delayed: DelayedScale | None = None,
        groups: BlockGroups | None = None,
    ) -> Operands:
        """x [M, K] -> operands of (output, grad_weight); backward keeps the second only."""
        return self._operands(x, "x", key, needs, delayed, groups)

    def quantize_grad(
        self,
        dy: Tensor | GatheredRows,
        key: Tensor | None,
        needs: NeedsOperand,
        delayed: DelayedScale | None = None,
        groups: BlockGroups | None = None,
    ) -> Operands:
        """dy [M, N] -> operands of (grad_input, grad_weight)."""
        return self._operands(dy, "dy", key, needs, delayed, groups)

    def quantize_swiglu(
        self,
        name: TensorName,
        x: Tensor,
        dy: Tensor | None,
        key: Tensor | None,
        needs: NeedsOperand,
        delayed: DelayedScale | None = None,
        groups: BlockGroups | None = None,
        row_dots: bool = False,
    ) -> SwiGLUOperands:
        """Quantize what a SwiGLU MLP computes between its GEMMs from x [M, 2I], fused where a kernel exists.

        name "x": operands of swiglu(x) [M, I], the input of the down projection. name "dy": operands of the gradient
        [M, 2I] of x, given the gradient dy [M, I] of swiglu(x). row_dots: whether `row_dots_ref(dy, x)` is wanted too.
        """
        rows, columns = self.formats_of(name, needs)
        one_format = _differ_in_granularity_only(rows, columns)
        if not (one_format and supports_swiglu_dual(rows.fmt, rows.granularity, columns.granularity)):
            t, dots = activation_dots(x, dy, row_dots)
            return SwiGLUOperands(self._operands(t, name, key, needs, delayed, groups), dots)
        codes, scale, codes_t, scale_t, dots = quantize_swiglu(
            x, dy, rows.fmt, rows.granularity, columns.granularity, *self.rounding(name, key), self.power_of_two,
            *(groups or NO_GROUPS), row_dots,
        )  # fmt: skip
        operands = Operands(QuantizedTensor(codes, scale, rows), QuantizedTensor(codes_t, scale_t, columns))
        return SwiGLUOperands(operands, dots)

    def rowwise_swiglu(
        self, name: TensorName, key: Tensor | None = None, needs: NeedsOperand = BOTH
    ) -> RowwiseQuantization | None:
        """How `quantize_swiglu` quantizes the tensor `name`, if both of its operands have one scale per row.

        A pair of such tensors takes fewer passes in another order (`swiglu_mlp.py`).
        """
        rows, columns = self.formats_of(name, needs)
        if rows is None or rows != columns or not supports_swiglu_rowwise(rows.fmt, rows.granularity):
            return None
        return RowwiseQuantization(rows.fmt, self.power_of_two, self.rounding(name, key))

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """The product of a GEMM in `dtype`; (a, b) are (x, w), (dy, w) or (dy, x). bias [N] is added to `output`."""
        return multiply(gemm, a, b, dtype, bias, fast_accum=applies(self.fast_accum, gemm))

    def multiply_grouped(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, groups: RowGroups) -> Tensor:
        """`multiply` of each group of rows of x and dy, with the matrix of its own in w [groups * N, K] or dw."""
        return multiply_grouped(gemm, a, b, dtype, groups, fast_accum=applies(self.fast_accum, gemm))

    def rounding(self, name: TensorName, key: Tensor | None) -> Rounding:
        """How the tensor `name` is rounded under `key`."""
        rows, columns = (applies(self.stochastic_rounding, gemm) for gemm, _ in READERS[name])
        if key is None or not (rows or columns):
            return NEAREST
        return Rounding(key, ROUNDED_TENSORS.index(name), rows, columns)

    def rounds_stochastically(self, name: TensorName) -> bool:
        """Whether an operand of the tensor `name` is."""
        return any(applies(self.stochastic_rounding, gemm) for gemm, _ in READERS[name])

    def rounds_both_alike(self, name: TensorName) -> bool:
        """Whether both operands of the tensor `name` are rounded in the same way."""
        rows, columns = (applies(self.stochastic_rounding, gemm) for gemm, _ in READERS[name])
        return rows == columns

    # ---- quantizing a tensor for both of its GEMMs -------------------------------------------------------------------

    def formats_of(
        self, name: TensorName, needs: NeedsOperand = BOTH
    ) -> tuple[OperandFormat | None, OperandFormat | None]:
        """The formats of the tensor `name` along its rows and columns; None: high precision, or not needed."""
        (row_gemm, i), (column_gemm, j) = READERS[name]
        rows, columns = self.operand_formats(row_gemm)[i], self.operand_formats(column_gemm)[j]
        return (rows if needs.rows else None), (columns if needs.columns else None)

    def _operands(
        self,
        t: Tensor | GatheredRows,
        name: TensorName,
        key: Tensor | None,
        needs: NeedsOperand = BOTH,
        delayed: DelayedScale | None = None,
        groups: BlockGroups | None = None,
        former: Former | None = None,
    ) -> Operands:
        """The operands of the tensor `name`; t itself for a GEMM in high precision, or one that does not run."""
        rows, columns = self.formats_of(name, needs)
        rounding = self.rounding(name, key)
        if rows and columns and columns.sum_dim == 1:
            return Operands(*quantize_dual_layout(t, rows, columns, rounding, self.power_of_two, groups, former))
        t = in_memory(t)
        if columns and columns.sum_dim == 0:  # reads the row codes
            codes = quantize_rows(t, rows or columns, rounding, self.power_of_two)
            return Operands(codes, codes.summed_over_rows())
        return Operands(
            quantize_rows(t, rows, rounding, self.power_of_two) if rows else t,
            quantize_columns(t, columns, rounding, self.power_of_two, groups) if columns else t,
        )

    @staticmethod
    def _kept_bytes(rows: OperandFormat | None, columns: OperandFormat | None) -> float:
        shared = columns is not None and columns.sum_dim == 0
        return sum(fmt.bytes_per_element for fmt in (rows, None if shared else columns) if fmt)


def _differ_in_granularity_only(rows: OperandFormat | None, columns: OperandFormat | None) -> bool:
    """Whether both operands are low-bit, and in codes and scales of one format."""
    return rows is not None and columns is not None and columns._replace(granularity=rows.granularity) == rows


def applies(option: bool | tuple[Gemm, ...], gemm: Gemm) -> bool:
    """Whether an option that is true, false or a list of GEMMs holds for this one."""
    return option if isinstance(option, bool) else gemm in option


SCHEMES: Registry[Scheme] = Registry("scheme")
