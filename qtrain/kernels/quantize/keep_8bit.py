"""A matrix kept in 8 bits between forward and backward: codes and scales in forward, values again in backward.

FP8 (e4m3) with an fp32 scale for each 128 elements of a row (1x128, the last block of a row may be shorter): 1.03 bytes
per element. Its error is 2.6% of normal numbers (root mean square), and no more whatever else is in their block: the
gradients that are computed from it err by 1% to 4%. INT8 codes under the same scales err by a quarter of that where
nothing is far out of range (0.7%), but by up to 8% where one column in a hundred is 30 times as large as the others,
and by 21% for a single token. Forward has read the unrounded values; backward computes from what `restore_8bit` gives.

Both are operators of their own name: a compiler keeps their results as they are, and a policy of recomputation can name
them (`models/native/recompute.py`). It is obeyed only where forward's result depends on the operator: else PyTorch's
partitioner counts it to backward, and recomputes its input. So there is a third result, a zero to be added to that.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.formats import dequantize, empty_codes
from qtrain.kernels.quantize.operators import quantize

FORMAT, GRANULARITY, GROUP = "e4m3", "1x128", 128
BYTES_PER_ELEMENT = 1 + 4 / GROUP
BLOCK = 2048


@operator("keep_8bit", fake=lambda x: (*empty_codes(x, FORMAT, GRANULARITY), x.new_empty(1)))
def keep_8bit(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes e4m3 [M, K], scale fp32 [M, ceil(K / 128)], rounded to nearest; and a zero [1] in x's
    dtype.

    A block with a NaN or an Inf has a NaN or Inf scale, and is NaN when it is restored."""
    return *quantize(x, FORMAT, GRANULARITY), x.new_zeros(1)


def restore_8bit_ref(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes e4m3 [M, K], scale fp32 [M, ceil(K / 128)] -> values [M, K] in dtype, rounded once."""
    return dequantize(codes, scale, FORMAT, GRANULARITY, codes.shape, dtype)


@triton.jit
def _restore_8bit_kernel(
    # codes: bytes of e4m3 [m, width], out fp32 or bf16 [m, width], contiguous; scale fp32 [m, width / GROUP].
    codes_ptr, scale_ptr, out_ptr, width, row_stride, group_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row, or BLOCK of its columns, per CTA."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
    columns = groups * GROUP + tl.arange(0, GROUP)[None, :]
    scale = tl.load(scale_ptr + row * row_stride + groups * group_stride, groups * GROUP < width, 0.0)
    codes = tl.load(codes_ptr + row * width + columns, columns < width, 0).to(tl.int32)
    # Exponent and mantissa at fp32's places, the exponent 120 too small: bias 7 instead of 127. No code is a NaN.
    bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
    values = bits.to(tl.float32, bitcast=True) * 2.0**120  # from fp32's exponents, subnormals included
    tl.store(out_ptr + row * width + columns, (values * scale).to(out_ptr.dtype.element_ty), columns < width)


def launch_restore_8bit(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernel for `restore_8bit_ref`; codes contiguous."""
    (rows, width), out = codes.shape, torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, BLOCK))  # only the first dimension takes more than 65,535
        _restore_8bit_kernel[grid](codes.view(torch.int8), scale, out, width, *scale.stride(), GROUP=GROUP, BLOCK=BLOCK)
    return out


@operator("restore_8bit", fake=lambda codes, dtype: codes.new_empty(codes.shape, dtype=dtype))
def restore_8bit(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [M, K] in fp32 or bf16 of what `keep_8bit` gave."""
    if codes.is_cuda:
        return launch_restore_8bit(codes.contiguous(), scale, dtype)
    return restore_8bit_ref(codes, scale, dtype)
