"""Cases of the table of quantizers: other memory-bound kernels between products, on M tokens.

The width K is that of the residual stream for norms, of q, k and v together for rotary positions, and of the
activation for SwiGLU, whose input has twice as many columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtrain.bench.case import Case, Check, UnavailableError, largest_share, random_bf16, within
from qtrain.bench.loss_codes import NEAR_A_TIE, OF_ROUNDING, Error
from qtrain.kernels.column_sums import column_sums
from qtrain.kernels.norm.qk_norm_rope import (
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_backward_ref,
    qk_norm_rope_ref,
)
from qtrain.kernels.norm.qkv_rope import qkv_rope, qkv_rope_backward, qkv_rope_backward_ref, qkv_rope_ref
from qtrain.kernels.norm.residual_norm import residual_norm_backward, residual_norm_backward_ref
from qtrain.kernels.swiglu.quantize import (
    activation,
    quantize_swiglu_backward,
    quantize_swiglu_delayed,
    quantize_swiglu_rowwise,
)
from qtrain.kernels.swiglu.swiglu import swiglu

SEQUENCE, EPS = 1024, 1e-6
Shape = tuple[int, int]


def norm_case(shape: Shape, device: torch.device) -> Case:
    """The backward pass of an RMSNorm, with the residual's gradient added."""
    dy, dresidual, x = (random_bf16(shape, device, seed) for seed in range(3))
    weight = random_bf16(shape[1:], device, 3)
    truth = residual_norm_backward_ref(dy, dresidual, x, weight, EPS, False)

    def run(dy: Tensor, dresidual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return residual_norm_backward(dy, dresidual, x, weight, EPS, False)

    return Case((dy, dresidual, x, weight), run, _near(*truth))


def column_sums_case(shape: Shape, device: torch.device) -> Case:
    """The gradient of a bias."""
    x = random_bf16(shape, device)
    return Case((x,), lambda x: (column_sums(x),), _near(x.sum(0, dtype=torch.float64)))


def rope_case(shape: Shape, device: torch.device) -> Case:
    """Rotary positions of q and k, which leave the product's output for memory of their own, as v does."""
    qkv, cos, sin, heads, head_dim = _projection(shape, device)

    def run(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return qkv_rope(qkv, cos, sin, heads, head_dim)

    return Case((qkv, cos, sin), run, _near(*qkv_rope_ref(qkv, cos, sin, heads, head_dim)))


def rope_backward_case(shape: Shape, device: torch.device) -> Case:
    """Their gradient, which is one tensor again."""
    qkv, cos, sin, heads, head_dim = _projection(shape, device)
    dq, dk, dv = _like(*qkv_rope_ref(qkv, cos, sin, heads, head_dim))

    def run(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return (qkv_rope_backward(dq, dk, dv, cos, sin),)

    return Case((dq, dk, dv, cos, sin), run, _near(qkv_rope_backward_ref(dq, dk, dv, cos, sin)))


def qk_norm_rope_case(shape: Shape, device: torch.device) -> Case:
    """The same with an RMSNorm of each head of q and k before; v stays where it is, and is not read."""
    qkv, cos, sin, heads, head_dim = _projection(shape, device)
    weights = random_bf16((head_dim,), device, 1), random_bf16((head_dim,), device, 2)
    q, k = qk_norm_rope_ref(qkv, *weights, cos, sin, heads, EPS)

    def run(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return qk_norm_rope(qkv, q_weight, k_weight, cos, sin, heads, EPS)[:2]

    return Case((qkv, *weights, cos, sin), run, _near(q, k), unread=k.nbytes)


def qk_norm_rope_backward_case(shape: Shape, device: torch.device) -> Case:
    """Its gradient, with those of the norms' weights."""
    qkv, cos, sin, heads, head_dim = _projection(shape, device)
    weights = random_bf16((head_dim,), device, 1), random_bf16((head_dim,), device, 2)
    q, k = qk_norm_rope_ref(qkv, *weights, cos, sin, heads, EPS)
    dq, dk, dv = _like(q, k, k)

    def run(dq, dk, dv, qkv, q_weight, k_weight, cos, sin) -> tuple[Tensor, ...]:
        return qk_norm_rope_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, EPS)

    truth = qk_norm_rope_backward_ref(dq, dk, dv, qkv, *weights, cos, sin, EPS)
    return Case((dq, dk, dv, qkv, *weights, cos, sin), run, _near(*truth), unread=k.nbytes)


def delayed_swiglu_case(backward: bool, error: Error) -> Callable[[Shape, torch.device], Case]:
    """e4m3 codes of SwiGLU, or of its gradient, in both layouts under a scale that is known."""

    def prepare(shape: Shape, device: torch.device) -> Case:
        x, dy = _gate_up(shape, device)
        exact = activation(x, dy if backward else None)
        known = (exact.abs().amax().float() / 448).view(1)

        def run(x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, ...]:
            return quantize_swiglu_delayed(x, dy, "e4m3", known)[:3]

        def check(out: Any) -> float:
            codes, codes_t, scale = out
            share = max(error(exact, codes, scale), error(exact.t(), codes_t, scale))
            return within(share, OF_ROUNDING, NEAR_A_TIE)

        return Case((x, dy) if backward else (x,), run, check)

    return prepare


def rowwise_swiglu_case(backward: bool, error: Error) -> Callable[[Shape, torch.device], Case]:
    """INT8 codes by rows of SwiGLU; or in its backward pass those by columns, and of the gradient in both layouts."""

    def prepare(shape: Shape, device: torch.device) -> Case:
        x, dy = _gate_up(shape, device)
        y = swiglu(x)
        *_, column_amax = quantize_swiglu_rowwise(x, "int8")
        plain = ("int8", None, 0, True, True, False, "int8", None, 0, False)

        def run_backward(x: Tensor, dy: Tensor, column_amax: Tensor) -> tuple[Tensor, ...]:
            return quantize_swiglu_backward(x, dy, column_amax, *plain)[:6]

        def check_backward(out: Any) -> float:
            codes, scale, codes_t, scale_t, y_codes, y_scale = out
            dx = activation(x, dy)
            share = max(error(dx, codes, scale), error(dx.t(), codes_t, scale_t), error(y.t(), y_codes, y_scale))
            return within(share, OF_ROUNDING, NEAR_A_TIE)

        def check(out: Any) -> float:
            codes, scale, bits = out
            _near(y.abs().amax(0))((bits.view(torch.float32),))
            return within(error(y, codes, scale), OF_ROUNDING, NEAR_A_TIE)

        if backward:
            return Case((x, dy, column_amax), run_backward, check_backward)
        return Case((x,), lambda x: quantize_swiglu_rowwise(x, "int8"), check)

    return prepare


def _gate_up(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Input [M, 2 K] and the output's gradient [M, K]."""
    return random_bf16((shape[0], 2 * shape[1]), device), random_bf16(shape, device, 1)


def _projection(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """qkv [B, S, K], cosines and sines [S, 1, D / 2], query heads, D. Of the heads an eighth are k's, and as many v's:
    with 1152, 2048 and 4608 columns these are the heads of Qwen2.5's 0.5B, 1.5B and 7B."""
    tokens, width = shape
    head_dim = 64 if width < 2048 else 128
    heads = width // head_dim
    kv_heads = max(heads // 8, 1)
    if width % head_dim or heads < 3:
        raise UnavailableError(f"columns are those of three heads of {head_dim} or more")
    seq = SEQUENCE if tokens % SEQUENCE == 0 else tokens
    angles = torch.rand(seq, 1, head_dim // 2, device=device, generator=torch.Generator(device).manual_seed(3)) * 6.28
    return random_bf16(shape, device).view(-1, seq, width), angles.cos(), angles.sin(), heads - 2 * kv_heads, head_dim


def _like(*outputs: Tensor) -> list[Tensor]:
    """Gradients of them."""
    return [random_bf16(tuple(t.shape), t.device, 4 + i) for i, t in enumerate(outputs)]


def _near(*truth: Tensor) -> Check:
    """Results are at most a step of bf16 from their definition; where terms cancel, of an eighth of the largest."""

    def check(out: Any) -> float:
        share = 0.0
        for found, exact in zip(out, truth, strict=True):
            allowed = exact.abs().float() * 2**-7 + exact.abs().amax().float() * 2**-10
            share = max(share, largest_share(found.float() - exact.float(), allowed))
        return within(share)

    return check
