"""GEMM of MX codes (`quantize/mx.py`): FP8 elements with a power-of-two scale per 32 along K.

Blackwell's tensor cores multiply them directly; cuBLAS takes the scales in tiles of 128 rows by 4 groups. Elsewhere the
product is emulated: an FP8 element times a power of two is a bf16 number, so dequantizing is exact, and the product
runs in the output's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.hardware import has_mx
from qtrain.kernels.numerics.dequantize import MX_GROUP, dequantize_mx


def mx_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """A [M, K], B [N, K] FP8, scales float8_e8m0fnu [M or N, ceil(K / 32)] -> [M, N]; bias [N]."""
    values = dequantize_mx(a, scale_a, out_dtype), dequantize_mx(b, scale_b, out_dtype)
    return F.linear(*values, None if bias is None else bias.to(out_dtype))


def tiled_scale(scale: Tensor) -> Tensor:
    """scale [R, G] -> flat, in tiles of 128 rows x 4 groups, rows r, r + 32, r + 64, r + 96 of a tile adjacent.

    Padded with zeros to whole tiles: the layout of cuBLAS's 1D block scaling factors.
    """
    rows, groups = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(3, (-1, 4))  # [row tiles, 4, 32, group tiles, 4]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)


def _mx_mm_cublas(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    recipe, swizzle = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(
        a, b.t(), tiled_scale(scale_a), recipe, tiled_scale(scale_b), recipe, swizzle, swizzle, bias, out_dtype
    )  # fmt: skip


@torch.library.custom_op("qtrain::mx_mm", mutates_args=())
def mx_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """A [M, K] · B [N, K]ᵀ (+ bias [N]) of MX operands -> [M, N] in out_dtype."""
    aligned = a.shape[1] % MX_GROUP == 0 and b.shape[0] % 16 == 0 and a.numel() and b.numel()
    if aligned and out_dtype == torch.bfloat16 and has_mx(a.device):
        return _mx_mm_cublas(a, b, scale_a, scale_b, out_dtype, bias)
    return mx_mm_ref(a, b, scale_a, scale_b, out_dtype, bias)


@mx_mm.register_fake
def _(a, b, scale_a, scale_b, out_dtype, bias=None):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
