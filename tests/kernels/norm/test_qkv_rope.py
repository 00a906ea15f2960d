"""Rotary positions of the fused qkv: no further from fp64 than PyTorch's rotation, in any shape and layout."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.kernels.norm.qkv_rope import (
    launch_qkv_rope,
    launch_qkv_rope_backward,
    qkv_rope,
    qkv_rope_backward_ref,
    qkv_rope_ref,
    rotate,
)
from tests.kernels.norm.errors import assert_no_further
from tests.kernels.norm.modes import check_modes
from tests.kernels.norm.test_qk_norm_rope import CASES, LARGE, Case, strided


def in_pytorch(inputs: list[Tensor], heads: int, rotation) -> list[Tensor]:
    """q, k and the gradient of qkv, through autograd."""
    qkv, cos, sin, dq, dk, dv = inputs
    leaf = qkv.detach().requires_grad_()
    q, k, v = leaf.unflatten(-1, (-1, dq.shape[-1])).split([heads, dk.shape[2], dk.shape[2]], dim=2)
    q, k = (rotation(t, cos, sin) for t in (q, k))
    return [q.detach(), k.detach(), torch.autograd.grad([q, k, v], leaf, [dq, dk, dv])[0]]


def in_fp64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def check(forward, backward, device: str, dtype: torch.dtype, cases) -> None:
    eps = torch.finfo(dtype).eps
    rounding = eps / 2 if dtype == torch.bfloat16 else 2 * eps  # of the result alone; of each of its operations
    for case, kind in cases:
        qkv, _, _, cos, sin, dq, dk, dv = case.inputs(dtype, device, kind)
        inputs = [qkv, cos, sin, dq, dk, dv]
        truths = in_pytorch([t.double() for t in inputs], case.heads, in_fp64)
        q, k, v = forward(qkv, cos, sin, case.heads, case.head_dim)
        assert all(t.is_contiguous() and t.dtype == dtype for t in (q, k, v))
        assert torch.equal(v.flatten(2).nan_to_num(), qkv[..., -case.kv_heads * case.head_dim :].nan_to_num())
        for grads in ((dq, dk, dv), tuple(strided(t) for t in (dq, dk, dv))):
            dqkv = backward(*grads, cos, sin)
            assert dqkv.dtype == dtype and dqkv.is_contiguous()
            theirs = in_pytorch(inputs, case.heads, rotate)
            assert_no_further(("q", "k", "dqkv"), (q, k, dqkv), truths, theirs, rounding, (case, kind))
            assert torch.equal(dqkv[..., -case.kv_heads * case.head_dim :], dv.flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference(dtype):
    check(qkv_rope_ref, qkv_rope_backward_ref, "cpu", dtype, CASES)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launch_qkv_rope, launch_qkv_rope_backward, "cpu", torch.float32, CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    check(launch_qkv_rope, launch_qkv_rope_backward, "cuda", dtype, CASES + LARGE)


def check_operator(device: str, backend: str) -> None:
    """Autograd and compiled code, with and without recomputation."""
    case = Case(2, 16, 4, 2, 32)
    qkv, _, _, cos, sin, *grads = case.inputs(torch.float32, device)
    fixed = (cos, sin, case.heads, case.head_dim)
    torch.library.opcheck(torch.ops.qtrain.qkv_rope.default, (qkv, *fixed))
    torch.library.opcheck(torch.ops.qtrain.qkv_rope_backward.default, (*grads, cos, sin))

    def attention(x, projection):
        q, k, v = (t.transpose(1, 2) for t in qkv_rope(x @ projection, *fixed))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    projection = torch.randn(24, qkv.shape[-1], device=device) / 5
    check_modes(attention, [torch.randn(2, 16, 24, device=device), projection], backend)


def test_operator():
    check_operator("cpu", "aot_eager")


@pytest.mark.gpu
def test_operator_on_gpu():
    check_operator("cuda", "inductor")


def test_nothing_keeps_qkv():
    """Backward needs neither it nor a view of it: attention keeps q, k and v."""
    qkv, _, _, cos, sin, *_ = Case(2, 5, 4, 2, 16).inputs(torch.float32)
    outs = qkv_rope(qkv.requires_grad_(), cos, sin, 4, 16)
    assert {t.untyped_storage().data_ptr() for t in outs}.isdisjoint({qkv.untyped_storage().data_ptr()})
    kept = outs[0].grad_fn.saved_tensors
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]
