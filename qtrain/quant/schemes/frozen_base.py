"""The frozen base of LoRA in low bits: weights that are read and never trained (QLoRA).

nf4 is 4.5 bits per weight, dequantized where a product reads it, or, with --quantize, quantized to the 8 bits that this
multiplies in (`kernels/quantize/nf4_to_8bit.py`). int8 and fp8 are read by 8-bit tensor cores in both
GEMMs that a frozen linear has, `output` and `grad_input`; each reads codes of its own, 2 bytes per weight.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from qtrain.core.errors import UserError
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.schemes.int8_weight import Int8Weight, StoredWeightScheme
from qtrain.quant.tensor_roles import HIGH_PRECISION, Gemm
from qtrain.tensors.quantized_tensor import OperandFormat


@dataclass(frozen=True)
class Nf4Base(StoredWeightScheme):
    """NF4 codes; products in the model's dtype, or in 8 bits, whose codes of the weight each product makes itself."""

    activations: Literal["none", "int8", "fp8_rowwise", "fp8_tensorwise"] = "none"
    """The scheme of a product's other operand."""

    stored_format = "nf4"
    name = "frozen nf4"

    def for_experts(self) -> "Nf4Base":
        return replace(self, activations="none")  # the columns of each expert's weight would need scales of their own

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


BASES: dict[str, type[LowBitScheme]] = {"fp8": Fp8Base, "int8": Int8Base, "nf4": Nf4Base}
"""What `base` of --lora may be."""


def base_scheme(name: str, quantize: str) -> LowBitScheme:
    """The scheme of a frozen base. quantize: --quantize, in which an NF4 base may multiply. UserError for another."""
    if quantize == "bf16":
        return BASES[name]()
    in_8_bits = get_args(Nf4Base.__dataclass_fields__["activations"].type)[1:]
    if name == "nf4" and quantize in in_8_bits:
        return Nf4Base(activations=quantize)
    if name == "nf4":
        raise UserError(
            f"--quantize: {quantize!r} does not multiply an NF4 base; allowed: bf16, {', '.join(in_8_bits)}."
        )
    raise UserError(
        f'--quantize: {quantize!r} and --lora\'s "base": {name!r} both say how linears multiply; leave one out.'
    )
