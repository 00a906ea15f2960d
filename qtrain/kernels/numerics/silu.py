"""SwiGLU and its gradient as device functions, on fp32 and on pairs of bf16; computed in fp32, rounded once.

    y = silu(gate) * up,   silu(x) = x * sigmoid(x)
    dgate = dy * up * s * (1 + gate * (1 - s)),   dup = silu(gate) * dy,   s = sigmoid(gate)

PTX: inline PTX is allowed. Kernels are launched with enable_fp_fusion=False, so that all of them round the same way.
"""

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import halves_f32, to_bf16x2


@triton.jit
def _sigmoid(x, PTX: tl.constexpr):
    """PTX: by approximate instructions, within 4e-7; exp and a division take four times as many."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;
                 add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }""",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.sigmoid(x)


@triton.jit
def swiglu_f32(gate, other, PTX: tl.constexpr):
    """silu(gate) * other: y with `up`, the gradient of `up` with dy."""
    return gate * _sigmoid(gate, PTX) * other


@triton.jit
def swiglu_grad_f32(dy, gate, up, PTX: tl.constexpr):
    """The gradient of gate; and dy * y, which shares its factors."""
    s = _sigmoid(gate, PTX)  # fp32, from bf16 gate: its error of 4e-7 is far below bf16's of 2e-3
    shared = dy * up * s
    return shared * (1 + gate * (1 - s)), shared * gate


@triton.jit
def swiglu_bf16x2(gate, up, PTX: tl.constexpr):
    """y of pairs of bf16."""
    # fp32 in between, rounded once to bf16: a bf16x2 product would round twice.
    gate0, gate1 = halves_f32(gate)
    up0, up1 = halves_f32(up)
    return to_bf16x2(swiglu_f32(gate0, up0, PTX), swiglu_f32(gate1, up1, PTX), PTX)


@triton.jit
def gate_grad_bf16x2(dy, gate, up, PTX: tl.constexpr):
    """The gradient of gate of pairs of bf16; and the sum over each pair of dy * y, fp32, y before it is rounded."""
    dy0, dy1 = halves_f32(dy)
    gate0, gate1 = halves_f32(gate)
    up0, up1 = halves_f32(up)
    grad0, dot0 = swiglu_grad_f32(dy0, gate0, up0, PTX)
    grad1, dot1 = swiglu_grad_f32(dy1, gate1, up1, PTX)
    return to_bf16x2(grad0, grad1, PTX), dot0 + dot1


@triton.jit
def up_grad_bf16x2(dy, gate, PTX: tl.constexpr):
    """The gradient of up of pairs of bf16."""
    dy0, dy1 = halves_f32(dy)
    gate0, gate1 = halves_f32(gate)
    return to_bf16x2(swiglu_f32(gate0, dy0, PTX), swiglu_f32(gate1, dy1, PTX), PTX)


@triton.jit
def sum_of_pairs(x):
    """x fp32 [R, C], C a power of two -> the sum of each row [R], of neighbors first: in one order in all kernels, for
    the sum of two does not depend on theirs."""
    if x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0],))
    else:
        # Recursion at compile time, a tree of log2(C) additions.
        return sum_of_pairs(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2))
