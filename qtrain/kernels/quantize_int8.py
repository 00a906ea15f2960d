"""INT8 quantization, one scale a row.

Symmetric codes in [-127, 127], value = code * scale, scale = absmax / 127 kept in fp32. The code is made with the
reciprocal of the very scale that is stored. Rounding is to nearest even, or stochastic: floor(x / scale + u) with u
uniform in (0, 1), which is right on average. A row of zeros gets the eps scale and codes of zero. A row that holds a
NaN or an Inf gets that scale and codes of zero, so that the row of the product is NaN: bad values are never hidden.

A linear's operand is read by two GEMMs, once along its rows and once along its columns, and 8-bit tensor cores take
both operands K-major only. `quantize_int8_dual` serves both: row codes as they stand, column codes transposed.
"""

import torch
from torch import Tensor

from qtrain.kernels.philox import uniform_ref

INT8_MAX = 127
SCALE_EPS = 1e-12


def quantize_int8_rowwise_ref(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes int8 [M, K], scale fp32 [M]. With `noise` [M, K] in (0, 1): stochastic rounding."""
    scale = _scale(x, dim=1)
    return _codes(x.float() * scale.reciprocal()[:, None], noise), scale


def quantize_int8_columnwise_ref(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> transposed codes int8 [K, M], scale fp32 [K] of its columns; `noise` is [M, K], as x."""
    scale = _scale(x, dim=0)
    return _codes(x.float() * scale.reciprocal(), noise).t().contiguous(), scale


def _scale(x: Tensor, dim: int) -> Tensor:
    if not x.shape[dim]:
        return x.new_full((x.shape[1 - dim],), SCALE_EPS, dtype=torch.float32)
    absmax = torch.linalg.vector_norm(x, ord=torch.inf, dim=dim)  # one read, no copy of |x|; NaN comes through
    return (absmax.float() / INT8_MAX).clamp(min=SCALE_EPS)


def _codes(scaled: Tensor, noise: Tensor | None) -> Tensor:
    """Round x / scale, fp32, in place; a bad value's code is 0, for its scale is bad already."""
    rounded = scaled.round_() if noise is None else scaled.add_(noise).floor_()
    return rounded.nan_to_num_(nan=0.0).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def dequantize_int8_rowwise_ref(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes int8 [M, K], scale fp32 [M] -> values [M, K]."""
    return (codes.float() * scale[:, None]).to(dtype)


def rounding_noise(x: Tensor, seed: Tensor, step: Tensor, tensor_id: int) -> Tensor:
    """The noise that rounds x stochastically: uniform fp32 in (0, 1) of x's shape, keyed on (seed, step, tensor)."""
    return uniform_ref(x.shape, seed, step, tensor_id)
