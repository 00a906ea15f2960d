"""Dynamic rowwise INT8 mixed precision.

Every operand gets one scale a row as its GEMM reads it: a token's scale for x and dy in `output` and `grad_input`, a
channel's for both operands of `grad_weight`, so scales always leave the sum and are applied once to the int32 total.
Each GEMM can be left in the weights' dtype, as AQT allows (github.com/google/aqt).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.kernels.int8_mm import scaled_int8_mm
from qtrain.kernels.philox import ROLES
from qtrain.kernels.quantize_int8 import quantize_int8_dual, quantize_int8_rowwise
from qtrain.quant.scheme import SCHEMES, Gemm, LowBitScheme, Operand

Arithmetic = Literal["int8", "bf16"]


@SCHEMES.register("int8")
@dataclass(frozen=True)
class Int8(LowBitScheme):
    """dynamic rowwise INT8 mixed precision; each of the three GEMMs int8 or bf16, nearest or stochastic rounding"""

    output: Arithmetic = "int8"
    grad_input: Arithmetic = "int8"
    grad_weight: Arithmetic = "int8"
    stochastic_rounding: bool = False

    def gemm_dtypes(self) -> dict[Gemm, str]:
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    def code_bytes(self) -> float:
        return (self.output == "int8") + (self.grad_input == "int8")

    def kept_input_bytes(self, element: int) -> float:
        return 1 if self.grad_weight == "int8" else element

    def weight_operands(self, w: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        return _quantize(w, "w", key, self.output == "int8", self.grad_input == "int8", otherwise=())

    def input_operands(self, x: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        return _quantize(x, "x", key, self.output == "int8", self.grad_weight == "int8", otherwise=(x,))

    def grad_operands(self, dy: Tensor, key: Tensor | None) -> tuple[Operand, Operand]:
        return _quantize(dy, "dy", key, self.grad_input == "int8", self.grad_weight == "int8", otherwise=(dy,))

    def multiply(self, gemm: Gemm, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        if len(a) == 2:  # codes and scale, K-major both
            (a_codes, a_scale), (b_codes, b_scale) = a, b
            return scaled_int8_mm(a_codes, b_codes, a_scale, b_scale, dtype)
        if gemm == "output":
            return a[0] @ b[0].t()
        return a[0] @ b[0] if gemm == "grad_input" else a[0].t() @ b[0]


def _quantize(
    x: Tensor, name: str, key: Tensor | None, rows: bool, columns: bool, otherwise: Operand
) -> tuple[Operand, Operand]:
    """x [M, K] -> its rows' operand (codes [M, K], scale [M]) and its columns' (codes [K, M], scale [K]).

    One that no INT8 GEMM reads is `otherwise`.
    """
    row_role, column_role = ROLES.index(f"{name} rows"), ROLES.index(f"{name} columns")
    if rows and columns:
        codes, scale, codes_t, scale_t = quantize_int8_dual(x, key, row_role, column_role)
        return (codes, scale), (codes_t, scale_t)
    if rows:
        return quantize_int8_rowwise(x, key, row_role), otherwise
    if columns:
        return otherwise, quantize_int8_dual(x, key, row_role, column_role)[2:]
    return otherwise, otherwise
