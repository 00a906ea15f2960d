"""What a scheme declares: the format and granularity in which each of a linear's three GEMMs reads its two operands.

    output       y  [M, N] = x  [M, K] · w [N, K]ᵀ
    grad_input   dx [M, K] = dy [M, N] · w [N, K]
    grad_weight  dw [N, K] = dy [M, N]ᵀ · x [M, K]

Each of x, w and dy is read by two GEMMs, once along its rows and once along its columns. A scheme is one file in
`schemes/`: a frozen dataclass registered in SCHEMES whose fields are the keys of `--quantize_kwargs`. It computes
nothing. `execute.py` quantizes and multiplies by the declaration; the plan and the export ask it in their own rooms.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import Field
from typing import Any, ClassVar, NamedTuple, Self, get_args

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.core.hardware.capabilities import lacks_fp8
from qtrain.core.registry import Registry
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.numerics.philox import NEAREST, ROUNDED_TENSORS, Rounding
from qtrain.quant.tensor_roles import BOTH, HIGH_PRECISION, READERS, FormatPair, Gemm, NeedsOperand, TensorName
from qtrain.tensors.quantized_tensor import OperandFormat


class Scheme(ABC):
    """A choice of `--quantize`, or a map of such choices. One that is not a LowBitScheme swaps nothing itself."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    sub_norm: bool = False
    """Whether the input of every linear is normalized; a native decoder adds the norms that it lacks."""

    keeps_codes: bool = False
    """Whether the stored codes are those of a checkpoint, and never made of a value."""

    leaves_all: bool = False
    """Whether it leaves every linear in high precision."""

    def gemm_dtypes(self) -> dict[Gemm, str]:
        """The arithmetic of each GEMM ('int8', 'fp8', 'bf16'), for the plan and the speed of light."""
        raise AssertionError(f"{type(self).__name__}: asked of the scheme of each linear")

    def parts(self) -> list["Scheme"]:
        """The schemes that a model's linears may run in."""
        return [self]

    def at(self, name: str) -> "Assigned":
        """The scheme of the linear called `name`."""
        return Assigned(self)

    @property
    def root(self) -> "Scheme":
        """The scheme of linears that no rule of a map names."""
        return self

    def for_linear(self, in_features: int, out_features: int, *, head: bool = False) -> Self:
        """The scheme of a linear of this shape; head: of a model's output head."""
        return self

    def for_experts(self) -> Self:
        """The scheme of a linear that holds the matrices of several experts."""
        return self


class Assigned(NamedTuple):
    """The scheme of a linear, as a map has it."""

    scheme: Scheme
    rule: str | None = None
    """Where a rule of the map names the linear: why it is in high precision, if the rule leaves it there."""


