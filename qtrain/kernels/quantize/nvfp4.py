"""NVFP4: e2m1 codes, an e4m3 scale per 16 elements along a row, and one fp32 scale per tensor.

    tensor_scale = absmax of the tensor / (6 * 448)
    scale = e4m3(absmax of the group / 6 / tensor_scale), at least e4m3's smallest number
    code  = e2m1(x / (scale * tensor_scale)),   value = code * scale * tensor_scale

Two codes per byte, 4.5 bits per element. A group with a NaN or an Inf has a NaN scale and codes of zero; the tensor
scale is that of the finite values. Rounding is to nearest even, or stochastic.

With `hadamard` each 16 consecutive rows of x are replaced by H · diag(signs) times them, where H is the orthonormal
Hadamard matrix: an outlier is spread over 16 elements of the dimension that `grad_weight` sums over. Both operands of
that product are rotated alike, so the product does not change.

Plain PyTorch on every device: Hopper has no FP4 tensor cores, so products are emulated anyway.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.compiler import operator
from qtrain.kernels.numerics.formats import FORMATS, SCALE_EPS, pack
from qtrain.kernels.numerics.philox import random_bits_ref
from qtrain.kernels.quantize.reference import encode_minifloat

GROUP = 16
E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3"]
SMALLEST_SCALE = 2.0**-9
"""e4m3's smallest number above zero."""

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""A fixed random sign vector for all linears, as in the paper."""


@functools.cache  # a copy from the host would wait for the device
def _rotation(device: torch.device) -> Tensor:
    """H · diag(SIGNS), fp32 [16, 16]."""
    hadamard = torch.ones(1, 1, device=device)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return hadamard * torch.tensor(SIGNS, device=device) / 4  # 1 / sqrt(16): orthonormal


def rotate_rows(x: Tensor) -> Tensor:
    """x [M, K] -> fp32 [M rounded up to 16, K]: H · diag(SIGNS) times each 16 rows."""
    groups = F.pad(x.float(), (0, 0, 0, -x.shape[0] % GROUP)).unflatten(0, (-1, GROUP))
    return (_rotation(x.device) @ groups).flatten(0, 1)


def quantize_nvfp4_ref(x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> codes uint8 [M, ceil(K / 2)], scale e4m3 [M, ceil(K / 16)], tensor_scale fp32 [1].

    bits: 16 random bits per element, int32 [M, K], for stochastic rounding.
    """
    columns = x.shape[1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(1, (-1, GROUP))  # fp32 [M, groups, 16]
    finite = groups.isfinite().all(dim=2)
    groups = torch.where(finite[..., None], groups, 0.0)
    absmax = groups.abs().amax(dim=2)  # [M, groups]
    largest = absmax.amax().view(1) if absmax.numel() else x.new_zeros(1, dtype=torch.float32)
    # Puts the largest group's scale at e4m3's largest number: small groups keep the most of its range.
    tensor_scale = (largest / (E2M1.max * E4M3.max)).clamp(min=SCALE_EPS)
    scale = (absmax / E2M1.max / tensor_scale).clamp(SMALLEST_SCALE, E4M3.max).to(E4M3.dtype)
    # Divided by the scale that is stored, e4m3-rounded, not by the exact one.
    scaled = (groups / (scale.float() * tensor_scale)[..., None]).flatten(1)[:, :columns]
    codes = encode_minifloat(scaled, E2M1, bits)
    scale = torch.where(finite, scale.float(), float("nan")).to(E4M3.dtype)
    return pack(codes.view(torch.int8), "int4"), scale, tensor_scale  # two 4-bit fields a byte, as int4


def _empty_quantize_nvfp4(x, transposed, hadamard):
    m = x.shape[0] + -x.shape[0] % GROUP if hadamard else x.shape[0]
    rows, columns = (x.shape[1], m) if transposed else (m, x.shape[1])
    codes = x.new_empty(rows, -(-columns // 2), dtype=torch.uint8)
    scale = x.new_empty(rows, -(-columns // GROUP), dtype=E4M3.dtype)
    return codes, scale, x.new_empty(1, dtype=torch.float32)


@operator("quantize_nvfp4", fake=_empty_quantize_nvfp4)
def quantize_nvfp4(
    x: Tensor, key: Tensor | None = None, role: int = 0, transposed: bool = False, hadamard: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_nvfp4_ref` of x [M, K], or of its transpose; hadamard: of x with its rows rotated by `rotate_rows`.

    key, role: stochastic rounding (`random_bits_ref`), whose bits belong to the elements of x; None: nearest even.
    """
    if hadamard:
        x = rotate_rows(x)  # fp32, M rounded up to 16: rows of zeros add nothing to the product
    bits = None if key is None else random_bits_ref(x.shape, key, role)
    if transposed:
        x, bits = x.t(), None if bits is None else bits.t()
    return quantize_nvfp4_ref(x, bits)
