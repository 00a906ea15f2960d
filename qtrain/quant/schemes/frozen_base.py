"""The frozen base of LoRA in low bits: weights that are read and never trained (QLoRA).

nf4 is 4.5 bits per weight, dequantized where a product reads it. int8 and fp8 are read by 8-bit tensor cores in both
GEMMs that a frozen linear has, `output` and `grad_input`; each reads codes of its own, 2 bytes per weight.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.core.errors import UserError
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.schemes.int8_weight import Int8Weight, StoredWeightScheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat


@dataclass(frozen=True)
class Nf4Base(StoredWeightScheme):
    """NF4 codes, products in the model's dtype."""

    activations: Literal["none"] = "none"

    stored_format = "nf4"
    name = "frozen nf4"


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

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": "fp8", "grad_input": "fp8", "grad_weight": "fp8"}

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        return OperandFormat("e4m3", "rowwise"), OperandFormat("e4m3", "rowwise")


BASES: dict[str, type[LowBitScheme]] = {"fp8": Fp8Base, "int8": Int8Base, "nf4": Nf4Base}
"""What `base` of --lora may be."""


def base_scheme(name: str, quantize: str) -> LowBitScheme:
    """The scheme of a frozen base. UserError if --quantize (`quantize`) names another scheme."""
    if quantize != "bf16":
        raise UserError(
            f'--quantize: {quantize!r} and --lora\'s "base": {name!r} both say how linears multiply; leave one out.'
        )
    return BASES[name]()
