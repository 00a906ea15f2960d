"""OCP microscaling (MX): FP8 elements, each 32 along K with a power-of-two scale of one byte (e8m0).

The scale's exponent is the absmax's less the element format's largest, so that values near the top may saturate: the
rule of the specification (OCP Microscaling Formats v1.0, 6.3). A group that holds a NaN or an Inf has the NaN scale
(0xFF) and codes of zero.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.dequantize import MX_GROUP
from qtrain.kernels.numerics.encode import abs_bits, casts_to_fp8, encode, zero_nonfinite
from qtrain.kernels.numerics.formats import FORMATS

LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}
"""Exponent of the format's largest number."""


def quantize_mx_ref(x: Tensor, elem: str) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] in `elem`, scale float8_e8m0fnu [M, ceil(K / 32)]."""
    m, k = x.shape
    fmt = FORMATS[elem]
    groups = F.pad(x.float(), (0, -k % MX_GROUP)).view(m, -(-k // MX_GROUP), MX_GROUP)
    absmax = torch.linalg.vector_norm(groups, ord=torch.inf, dim=2)
    exponent = ((absmax.view(torch.int32) >> 23) - LARGEST_EXPONENT[elem]).clamp(min=0)  # biased by 127; 0: 2**-127
    bad = ~absmax.isfinite()
    reciprocal = ((254 - exponent) << 23).view(torch.float32).masked_fill(bad, 0.0)
    scaled = groups.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) * reciprocal[..., None]
    codes = scaled.clamp(-fmt.max, fmt.max).flatten(1)[:, :k].to(fmt.dtype)
    return codes.contiguous(), exponent.masked_fill(bad, 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)


@triton.jit(do_not_specialize=["groups", "per_row"])
def _mx_kernel(
    x_ptr, codes_ptr, scale_ptr, groups, per_row, k,
    FMT: tl.constexpr, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, CAST: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row, column = (group // per_row).to(tl.int64)[:, None], (group % per_row * 32)[:, None] + tl.arange(0, 32)[None, :]
    inside = (group < groups)[:, None] & (column < k)
    x = tl.load(x_ptr + row * k + column, inside, 0.0)
    absmax = tl.max(abs_bits(x), 1)
    bad = tl.max(absmax, 0) >= 0x7F800000
    exponent = tl.maximum((absmax >> 23) - EXPONENT, 0)
    reciprocal = tl.where(absmax < 0x7F800000, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)
    codes = encode(zero_nonfinite(x, bad), reciprocal[:, None], 0, FMT, LARGEST, False, False, CAST)
    tl.store(codes_ptr + row * k + column, codes, inside)
    tl.store(scale_ptr + group, tl.where(absmax < 0x7F800000, exponent, 0xFF).to(tl.uint8), group < groups)


def launch_quantize_mx(x: Tensor, elem: str, *, groups: int = 128, warps: int = 4) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_mx_ref`: 32 elements of `groups` rows a program. x contiguous, not empty."""
    (m, k), fmt = x.shape, FORMATS[elem]
    codes = torch.empty(m, k, dtype=fmt.dtype, device=x.device)
    scale = torch.empty(m, triton.cdiv(k, MX_GROUP), dtype=torch.uint8, device=x.device)
    _mx_kernel[(triton.cdiv(scale.numel(), groups),)](
        x, codes.view(torch.int8), scale, scale.numel(), scale.shape[1], k,
        elem, fmt.max, LARGEST_EXPONENT[elem], casts_to_fp8(x.device), groups, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale.view(torch.float8_e8m0fnu)


@torch.library.custom_op("qtrain::quantize_mx", mutates_args=())
def quantize_mx(x: Tensor, elem: str = "e4m3") -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes [M, K] in `elem` ("e4m3", "e5m2"), scale float8_e8m0fnu [M, ceil(K / 32)]."""
    if x.is_cuda and x.numel():
        return launch_quantize_mx(x.contiguous(), elem)
    return quantize_mx_ref(x, elem)


@quantize_mx.register_fake
def _(x, elem="e4m3"):
    scale = x.new_empty(x.shape[0], -(-x.shape[1] // MX_GROUP), dtype=torch.float8_e8m0fnu)
    return x.new_empty(x.shape, dtype=FORMATS[elem].dtype), scale
