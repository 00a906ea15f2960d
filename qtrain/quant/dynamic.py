"""The base of schemes that are a table: the format and granularity in which each GEMM reads its two operands.

Everything else follows from the table. A tensor is quantized where it is at hand, for both of its GEMMs at once
(`quantize_dual` reads it once where the granularity allows), and only for those that will be read. Both operands of a
product arrive K-major, as 8-bit tensor cores want them: what a GEMM reads along a tensor's columns is quantized into
transposed codes. A GEMM that is left in high precision reads the tensor itself.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.errors import UserError
from qtrain.hardware import FP8_CAPABILITY
from qtrain.kernels.gemm.blockwise_mm import BLOCKS, blockwise_mm
from qtrain.kernels.gemm.int4_mm import scaled_int4_mm
from qtrain.kernels.gemm.scaled_mm import scaled_mm
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.numerics.rounding import Rounding
from qtrain.kernels.quantize.operators import quantize, quantize_dual, quantize_transposed
from qtrain.kernels.swiglu.quantize import quantize_swiglu, supports_swiglu_dual, supports_swiglu_rowwise
from qtrain.quant.scheme import Gemm, LowBitScheme, NeedsOperand, Operand, WholeRows


class Read(NamedTuple):
    """How a GEMM reads an operand, seen as the GEMM sees it: along the sum."""

    fmt: str  # of `kernels.formats.FORMATS`
    granularity: str  # of `kernels.formats.GRANULARITIES`
    scale_bytes: int = 4

    @property
    def bytes(self) -> float:
        """Of a code and its share of a block's scale; a scale for a whole row or more is not counted."""
        rows, columns = GRANULARITIES[self.granularity]
        return 1 / FORMATS[self.fmt].packing + (self.scale_bytes / (rows * columns) if rows and columns else 0)


# Who reads a tensor along its rows, who along its columns, and as which of the GEMM's two operands.
_READERS: dict[str, tuple[tuple[Gemm, int], tuple[Gemm, int]]] = {
    "x": (("output", 0), ("grad_weight", 1)),
    "w": (("output", 1), ("grad_input", 1)),
    "dy": (("grad_input", 0), ("grad_weight", 0)),
}


