"""OCP microscaling (MX): FP8 elements, and one power-of-two scale of one byte (e8m0) per 32 of them along K.

The scale's exponent is that of the absmax minus that of the element format's largest number, so values near the top may
saturate: the rule of the specification (OCP Microscaling Formats v1.0, 6.3). A group with a NaN or an Inf has the NaN
scale (0xFF) and codes of zero.

The GEMM: Blackwell's tensor cores multiply MX codes directly; cuBLAS takes the scales in tiles of 128 rows by 4 groups.
Elsewhere the product is emulated: an FP8 element times a power of two is a bf16 number, so dequantizing is exact, and
the product runs in the output's dtype.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.hardware.capabilities import has_mx
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.encode import abs_bits, encode, encoding, zero_nonfinite
from qtrain.kernels.numerics.formats import FORMATS, MX_GROUP, dequantize_mx

LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}
"""Exponent of the format's largest number."""
GROUPS_PER_CTA = 128


def quantize_mx_ref(x: Tensor, elem: str) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] in `elem`, scale float8_e8m0fnu [M, ceil(K / 32)]."""
    m, k = x.shape
    fmt = FORMATS[elem]
    groups = F.pad(x.float(), (0, -k % MX_GROUP)).view(m, -(-k // MX_GROUP), MX_GROUP)
    absmax = torch.linalg.vector_norm(groups, ord=torch.inf, dim=2)  # fp32 [M, groups]
    exponent = ((absmax.view(torch.int32) >> 23) - LARGEST_EXPONENT[elem]).clamp(min=0)  # biased by 127; 0: 2**-127
    nonfinite = ~absmax.isfinite()
    inv_scale = ((254 - exponent) << 23).view(torch.float32).masked_fill(nonfinite, 0.0)
    scaled = groups.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * inv_scale[..., None]
    codes = scaled.clamp(-fmt.max, fmt.max).flatten(1)[:, :k].to(fmt.dtype)
    return codes.contiguous(), exponent.masked_fill(nonfinite, 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)


@triton.jit(do_not_specialize=["groups", "per_row"])
def _mx_kernel(
    # fp32 or bf16 [m, k]; int8 bits of FP8 [m, k]; uint8 bits of e8m0 [m, ceil(k / 32)].
    x_ptr, codes_ptr, scale_ptr, groups, per_row, k,
    CODE: tl.constexpr, EXPONENT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of 32 elements, `per_row` to a row. EXPONENT: of the format's largest number."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, column = (group // per_row).to(tl.int64)[:, None], (group % per_row * 32)[:, None] + tl.arange(0, 32)[None, :]
    inside = (group < groups)[:, None] & (column < k)
    x = tl.load(x_ptr + row * k + column, inside, 0.0)
    amax = tl.max(abs_bits(x), 1)
    nonfinite = tl.max(amax, 0) >= 0x7F800000
    # The biased exponent of fp32 is that of e8m0: both have a bias of 127.
    exponent = tl.maximum((amax >> 23) - EXPONENT, 0)
    # 2**-exponent by its bits: biased by 127, 254 - exponent. The scale of a NaN or an Inf is 0xFF, its inverse 0.
    inv_scale = tl.where(amax < 0x7F800000, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)
    codes = encode(zero_nonfinite(x, nonfinite), inv_scale[:, None], 0, False, False, CODE)
    tl.store(codes_ptr + row * k + column, codes, inside)
    tl.store(scale_ptr + group, tl.where(amax < 0x7F800000, exponent, 0xFF).to(tl.uint8), group < groups)


def launch_quantize_mx(x: Tensor, elem: str) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_mx_ref`. x contiguous, not empty."""
    (m, k), groups = x.shape, GROUPS_PER_CTA
    codes = torch.empty(m, k, dtype=FORMATS[elem].dtype, device=x.device)
    scale = torch.empty(m, triton.cdiv(k, MX_GROUP), dtype=torch.uint8, device=x.device)
    _mx_kernel[(triton.cdiv(scale.numel(), groups),)](
        x, codes.view(torch.int8), scale, groups=scale.numel(), per_row=scale.shape[1], k=k,
        CODE=encoding(elem, x.device), EXPONENT=LARGEST_EXPONENT[elem], GROUPS=groups,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale.view(torch.float8_e8m0fnu)


def _empty_quantize_mx(x, elem):
    scale = x.new_empty(x.shape[0], -(-x.shape[1] // MX_GROUP), dtype=torch.float8_e8m0fnu)
    return x.new_empty(x.shape, dtype=FORMATS[elem].dtype), scale


@operator("quantize_mx", fake=_empty_quantize_mx)
def quantize_mx(x: Tensor, elem: str = "e4m3") -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes [M, K] in `elem` ("e4m3", "e5m2"), scale float8_e8m0fnu [M, ceil(K / 32)]."""
    if x.is_cuda and x.numel():
        return launch_quantize_mx(x.contiguous(), elem)
    return quantize_mx_ref(x, elem)


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
    padded = F.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))  # [128 * row tiles, 4 * group tiles]
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


@operator("mx_mm", fake=lambda a, b, out_dtype: a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype))
def mx_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """A [M, K] · B [N, K]ᵀ (+ bias [N]) of MX operands -> [M, N] in out_dtype."""
    aligned = a.shape[1] % MX_GROUP == 0 and b.shape[0] % 16 == 0 and a.numel() and b.numel()
    if aligned and out_dtype == torch.bfloat16 and has_mx(a.device):
        return _mx_mm_cublas(a, b, scale_a, scale_b, out_dtype, bias)
    return mx_mm_ref(a, b, scale_a, scale_b, out_dtype, bias)
