"""Weights stored in low bits: no copy in high precision, updated with stochastic rounding.

`tensors/stored_weight.py` defines the weight; this file how a linear multiplies with it.

With `activations` none, products run in the model's dtype over the weight dequantized on the fly. With int8, all three
GEMMs are those of the scheme `int8`. `output` reads an INT8 weight's codes as they are stored. `grad_input` cannot: a
row's scale lies along its sum. Folding that scale into dy would keep the codes exact, at one more pass over dy per
micro-batch; instead the transposed weight is requantized, one scale per column of w, once per optimizer step, which
adds a rounding error no larger than dy's own and one byte per element.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from qtrain.kernels.numerics.formats import FORMATS
from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import HIGH_PRECISION, Gemm
from qtrain.tensors.quantized_tensor import OperandFormat
from qtrain.tensors.stored_weight import STORED_FORMATS


class StoredWeightScheme(LowBitScheme):
    """What the schemes of stored weights share; `stored_format` tells them apart."""

    activations: str
    """The arithmetic of products: "none", or a name of INT8's or FP8's."""
    stored_format: str

    def __post_init__(self) -> None:
        # Follows from an option, and is none itself.
        object.__setattr__(self, "stochastic_rounding", self.activations == "int8_sr")

    def gemm_dtypes(self) -> dict[Gemm, str]:
        low_bit = "fp8" if "fp8" in self.activations else "int8"
        return dict.fromkeys(get_args(Gemm), "bf16" if self.activations == "none" else low_bit)

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        fmt = OperandFormat("e4m3" if self.gemm_dtypes()[gemm] == "fp8" else "int8", "rowwise")
        return fmt, fmt

    def operand_formats(self, gemm: Gemm) -> tuple[OperandFormat | None, OperandFormat | None]:
        if self.activations != "none":
            return self.low_bit_formats(gemm)
        if gemm == "grad_weight":
            return HIGH_PRECISION
        # x or dy in high precision; the stored codes are dequantized, along either dimension.
        return None, self.stored_operand(gemm)

    def stored_operand(self, gemm: Gemm) -> OperandFormat:
        """The stored codes, as `output` or `grad_input` sums over them."""
        return STORED_FORMATS[self.stored_format]._replace(sum_dim=1 if gemm == "output" else 0)

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        packing = FORMATS[STORED_FORMATS[self.stored_format].fmt].packing
        if in_features % packing:
            return (
                f"{self.stored_format} codes are stored {packing} per byte, which needs in-features in multiples of "
                f"{packing}"
            )
        return None if self.activations == "none" else super().refusal(in_features, out_features, device)


@SCHEMES.register("int8_weight")
@dataclass(frozen=True)
class Int8Weight(StoredWeightScheme):
    """weights stored in INT8 with a scale per row, updated with stochastic rounding; activations none, int8, int8_sr"""

    activations: Literal["none", "int8", "int8_sr"] = "none"

    stored_format = "int8"