class DynamicScheme(LowBitScheme):
    """A scheme given by `reads`. A subclass is a frozen dataclass; its output, grad_input and grad_weight say the
    arithmetic of each GEMM."""

    output: str
    grad_input: str
    grad_weight: str
    fast_accum: bool | tuple[Gemm, ...] = True

    def __post_init__(self) -> None:
        """UserError for stochastic rounding of a GEMM that rounds nothing."""
        named = self.stochastic_rounding if isinstance(self.stochastic_rounding, tuple) else ()
        for gemm in named:
            if self.reads(gemm) is None:
                raise UserError(
                    f"--quantize_kwargs.stochastic_rounding: {gemm!r} is not allowed, for {gemm} runs in bf16 and "
                    "rounds nothing; take it out of the list or give that GEMM a low-bit arithmetic."
                )

    @abstractmethod
    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        """How `gemm` reads its operands, (x, w), (dy, w) or (dy, x); None where it is left in the weights' dtype."""

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        """Kernels take any shape, but what the tensor cores cannot read in place is slower than bf16."""
        if device.type == "cuda" and (in_features % 16 or out_features % 16):
            return "8-bit tensor cores take in- and out-features in multiples of 16"
        return fp8_refusal(device) if "fp8" in self.gemm_dtypes().values() else None

    def code_bytes(self) -> float:
        return sum(read.bytes for read in self._reads_of("w") if read)

    def kept_input_bytes(self, element: int) -> float:
        read = self._reads_of("x")[1]
        return read.bytes if read else element

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        return self._operands(w, "w", key, (True, True), ())

    def input_operands(
        self, x: Tensor, key: Tensor | None, wanted: NeedsOperand = (True, True), amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        return self._operands(x, "x", key, wanted, (x,), amax)

    def grad_operands(
        self, dy: Tensor, key: Tensor | None, wanted: NeedsOperand = (True, True), amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        return self._operands(dy, "dy", key, wanted, (dy,), amax)

    def gated_operands(
        self, name: str, x: Tensor, dy: Tensor | None, key: Tensor | None, wanted: NeedsOperand, amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        read = self._read_alike(name, wanted)
        if read is None or not supports_swiglu_dual(read.fmt, read.granularity):
            return super().gated_operands(name, x, dy, key, wanted, amax)
        rounding = drawn(*self._keys_of(name, key), ROUNDED_TENSORS.index(name))
        codes, scale, codes_t, scale_t = quantize_swiglu(
            x, dy, read.fmt, read.granularity, *rounding, self.power_of_two
        )
        return (codes, scale), (codes_t, scale_t)

    def whole_rows(self, name: str, key: Tensor | None = None, wanted: NeedsOperand = (True, True)) -> WholeRows | None:
        read = self._read_alike(name, wanted)
        if read is None or not supports_swiglu_rowwise(read.fmt, read.granularity):
            return None
        return WholeRows(read.fmt, self.power_of_two, *self._keys_of(name, key))

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        reads = self.reads(gemm)
        if reads is None:
            return plain_product(gemm, a[0], b[0], bias)
        read_a, read_b = reads
        (a_codes, a_scale), (b_codes, b_scale) = a, b
        if read_a.fmt == "int4":
            y = scaled_int4_mm(a_codes, b_codes, a_scale, b_scale, 2 * a_codes.shape[1], dtype)
            return y if bias is None else y.add_(bias)
        if read_a.granularity in BLOCKS:
            blocks = read_a.granularity, read_b.granularity
            return blockwise_mm(a_codes, b_codes, a_scale, b_scale, *blocks, dtype, bias)
        return scaled_mm(a_codes, b_codes, a_scale, b_scale, dtype, bias, applies(self.fast_accum, gemm))

    def _reads_of(self, name: str, wanted: NeedsOperand = (True, True)) -> tuple[Read | None, Read | None]:
        """How the tensor `name` is read along its rows and along its columns, where it is and that is wanted."""
        (row_gemm, i), (column_gemm, j) = _READERS[name]
        rows, columns = self.reads(row_gemm), self.reads(column_gemm)
        return (rows[i] if rows and wanted[0] else None), (columns[j] if columns and wanted[1] else None)

    def _keys_of(self, name: str, key: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """`key` for the rows and for the columns of the tensor `name`; None for what is rounded to nearest."""
        (row_gemm, _), (column_gemm, _) = _READERS[name]
        rows, columns = applies(self.stochastic_rounding, row_gemm), applies(self.stochastic_rounding, column_gemm)
        return (key if rows else None), (key if columns else None)

    def _read_alike(self, name: str, wanted: NeedsOperand) -> Read | None:
        """How the tensor `name` is read along rows and columns, if that is the same but for the rounding."""
        rows, columns = self._reads_of(name, wanted)
        return rows if rows == columns else None

    def _operands(
        self, t: Tensor, name: str, key: Tensor | None, wanted: NeedsOperand, plain: Operand, amax: Operand = ()
    ) -> tuple[Operand, Operand]:
        """The operands of the tensor `name` along its rows and columns; `plain` for one that no low-bit GEMM wants."""
        rows, columns = self._reads_of(name, wanted)
        row_key, column_key = self._keys_of(name, key)
        role = ROUNDED_TENSORS.index(name)
        if rows and columns:
            return self._quantize_dual(t, rows, columns, row_key, column_key, role)
        return (
            self._quantize(t, rows, row_key, role) if rows else plain,
            self._quantize_transposed(t, columns, column_key, role) if columns else plain,
        )

    def _quantize(self, t: Tensor, read: Read, key: Tensor | None, role: int) -> Operand:
        return quantize(t, read.fmt, read.granularity, key, role, self.power_of_two)

    def _quantize_transposed(self, t: Tensor, read: Read, key: Tensor | None, role: int) -> Operand:
        return quantize_transposed(t, read.fmt, read.granularity, key, role, self.power_of_two)

    def _quantize_dual(
        self, t: Tensor, rows: Read, columns: Read, row_key: Tensor | None, column_key: Tensor | None, role: int
    ) -> tuple[Operand, Operand]:
        codes, scale, codes_t, scale_t = quantize_dual(
            t, rows.fmt, rows.granularity, columns.granularity, *drawn(row_key, column_key, role), self.power_of_two,
            fmt_t=columns.fmt,
        )  # fmt: skip
        return (codes, scale), (codes_t, scale_t)


def applies(option: bool | tuple[Gemm, ...], gemm: Gemm) -> bool:
    """Whether an option that is true, false or a list of GEMMs holds for this one."""
    return option if isinstance(option, bool) else gemm in option


def drawn(row_key: Tensor | None, column_key: Tensor | None, role: int) -> Rounding:
    """The rounding of a tensor whose layouts have these keys."""
    key = column_key if row_key is None else row_key
    return Rounding(key, role, row_key is not None, column_key is not None)


def fp8_refusal(device: torch.device) -> str | None:
    """Why FP8 codes cannot be made or multiplied on this device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no FP8 arithmetic, which takes an Ada, a Hopper or later"
    return None


def plain_product(gemm: Gemm, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """A GEMM on the tensors themselves: (x, w), (dy, w) or (dy, x)."""
    if gemm == "output":
        return F.linear(a, b, bias)
    return a @ b if gemm == "grad_input" else a.t() @ b
