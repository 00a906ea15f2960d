"""Row codes of the gradient of SwiGLU's input, from one read of that input and of dy.

    dx [M, 2I] = dgate, dup   from x [M, 2I] and dy [M, I]   (`numerics/silu.py`)

For GEMMs that read rows alone, as those of a frozen linear do: no codes of columns are written, and dx is never in
memory, 10 bytes moved for an element of dy against 16. A row's scale is known once the row has been computed: a CTA
keeps it in registers, as `quantize/rowwise.py` does. dx is rounded to bf16 before it is quantized, so the codes are
those of `swiglu_backward` followed by `quantize`.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.bf16x2 import (
    abs_bf16x2,
    fast_inv_scale,
    max_bf16x2,
    max_of_halves,
    reduce_max_bf16x2,
    store_codes_bf16x2,
)
from qtrain.kernels.numerics.encode import encoding, scale_from_amax
from qtrain.kernels.numerics.formats import EIGHT_BITS, empty_codes
from qtrain.kernels.numerics.philox import NEAREST, Rounding, philox_key
from qtrain.kernels.numerics.silu import gate_grad_bf16x2, up_grad_bf16x2
from qtrain.kernels.quantize.dual_bf16x2 import supports_dual_bf16x2
from qtrain.kernels.quantize.operators import quantize
from qtrain.kernels.quantize.rowwise import LONGEST_ROW, WORDS_PER_THREAD, row_blocks
from qtrain.kernels.swiglu.swiglu import swiglu_backward


@triton.jit
def _load_gradients(x_ptr, dy_ptr, words, first, PTX: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK words of dgate and of dup of a row from word `first`; 0 beyond the end."""
    j = first + tl.arange(0, BLOCK)
    gate, up = tl.load(x_ptr + j, j < words, 0), tl.load(x_ptr + words + j, j < words, 0)
    dy = tl.load(dy_ptr + j, j < words, 0)
    return gate_grad_bf16x2(dy, gate, up, PTX)[0], up_grad_bf16x2(dy, gate, PTX)


@triton.jit
def _row_amax(dgate, dup, PTX: tl.constexpr):
    return max_of_halves(reduce_max_bf16x2(max_bf16x2(abs_bf16x2(dgate), abs_bf16x2(dup), PTX), 0, PTX))


@triton.jit
def _store_halves(
    codes_ptr, dgate, dup, words, first, inv_scale, nonfinite, draw, key,
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of what `_load_gradients` gave; draw: the number of the row's first Philox block."""
    j = first + tl.arange(0, BLOCK)
    # One Philox block serves eight elements, four words.
    block = (draw + first // 4 + tl.arange(0, BLOCK // 4))[None, :]
    store_codes_bf16x2(codes_ptr + j, j < words, dgate, inv_scale, nonfinite, block, key, STOCHASTIC, CODE)
    block += words // 4
    store_codes_bf16x2(codes_ptr + words + j, j < words, dup, inv_scale, nonfinite, block, key, STOCHASTIC, CODE)


@triton.jit(do_not_specialize=["role"])
def _quantize_swiglu_gradient_rows_kernel(
    # int32 words of two bf16 [m, 2 * words], gate then up, and dy [m, words]; int16 words of two codes [m, 2 * words].
    x_ptr, dy_ptr, codes_ptr, scale_ptr, key_ptr, role, words,
    # Half a row is BLOCK words, and BLOCK_2 more if that is not 0.
    STOCHASTIC: tl.constexpr, CODE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_2: tl.constexpr,
):  # fmt: skip
    """A row per CTA."""
    words, row = tl.multiple_of(words, 8), tl.program_id(0).to(tl.int64)
    x_ptr, dy_ptr, codes_ptr = x_ptr + row * 2 * words, dy_ptr + row * words, codes_ptr + row * 2 * words
    dgate, dup = _load_gradients(x_ptr, dy_ptr, words, 0, CODE.ptx, BLOCK)
    amax = _row_amax(dgate, dup, CODE.ptx)
    if BLOCK_2:
        dgate_2, dup_2 = _load_gradients(x_ptr, dy_ptr, words, BLOCK, CODE.ptx, BLOCK_2)
        amax = tl.maximum(amax, _row_amax(dgate_2, dup_2, CODE.ptx))
    nonfinite, scale = amax >= 0x7F800000, scale_from_amax(amax, CODE)
    tl.store(scale_ptr + row, scale)
    inv_scale, draw, key = fast_inv_scale(scale, nonfinite, CODE.ptx), row * (words // 2), None
    if STOCHASTIC:
        seed, step, tensor = philox_key(key_ptr, role)
        key = seed, step, tensor, 1
    _store_halves(codes_ptr, dgate, dup, words, 0, inv_scale, nonfinite, draw, key, STOCHASTIC, CODE, BLOCK)
    if BLOCK_2:
        _store_halves(
            codes_ptr, dgate_2, dup_2, words, BLOCK, inv_scale, nonfinite, draw, key, STOCHASTIC, CODE, BLOCK_2
        )


def launch_swiglu_gradient_rows(
    x: Tensor, dy: Tensor, fmt: str, rounding: Rounding = NEAREST, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """x [M, 2I] and dy [M, I] bf16, contiguous, not empty, I a multiple of 16 -> of dx the codes [M, 2I] and the scale
    fp32 [M], as `quantize_ref` at rowwise."""
    (m, width), key = dy.shape, rounding.row_key
    codes, scale = empty_codes(x, fmt, "rowwise")
    block, block_2 = row_blocks(width // 2)
    _quantize_swiglu_gradient_rows_kernel[(m,)](
        x.view(torch.int32), dy.view(torch.int32), codes.view(torch.int16), scale, key, rounding.role, width // 2,
        STOCHASTIC=key is not None, CODE=encoding(fmt, x.device, power_of_two), BLOCK=block, BLOCK_2=block_2,
        num_warps=triton.next_power_of_2(triton.cdiv(2 * (block + block_2), 32 * WORDS_PER_THREAD)),
        enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale


def supports_gradient_rows(width: int, fmt: str) -> bool:
    """Whether a kernel takes rows of dx of this width, 2I: a CTA holds a row in registers."""
    return fmt in EIGHT_BITS and width % 32 == 0 and 2 * sum(row_blocks(width // 4)) <= LONGEST_ROW


@operator("quantize_swiglu_gradient_rows", fake=lambda x, fmt: empty_codes(x, fmt, "rowwise"))
def quantize_swiglu_gradient_rows(
    x: Tensor, dy: Tensor, fmt: str, key: Tensor | None = None, role: int = 0, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """`quantize` along rows of dx [M, 2I], the gradient of x from that of swiglu(x), dy [M, I]: codes, scale."""
    x, dy = x.contiguous(), dy.contiguous()
    takes = all(supports_dual_bf16x2(t, fmt, "rowwise", False) for t in (x, dy))  # bf16, multiples of 16, aligned
    if takes and x.is_cuda and x.numel() and supports_gradient_rows(x.shape[1], fmt):
        return launch_swiglu_gradient_rows(x, dy, fmt, Rounding(key, role), power_of_two)
    return quantize(swiglu_backward(dy, x), fmt, "rowwise", key, role, power_of_two)
