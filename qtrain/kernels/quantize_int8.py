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
    x = x.float()
    scale = (x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])) / INT8_MAX
    scale = scale.clamp(min=SCALE_EPS)
    scaled = x * scale.reciprocal()[:, None]
    rounded = scaled.round_() if noise is None else scaled.add_(noise).floor_()
    return rounded.nan_to_num_(nan=0.0).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def quantize_int8_dual_ref(
    x: Tensor, noise: Tensor | None = None, noise_t: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> codes [M, K], scale [M] of its rows, and codes [K, M], scale [K] of its columns, transposed."""
    return *quantize_int8_rowwise_ref(x, noise), *quantize_int8_rowwise_ref(x.t().contiguous(), noise_t)


def dequantize_int8_rowwise_ref(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes int8 [M, K], scale fp32 [M] -> values [M, K]."""
    return (codes.float() * scale[:, None]).to(dtype)


def rounding_noise(x: Tensor, seed: Tensor, step: Tensor, tensor_id: int) -> Tensor:
    """The noise that rounds x stochastically: uniform fp32 in (0, 1) of x's shape, keyed on (seed, step, tensor)."""
    return uniform_ref(x.shape, seed, step, tensor_id)
