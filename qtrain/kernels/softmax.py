"""Exponentials of a softmax as device functions, in fp32 and to base 2, which is what GPUs compute.

    exp(x - L) = 2 ** (x * log2(e) - L * log2(e))

The product is within an FMA: one instruction less per element than a difference and a product.
"""

from qtrain.kernels.compiler import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
IGNORED = -100
"""The label of a position without a loss."""


@triton.jit
def exp_less(x, log2_total, PTX: tl.constexpr):
    """exp(x) / 2 ** log2_total, x fp32. PTX: without the instructions that would keep results below 2**-126."""
    exponent = tl.fma(x, LOG2_E, -log2_total)
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(exponent)
