"""QK-norm and rotary positions: no further from fp64 than PyTorch's norm and rotation, in any shape and layout."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.kernels.norm.qk_norm_rope import (
    launch_qk_norm_rope,
    launch_qk_norm_rope_backward,
    qk_norm_rope,
    qk_norm_rope_backward_ref,
    qk_norm_rope_ref,
)
from qtrain.kernels.norm.qkv_rope import rotate
from tests.kernels.norm.errors import assert_no_further
from tests.kernels.norm.modes import check_modes

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: bool = False
    """Positions are those of documents: the tables have a row for each token of each sequence."""

    def inputs(self, dtype: torch.dtype, device: str = "cpu", kind: str = "normal") -> tuple[Tensor, ...]:
        """qkv, both weights, cos and sin, then gradients of q [B, S, H, D], k and v [B, S, KV, D]."""
        generator = torch.Generator().manual_seed(self.seq)
        tokens, d = (self.batch, self.seq), self.head_dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        qkv = draw(*tokens, (self.heads + 2 * self.kv_heads) * d)
        qkv *= torch.logspace(-3, 2, self.seq)[:, None]
        weights = [1 + 0.3 * draw(d) for _ in range(2)]
        angles = draw(*(tokens if self.documents else (self.seq,)), 1, d // 2) * 3
        grads = [draw(*tokens, heads, d) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        token = qkv[-1:, self.seq // 2]
        if kind == "outlier":
            qkv[..., 1] *= 1000
        elif kind == "zero row":
            token.zero_()
        elif kind == "nan row":
            token[:, d] = torch.nan
        values = (t.to(device, dtype) for t in (qkv, *weights))
        return *values, angles.cos().to(device), angles.sin().to(device), *(t.to(device, dtype) for t in grads)


def strided(grad: Tensor) -> Tensor:
    """The same values, stored [B, heads, S, D]."""
    return grad.transpose(1, 2).contiguous().transpose(1, 2)


CASES = [
    (Case(2, 7, 4, 2, 64), "normal"),
    (Case(1, 1, 2, 1, 128), "normal"),
    (Case(2, 5, 6, 3, 96, documents=True), "outlier"),
    (Case(1, 3, 3, 1, 256), "zero row"),
    (Case(2, 9, 4, 4, 16), "nan row"),
    (Case(1, 23, 8, 1, 256), "normal"),
    (Case(0, 4, 2, 1, 64), "normal"),
]
"""Tiles beyond the last token, heads that no power of two divides, more tiles than CTAs (in the interpreter), none."""

LARGE = [
    (Case(3, 333, 32, 4, 128), "normal"),
    (Case(2, 257, 14, 2, 64, documents=True), "outlier"),
    (Case(1, 500, 8, 8, 256), "zero row"),
]


def in_pytorch(inputs, heads: int, norm, rotation) -> list[Tensor]:
    """q, k and all gradients by `norm` (x, weight) and `rotation`, through autograd."""
    qkv, *weights, cos, sin, dq, dk, dv = inputs
    leaves = [t.detach().requires_grad_() for t in (qkv, *weights)]
    x = leaves[0].unflatten(-1, (-1, dq.shape[-1]))
    q, k, v = x.split([heads, dk.shape[2], dk.shape[2]], dim=2)
    q, k = (rotation(norm(t, weight), cos, sin) for t, weight in zip((q, k), leaves[1:], strict=True))
    return [q, k, *torch.autograd.grad([q, k, v], leaves, [dq, dk, dv])]


def exact(inputs, heads: int) -> list[Tensor]:
    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight

    def rotation(x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    return in_pytorch([t.double() for t in inputs], heads, norm, rotation)


def present(inputs, heads: int) -> list[Tensor]:
    return in_pytorch(inputs, heads, lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS), rotate)


def check(forward, backward, device: str, dtype: torch.dtype, cases) -> None:
    eps = torch.finfo(dtype).eps
    rounding = eps / 2 if dtype == torch.bfloat16 else 4 * eps  # of the result alone; of each of its operations
    for case, kind in cases:
        inputs = case.inputs(dtype, device, kind)
        qkv, *rest, dq, dk, dv = inputs
        found = [*forward(qkv, *rest, case.heads, EPS)]
        assert [tuple(t.shape[2:]) for t in found] == [(n, case.head_dim) for n in (case.heads, case.kv_heads)]
        for grads in ((dq, dk, dv), tuple(strided(t) for t in (dq, dk, dv))):
            dqkv, dweights = backward(*grads, qkv, *rest, EPS)
            assert dqkv.dtype == qkv.dtype and dqkv.is_contiguous() and dweights.dtype == torch.float32
            all_found = [*found, dqkv, *dweights.to(dtype)]
            names = ("q", "k", "dqkv", "dq_weight", "dk_weight")
            truths, theirs = exact(inputs, case.heads), present(inputs, case.heads)
            assert_no_further(names, all_found, truths, theirs, rounding, (case, kind))
            assert torch.equal(dqkv[..., -case.kv_heads * case.head_dim :], dv.flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(dtype):
    check(qk_norm_rope_ref, qk_norm_rope_backward_ref, "cpu", dtype, CASES)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launch_qk_norm_rope, launch_qk_norm_rope_backward, "cpu", torch.float32, CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    check(launch_qk_norm_rope, launch_qk_norm_rope_backward, "cuda", dtype, CASES + LARGE)


def check_operator(device: str, backend: str) -> None:
    """Autograd and compiled code, with and without recomputation, in which attention reads v as a view of qkv."""
    case = Case(2, 16, 4, 2, 32)
    qkv, q_weight, k_weight, cos, sin, *grads = case.inputs(torch.float32, device)
    fixed = (cos, sin, case.heads, EPS)
    torch.library.opcheck(torch.ops.qtrain.qk_norm_rope.default, (qkv, q_weight, k_weight, *fixed))
    torch.library.opcheck(
        torch.ops.qtrain.qk_norm_rope_backward.default, (*grads, qkv, q_weight, k_weight, cos, sin, EPS)
    )

    def attention(x, projection, q_weight, k_weight):
        q, k, v = (t.transpose(1, 2) for t in qk_norm_rope(x @ projection, q_weight, k_weight, *fixed))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    projection = torch.randn(24, qkv.shape[-1], device=device) / 5
    check_modes(attention, [torch.randn(2, 16, 24, device=device), projection, q_weight, k_weight], backend)


def test_operator():
    check_operator("cpu", "aot_eager")


@pytest.mark.gpu
def test_operator_on_gpu():
    check_operator("cuda", "inductor")


def test_v_is_a_view_and_the_gradient_of_qkv_one_tensor():
    case = Case(2, 5, 4, 2, 16)
    inputs = case.inputs(torch.float32)
    qkv, q_weight, k_weight, cos, sin, *grads = inputs
    leaves = [t.requires_grad_() for t in (qkv, q_weight, k_weight)]
    outs = qk_norm_rope(*leaves, cos, sin, case.heads, EPS)
    assert outs[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    found = torch.autograd.grad(outs, leaves, grads)
    assert found[0].is_contiguous()
    for ours, truth in zip([*outs[:2], *found], exact([t.detach() for t in inputs], case.heads), strict=True):
        assert torch.allclose(ours.double(), truth, rtol=1e-4, atol=1e-5)
