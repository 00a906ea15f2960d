"""The frozen base of LoRA in low bits: weights that are read and never trained (QLoRA), rounded here or, of a
checkpoint in codes, as its files have them.

nf4 is 4.5 bits per weight, dequantized where a product reads it, or, with --quantize, quantized to the 8 bits that this
multiplies in (`kernels/quantize/nf4_to_8bit.py`). int8 and fp8 are read by 8-bit tensor cores in both
GEMMs that a frozen linear has, `output` and `grad_input`; each reads codes of its own, 2 bytes per weight. FP8 blocks
of 128x128 are read by both, 1 byte: `grad_input` transposes them. int4 and ternary codes are dequantized as nf4 is.
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from qtrain.core.errors import UserError
from qtrain.quant.scheme import LowBitScheme, Scheme
from qtrain.quant.schemes.int8_weight import Int8Weight, StoredWeightScheme
from qtrain.quant.tensor_roles import HIGH_PRECISION, Gemm
from qtrain.tensors.quantized_tensor import OperandFormat
from qtrain.tensors.stored_weight import STORED_FORMATS


@dataclass(frozen=True)
class Nf4Base(StoredWeightScheme):
    """NF4 codes; products in the model's dtype, or in 8 bits, whose codes of the weight each product makes itself."""

    activations: Literal["none", "int8", "fp8_rowwise", "fp8_tensorwise"] = "none"
    """The scheme of a product's other operand."""

    stored_format = "nf4"
    name = "frozen nf4"

    def for_experts(self) -> Self:
        return self.derived(activations="none")  # the columns of each expert's weight would need scales of their own

    def operand_formats(self, gemm: Gemm) -> tuple[OperandFormat | None, OperandFormat | None]:
        if self.activations == "none":
            return super().operand_formats(gemm)
        if gemm == "grad_weight":  # of a frozen weight there is none
            return HIGH_PRECISION
        granularity = "tensorwise" if self.activations == "fp8_tensorwise" else "rowwise"
        return self.low_bit_formats(gemm)[0]._replace(granularity=granularity), self.stored_operand(gemm)


@dataclass(frozen=True)
class Int8Base(Int8Weight):
    """INT8 codes with one scale per row, INT8 products."""

    activations: Literal["int8"] = "int8"

    name = "frozen int8"


@dataclass(frozen=True)
class Fp8Base(StoredWeightScheme):
    """e4m3 codes with one scale per row, FP8 products."""

    activations: Literal["fp8"] = "fp8"

    stored_format = "e4m3"
    name = "frozen fp8"


@dataclass(frozen=True)
class Fp8BlockBase(StoredWeightScheme):
    """e4m3 codes with one scale per 128x128, FP8 products with a scale per 1x128 of x and dy (DeepSeek-V3)."""

    activations: Literal["fp8"] = "fp8"

    stored_format = "e4m3_blocks"
    name = "frozen fp8_block"
    one_weight_layout = True

    def for_experts(self) -> Self:
        return self.derived(one_weight_layout=False)  # products of groups read both layouts

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        row_blocks = OperandFormat("e4m3", "1x128")
        return row_blocks, row_blocks if gemm == "grad_weight" else STORED_FORMATS[self.stored_format]


@dataclass(frozen=True)
class Int4Base(StoredWeightScheme):
    """INT4 codes with one scale per 128 elements of a row; products in the model's dtype."""

    activations: Literal["none"] = "none"

    stored_format = "int4"
    name = "frozen int4_g128"


@dataclass(frozen=True)
class Int4G32Base(Int4Base):
    """The same with one scale per 32 elements."""

    stored_format = "int4_g32"
    name = "frozen int4_g32"


@dataclass(frozen=True)
class TernaryBase(StoredWeightScheme):
    """Ternary codes, four a byte, with one scale per row; products in the model's dtype."""

    activations: Literal["none"] = "none"

    stored_format = "ternary"
    name = "frozen ternary"


BASES: dict[str, type[LowBitScheme]] = {"fp8": Fp8Base, "int8": Int8Base, "nf4": Nf4Base}
"""What `base` of --lora may be."""

_IN_8_BITS = get_args(Nf4Base.__dataclass_fields__["activations"].type)[1:]  # all but "none"
"""The choices of --quantize in which an NF4 base multiplies."""

KEEPING = {
    STORED_FORMATS[scheme.stored_format]: scheme
    for scheme in (Fp8Base, Fp8BlockBase, Int8Base, Nf4Base, Int4Base, Int4G32Base, TernaryBase)
}
"""The schemes that keep a checkpoint's codes, by their format."""


def keeping_scheme(fmt: OperandFormat | None, quantize: str) -> LowBitScheme | None:
    """The scheme of a frozen base that keeps a checkpoint's codes, which have the format `fmt` (None: several). None:
    no scheme holds them, or --quantize says how linears multiply."""
    scheme = None if fmt not in KEEPING else KEEPING[fmt]()
    if isinstance(scheme, Nf4Base) and quantize in _IN_8_BITS:
        scheme = scheme.derived(activations=quantize)
    elif quantize != "bf16":
        return None
    return scheme and scheme.derived(keeps_codes=True)


def keeps_codes(scheme: Scheme) -> bool:
    """Whether linears have the codes of --model."""
    return isinstance(scheme.root, LowBitScheme) and scheme.root.keeps_codes


def base_scheme(name: str, quantize: str) -> LowBitScheme:
    """The scheme of a frozen base. quantize: --quantize, in which an NF4 base may multiply. UserError for another."""
    if quantize == "bf16":
        return BASES[name]()
    if name == "nf4" and quantize in _IN_8_BITS:
        return Nf4Base().derived(activations=quantize)
    if name == "nf4":
        raise UserError(
            f"--quantize: {quantize!r} does not multiply an NF4 base; allowed: bf16, {', '.join(_IN_8_BITS)}."
        )
    raise UserError(
        f'--quantize: {quantize!r} and --lora\'s "base": {name!r} both say how linears multiply; leave one out.'
    )