class LowBitScheme(Scheme):
    """A scheme that swaps linears, given by `low_bit_formats`. A subclass is a frozen dataclass."""

    output: str
    grad_input: str
    grad_weight: str
    """The arithmetic of each GEMM."""

    stochastic_rounding: bool | tuple[Gemm, ...] = False
    """Whether operands are rounded stochastically; a tuple names the GEMMs whose operands are."""

    rounded_tensors: tuple[TensorName, ...] = ("x", "w", "dy")
    """The tensors that stochastic rounding applies to."""

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

    packed_weight: OperandFormat | None = None
    """The format that a weight is quantized to where its GEMMs read other codes, which are unpacked from these."""

    latent: bool = False
    """Whether `output` multiplies other values than the weight's own, so that an export must compute them."""

    one_weight_layout: bool = False
    """Whether `grad_input` makes the transposed codes of a weight itself, from those that `output` reads
    (`weight_codes.in_one_layout`)."""

    convolves: bool = False
    """Whether x and dy are images whose pixels `grad_weight` sums over too: its scales are tensorwise (`conv2d.py`)."""

    forward_only: bool = False
    """Whether there is no backward pass, and so no operand of a weight for `grad_input` (`swap.quantize_linears`)."""

    def __post_init__(self) -> None:
        """UserError for stochastic rounding of a GEMM in high precision."""
        named = self.stochastic_rounding if isinstance(self.stochastic_rounding, tuple) else ()
        for gemm in named:
            if self.operand_formats(gemm) == HIGH_PRECISION:
                raise UserError(
                    f"--quantize_kwargs.stochastic_rounding: {gemm!r} is not allowed, for {gemm} runs in bf16 and "
                    "rounds nothing; take it out of the list or give that GEMM a low-bit arithmetic."
                )

    @abstractmethod
    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        """What `gemm` reads of its operands (x, w), (dy, w) or (dy, x) where its arithmetic is not bf16."""

    def operand_formats(self, gemm: Gemm) -> FormatPair:
        """What `gemm` reads of its operands; None: the tensor itself, in high precision."""
        return HIGH_PRECISION if self.gemm_dtypes()[gemm] == "bf16" else self.low_bit_formats(gemm)

    def formats_of(self, name: TensorName, needs: NeedsOperand = BOTH) -> FormatPair:
        """The formats of the tensor `name` along its rows and columns; None: high precision, or not needed."""
        # The GEMM that reads the tensor along its rows, the one that reads it along its columns, and as which operand.
        (row_gemm, i), (column_gemm, j) = READERS[name]
        rows, columns = self.operand_formats(row_gemm)[i], self.operand_formats(column_gemm)[j]
        if name == "w" and self.one_weight_layout:
            # `grad_input` sums over N, which is dimension 0 of the codes that `output` reads.
            columns = columns._replace(sum_dim=0)
        if name == "w" and self.forward_only:
            columns = None
        if name != "w" and self.convolves and columns is not None:
            columns = columns._replace(granularity="tensorwise")
        return (rows if needs.rows else None), (columns if needs.columns else None)

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    def for_linear(self, in_features: int, out_features: int, *, head: bool = False) -> Self:
        """An output head rounds stochastically where it has integer codes of dy.

        The gradient of logits is -1 at the label and close to 0 elsewhere. Rounded to nearest, with a step of 1/127 of
        the largest, most of it is lost, which costs 5 to 6% of a small model's loss.
        """
        # grad_input and grad_weight, with the format in which each reads dy.
        read = {gemm: self.operand_formats(gemm)[i] for gemm, i in READERS["dy"]}
        integer = [gemm for gemm, fmt in read.items() if fmt is not None and not FORMATS[fmt.fmt].is_float]
        nearest = [gemm for gemm in integer if not applies(self.stochastic_rounding, gemm)]
        if not (head and nearest):
            return self
        others = [gemm for gemm in get_args(Gemm) if applies(self.stochastic_rounding, gemm)]
        # Of stored weights it is no field, and `activations` has no word for some of the GEMMs.
        return self.derived(stochastic_rounding=(*others, *nearest))

    def derived(self, **attributes: Any) -> Self:
        """A copy with other values of attributes that need not be fields, which `dataclasses.replace` cannot give."""
        changed = copy.copy(self)
        for name, value in attributes.items():
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(changed, name, value)
        return changed

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        """Why a linear of this shape stays in high precision on this device; None if it is swapped. The device meta
        stands for a GPU that is not here, in plans.

        Kernels take any shape, but operands that tensor cores cannot read in place are slower than bf16.
        """
        # Each of N and K is the contiguous dimension of some GEMM's operand, whose rows are read in 16 bytes.
        if device.type != "cpu" and (in_features % 16 or out_features % 16):
            return "8-bit tensor cores take in- and out-features in multiples of 16"
        return lacks_fp8(device) if "fp8" in self.gemm_dtypes().values() else None

    def rounds(self, name: TensorName) -> tuple[bool, bool]:
        """Whether the operands of the tensor `name` along its rows and along its columns are rounded stochastically."""
        rows, columns = (applies(self.stochastic_rounding, gemm) for gemm, _ in READERS[name])
        return (rows, columns) if name in self.rounded_tensors else (False, False)

    def rounding(self, name: TensorName, key: Tensor | None) -> Rounding:
        """How the tensor `name` is rounded under the Philox key int64 [3]; None: to nearest even."""
        rows, columns = self.rounds(name)
        if key is None or not (rows or columns):  # in evaluation there is no key
            return NEAREST
        return Rounding(key, ROUNDED_TENSORS.index(name), rows, columns)


def applies(option: bool | tuple[Gemm, ...], gemm: Gemm) -> bool:
    """Whether an option that is true, false or a list of GEMMs holds for this one."""
    return option if isinstance(option, bool) else gemm in option


SCHEMES: Registry[Scheme] = Registry("scheme", ["qtrain.quant.schemes"])
