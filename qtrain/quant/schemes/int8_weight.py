"""Weights that live in low bits: no copy in high precision, updated with stochastic rounding.

What they are is in `tensors/stored_weight.py`; here is how a linear multiplies with them.

With `activations` none, products run in the model's dtype over the dequantized weight, made when it is read and thrown
away. With int8, all three GEMMs are those of the scheme `int8`. For `output` an INT8 weight's codes are the operand as
they are. For `grad_input` they are not: there the scale of a row of w lies along the sum. Folding it into dy would keep
the codes exact and cost another pass over dy in every micro-batch; instead the transposed weight is quantized anew, one
scale a column of w, once an optimizer step, which adds a rounding no larger than dy's own and a byte an element.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.kernels.quantize.operators import dequantize, quantize_dual, quantize_transposed
from qtrain.quant.dynamic import DynamicScheme, Read, plain_product
from qtrain.quant.scheme import SCHEMES, Gemm, Operand
from qtrain.tensors.stored_weight import GRANULARITY, StoredWeight, read_again

_ROWWISE = Read("int8", "rowwise")


class StoredWeightScheme(DynamicScheme):
    """What the schemes of stored weights share; `stored_format` tells them apart."""

    activations: Literal["none", "int8", "int8_sr"]
    stored_format: str

    @property
    def stochastic_rounding(self) -> bool:
        return self.activations == "int8_sr"

    def gemm_dtypes(self) -> dict[Gemm, str]:
        arithmetic = "bf16" if self.activations == "none" else "int8"
        return {"output": arithmetic, "grad_input": arithmetic, "grad_weight": arithmetic}

    def reads(self, gemm: Gemm) -> tuple[Read, Read] | None:
        return None if self.activations == "none" else (_ROWWISE, _ROWWISE)

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        return None if self.activations == "none" else super().refusal(in_features, out_features, device)

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        assert isinstance(w, StoredWeight)
        if self.activations == "none":
            return (w.codes, w.scale), (w.codes, w.scale)
        codes, scale, codes_t, scale_t = quantize_dual(w.dequantize(), "int8", "rowwise", "rowwise")
        return (codes, scale), (codes_t, scale_t)

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if self.activations != "none" or gemm == "grad_weight":
            return super().multiply(gemm, a, b, dtype, bias)
        columns = a[0].shape[1] if gemm == "output" else self._columns(b[0])
        if gemm == "grad_input":
            again = 0 if self.stored_format == "int4" else 1  # INT4 codes are unpacked before a scale is read
            b = (*b[:again], read_again(b[again], a[0]), *b[again + 1 :])
        return plain_product(gemm, a[0], self._value(b, columns, dtype), bias)

    def _columns(self, codes: Tensor) -> int:
        """In-features of a weight with these codes."""
        return codes.shape[1]

    def _value(self, weight: Operand, columns: int, dtype: torch.dtype) -> Tensor:
        codes, scale = weight
        shape = (codes.shape[0], columns)
        return dequantize(codes, scale, self.stored_format, GRANULARITY[self.stored_format], shape, dtype)


@SCHEMES.register("int8_weight")
@dataclass(frozen=True)
class Int8Weight(StoredWeightScheme):
    """weights stored in INT8 with a scale a row, updated with stochastic rounding; activations none, int8 or int8_sr"""

    activations: Literal["none", "int8", "int8_sr"] = "none"

    stored_format = "int8"

    def code_bytes(self) -> float:
        return 0 if self.activations == "none" else 1

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        assert isinstance(w, StoredWeight)
        if self.activations == "none":
            return super().weight_operands(w, key)
        return (w.codes, w.scale), quantize_transposed(w.dequantize(), "int8", "rowwise")
