"""The base of an adapted model in low bits: weights that are read and never trained (QLoRA).

nf4 is 4.5 bits a weight, dequantized where a product reads it. int8 and fp8 are read by 8-bit tensor cores in both
products that a frozen linear has, `output` and `grad_input`; each has codes of its own there, 2 bytes a weight.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.errors import UserError
from qtrain.kernels.quantize.nf4 import dequantize_nf4, nf4_table
from qtrain.kernels.quantize.operators import quantize_transposed
from qtrain.quant.dynamic import Read, fp8_refusal
from qtrain.quant.scheme import Gemm, LowBitScheme, Operand
from qtrain.quant.schemes.int8_weight import Int8Weight, StoredWeightScheme
from qtrain.tensors.stored_weight import StoredWeight


@dataclass(frozen=True)
class Nf4Base(StoredWeightScheme):
    """NF4 codes, products in the model's dtype."""

    activations: Literal["none"] = "none"

    stored_format = "nf4"
    name = "frozen nf4"

    def code_bytes(self) -> float:
        return 0

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        assert isinstance(w, StoredWeight)
        operand = (w.codes, w.scale, nf4_table(w.device))
        return operand, operand

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        return "two codes share a byte, which takes an even number of in-features" if in_features % 2 else None

    def _columns(self, codes: Tensor) -> int:
        return 2 * codes.shape[1]

    def _value(self, weight: Operand, columns: int, dtype: torch.dtype) -> Tensor:
        return dequantize_nf4(*weight, columns, dtype)


@dataclass(frozen=True)
class Int8Base(Int8Weight):
    """INT8 codes with a scale a row, INT8 products."""

    activations: Literal["int8"] = "int8"

    name = "frozen int8"


@dataclass(frozen=True)
class Fp8Base(StoredWeightScheme):
    """e4m3 codes with a scale a row, FP8 products."""

    activations: Literal["fp8"] = "fp8"

    stored_format = "e4m3"
    name = "frozen fp8"

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": "fp8", "grad_input": "fp8", "grad_weight": "fp8"}

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        return Read("e4m3", "rowwise"), Read("e4m3", "rowwise")

    def code_bytes(self) -> float:
        return 1

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        assert isinstance(w, StoredWeight)
        return (w.codes, w.scale), quantize_transposed(w.dequantize(), "e4m3", "rowwise")

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        return fp8_refusal(device) or super().refusal(in_features, out_features, device)


BASES: dict[str, type[LowBitScheme]] = {"fp8": Fp8Base, "int8": Int8Base, "nf4": Nf4Base}
"""What `base` of --lora may be."""


def base_scheme(name: str, quantize: str) -> LowBitScheme:
    """The scheme of a frozen base. UserError beside another scheme (`quantize`, what --quantize says)."""
    if quantize != "bf16":
        raise UserError(
            f'--quantize: {quantize!r} and --lora\'s "base": {name!r} both say how linears multiply; leave one out.'
        )
    return BASES[name]()
