"""Causal attention against fp64, either pass; as one operator."""

import pytest
import torch

from qtrain.kernels.attention.backward import launch_keys, launch_queries
from qtrain.kernels.attention.blocks import VisibleKeys
from qtrain.kernels.attention.causal import (
    _causal_attention,
    causal_attention,
    causal_attention_backward,
    supports_causal_attention,
    takes_causal_attention,
)
from qtrain.kernels.attention.cudnn import OWN, backward_cudnn, forward_cudnn
from qtrain.kernels.attention.forward import launch_forward
from qtrain.kernels.attention.reference import attention_ref
from qtrain.models.native.attention import attend
from qtrain.train.assembly.deterministic import use_deterministic_kernels

KINDS = ["normal", "outlier", "zero_row", "peaked"]


def operands(batch, seq, heads, kv_heads, dim, kind="normal", dtype=torch.float32, device="cpu"):
    """q, k, v and the gradient of the output [B, S, heads, D]."""
    generator = torch.Generator().manual_seed(seq + heads)
    q, k, v, do = (
        torch.randn(batch, seq, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads, heads)
    )
    if kind == "outlier":
        k[:, :, :, dim // 2] *= 100
        do[:, seq // 2] *= 1000
    elif kind == "zero_row":
        q[:, 3], k[:, seq // 2], v[:, 5], do[:, 7] = 0, 0, 0, 0
    elif kind == "peaked":
        q *= 30  # the softmax of a row is one key's
    return [t.to(device, dtype) for t in (q, k, v, do)]


def truth(q, k, v, do, scale, visible=None):
    """o, lse and the gradients in fp64."""
    inputs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (t.repeat_interleave(group, 2) for t in inputs[1:])
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", inputs[0], wide_k)
    hidden = torch.ones(scores.shape[-2:], device=q.device).triu(1).bool()
    if visible is not None:
        hidden = hidden | (torch.arange(q.shape[1], device=q.device) < visible.first[..., None])[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide_v)
    return o.detach().contiguous(), scores.logsumexp(-1).detach(), torch.autograd.grad(o, inputs, do.double())


def close(found, expected, tolerance):
    """Of each gradient, relative to its largest value."""
    for name, got, true in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert got.isfinite().all(), name
        error = (got.double() - true).abs().max() / true.abs().max()
        assert error < tolerance, (name, error.item())


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seq", "heads", "kv_heads", "dim"), [(128, 2, 1, 64), (256, 2, 2, 64), (128, 3, 1, 128)])
def test_kernels_in_the_interpreter(seq, heads, kv_heads, dim, kind):
    """In fp32, whose products the interpreter computes as they are; it has no inline PTX."""
    q, k, v, do = operands(2, seq, heads, kv_heads, dim, kind)
    scale = dim**-0.5
    o, lse, expected = truth(q, k, v, do, scale)
    o, lse = o.float(), lse.float()
    dq, delta = launch_queries(do, q, k, v, o, lse, scale)
    close((dq, *launch_keys(do, q, k, v, lse, delta, scale)), expected, 3e-5)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seq", "heads", "kv_heads", "dim"), [(128, 2, 1, 64), (256, 2, 2, 64), (128, 3, 1, 128)])
def test_forward_kernel_in_the_interpreter(seq, heads, kv_heads, dim, kind):
    q, k, v, do = operands(2, seq, heads, kv_heads, dim, kind)
    expected, true_lse, _ = truth(q, k, v, do, dim**-0.5)
    o, lse = launch_forward(q, k, v, dim**-0.5)
    assert (o - expected).abs().max() < 3e-5 * expected.abs().max()
    assert (lse - true_lse).abs().max() < 1e-5 * (1 + true_lse.abs().max())


def visible_keys(kind, batch, seq, device="cpu"):
    """Documents of lengths that no block's is, among them of one token; a sliding window; or both."""
    generator = torch.Generator().manual_seed(seq)
    ends = torch.rand(batch, seq, generator=generator) < 0.03
    ends[:, :3] = True
    doc_ids = None if kind == "window" else ends.cumsum(1).to(device)
    return VisibleKeys.make(batch, seq, doc_ids, None if kind == "documents" else 37, torch.device(device))


@pytest.mark.parametrize("kind", ["documents", "window", "both"])
def test_visible_keys(kind):
    """Of each key the last query that sees it, by the definition of the first key that each query sees."""
    visible = visible_keys(kind, 3, 200)
    places = torch.arange(200)
    sees = (places >= visible.first[..., None]) & (places <= places[:, None])  # [B, queries, keys]
    assert torch.equal(visible.last, 199 - sees.flip(1).int().argmax(1).int())
    assert (visible.first[:, 1:] >= visible.first[:, :-1]).all() and (visible.last >= places).all()
    if kind == "window":
        assert torch.equal(sees[0], (places[:, None] - places >= 0) & (places[:, None] - places < 37))


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["documents", "window", "both"])
def test_kernels_that_see_less_in_the_interpreter(kind):
    for seq, heads, kv_heads, dim in ((256, 2, 1, 64), (384, 2, 2, 128)):
        q, k, v, do = operands(2, seq, heads, kv_heads, dim)
        scale, visible = dim**-0.5, visible_keys(kind, 2, seq)
        expected, true_lse, gradients = truth(q, k, v, do, scale, visible)
        o, lse = launch_forward(q, k, v, scale, visible)
        assert (o - expected).abs().max() < 3e-5 and (lse - true_lse).abs().max() < 1e-4
        dq, delta = launch_queries(do, q, k, v, o, lse, scale, visible)
        close((dq, *launch_keys(do, q, k, v, lse, delta, scale, visible)), gradients, 3e-5)


@pytest.mark.interpreter
def test_nan_shows_in_the_interpreter():
    """Of a query: in every key that it sees, and at most in later ones of its own block."""
    q, k, v, do = operands(1, 256, 2, 1, 64)
    q[0, 130, 0, 3] = float("nan")
    o, lse = launch_forward(q, k, v, 0.2)
    assert o[0, 130, 0].isnan().all() and o[0, :130].isfinite().all() and o[0, 131:].isfinite().all()
    dq, delta = launch_queries(do, q, k, v, o, lse, 0.2)
    dk, dv = launch_keys(do, q, k, v, lse, delta, 0.2)
    assert dq[0, 130, 0].isnan().all() and dq[0, :130].isfinite().all() and dq[0, 131:].isfinite().all()
    for gradient in dk, dv:
        assert gradient[0, :131].isnan().any(-1).all() and gradient[0, 192:].isfinite().all()


@pytest.mark.parametrize("less", [None, "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_on_a_cpu(dtype, less):
    q, k, v, do = operands(2, 33, 4, 2, 16, dtype=dtype)
    visible = less and visible_keys(less, 2, 33)
    _, _, expected = truth(q, k, v, do, 0.3, visible)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    o = causal_attention(*(t.transpose(1, 2) for t in inputs), 0.3, visible)
    o.backward(do.transpose(1, 2))
    close([t.grad for t in inputs], expected, 1e-5 if dtype == torch.float32 else 0.02)


def test_operators_are_registered_right():
    q, k, v, do = operands(1, 16, 2, 1, 8)
    torch.library.opcheck(_causal_attention, (*(t.requires_grad_() for t in (q, k, v)), 0.2))
    o, lse = attention_ref(*(t.detach() for t in (q, k, v)), 0.2)
    torch.library.opcheck(causal_attention_backward, (do, *(t.detach() for t in (q, k, v)), o, lse, 0.2))
    visible = visible_keys("both", 1, 16)
    torch.library.opcheck(_causal_attention, (*(t.requires_grad_() for t in (q, k, v)), 0.2, *visible))


def test_what_the_kernels_do_not_take(monkeypatch):
    monkeypatch.setattr("qtrain.kernels.attention.causal.has_wgmma", lambda device: True)

    def takes(seq=256, dim=64, dtype=torch.bfloat16, device="cuda"):
        return takes_causal_attention(torch.device(device), dtype, seq, dim)

    assert takes() and takes(dim=128) and takes(seq=8192)
    assert not takes(seq=8320) and not takes(seq=200) and not takes(seq=0) and not takes(dim=96)
    assert not takes(dtype=torch.float32) and not takes(dtype=torch.float16) and not takes(device="cpu")
    monkeypatch.setattr("qtrain.kernels.attention.causal.takes_causal_attention", lambda *sizes: True)
    q, v = torch.zeros(1, 2, 256, 64), torch.zeros(1, 2, 256, 128)
    assert supports_causal_attention(q, q, q) and not supports_causal_attention(q, q, v)
    assert not supports_causal_attention(q, q, q.half()) and not supports_causal_attention(q[:0], q[:0], q[:0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("batch", "seq", "heads", "kv_heads"), [(2, 128, 2, 2), (2, 1024, 14, 2), (1, 640, 6, 1)])
def test_kernels_against_fp64(batch, seq, heads, kv_heads, dim, kind):
    """No further from fp64 than twice cuDNN's; every run has the same bits."""
    q, k, v, do = operands(batch, seq, heads, kv_heads, dim, kind, torch.bfloat16, "cuda")
    scale = dim**-0.5
    true_o, true_lse, expected = truth(q, k, v, do, scale)

    def run():
        o, lse = launch_forward(q, k, v, scale)
        dq, delta = launch_queries(do, q, k, v, o, lse, scale)
        return o, dq, *launch_keys(do, q, k, v, lse, delta, scale), lse

    *found, lse = run()
    assert all(torch.equal(a, b) for a, b in zip((*found, lse), run(), strict=True))
    theirs = forward_cudnn(q, k, v, scale, True)
    for each in lse, theirs[1]:
        assert (each - true_lse).abs().max() < 1e-3 * (1 + true_lse.abs().max())
    cudnn = theirs[0], *backward_cudnn(do, q, k, v, *theirs, scale, True)
    for got, other, true in zip(found, cudnn, (true_o, *expected), strict=True):
        error, allowed = ((t.double() - true).norm() / true.norm() for t in (got, other))
        assert error < 2 * allowed + 1e-3, (error.item(), allowed.item())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["documents", "window", "both"])
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_that_see_less_against_fp64(dim, kind):
    q, k, v, do = operands(2, 1024, 6, 2, dim, dtype=torch.bfloat16, device="cuda")
    scale, visible = dim**-0.5, visible_keys(kind, 2, 1024, "cuda")
    expected, true_lse, gradients = truth(q, k, v, do, scale, visible)
    o, lse = launch_forward(q, k, v, scale, visible)
    assert (o - expected).norm() < 5e-3 * expected.norm() and (lse - true_lse).abs().max() < 1e-3
    dq, delta = launch_queries(do, q, k, v, o, lse, scale, visible)
    found = dq, *launch_keys(do, q, k, v, lse, delta, scale, visible)
    assert all((a - b).norm() < 1e-2 * b.norm() for a, b in zip(found, gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [OWN, "cudnn"])
def test_attention_with_either_backward_pass(name, monkeypatch):
    monkeypatch.setattr(
        "qtrain.kernels.attention.causal.choose",
        lambda op, key, names, run: name if op == "attention_backward" else names[0],
    )
    q, k, v, do = operands(2, 256, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    _, _, expected = truth(q, k, v, do, 0.2)
    inputs = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    attend(*inputs, None, 0.2).backward(do.transpose(1, 2))
    close([t.grad.transpose(1, 2) for t in inputs], expected, 0.02)


@pytest.mark.gpu
def test_deterministic_attention_has_the_bits_of_generation():
    """Which is why it does not take these kernels: generation computes rows as flash attention does."""
    use_deterministic_kernels()
    q, k, v, _ = (t.transpose(1, 2) for t in operands(2, 256, 4, 2, 64, dtype=torch.bfloat16, device="cuda"))
    assert supports_causal_attention(q, k, v)
    trained = attend(q.detach().requires_grad_(), k, v, None)
    with torch.no_grad():
        assert torch.equal(attend(q, k, v, None), trained)
