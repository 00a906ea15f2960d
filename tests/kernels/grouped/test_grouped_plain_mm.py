"""Grouped products in high precision: each group's dense product, of operands in either order."""

import pytest
import torch
from torch.nn import functional as F

from qtrain.kernels.gemm.persistent import Tiling
from qtrain.kernels.grouped.grouped_plain_mm import (
    ROWS_TILINGS,
    SUMS_TILINGS,
    k_grouped_plain_mm,
    m_grouped_plain_mm,
)
from qtrain.kernels.grouped.per_group import matrices
from qtrain.kernels.grouped.persistent import launch_k_grouped, launch_m_grouped
from qtrain.kernels.numerics.formats import dequantize_mx
from qtrain.kernels.quantize.mx import mx_mm, quantize_mx
from tests.kernels.grouped.cases import ROUTINGS, routed, spans


def tensors(g, n, k, dtype, seed=0):
    """x [R, K], w [E * N, K], dy [R, N]."""
    device = g.starts.device
    generator = torch.Generator(device).manual_seed(seed)
    shapes = ((g.rows, k), (g.count * n, k), (g.rows, n))
    return [torch.randn(*shape, generator=generator, device=device).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_group_is_the_dense_product(dtype, routing):
    g, n, k = routed(routing), 24, 40
    x, w, dy = tensors(g, n, k, dtype)
    y = m_grouped_plain_mm(x, w, g.group_of_block, g.starts)
    dx = m_grouped_plain_mm(dy, w.t(), g.group_of_block, g.starts)
    copied = m_grouped_plain_mm(dy, w.t().contiguous(), g.group_of_block, g.starts)
    dw = k_grouped_plain_mm(dy.t(), x.t(), g.starts, torch.float32).view(g.count, n, k)
    last = int(g.starts[-1])
    assert (y[last:] == 0).all() and (dx[last:] == 0).all()
    assert torch.allclose(copied.float(), dx.float(), rtol=1e-2, atol=1e-2)
    for (e, s, t), w_e in zip(spans(g), w.view(g.count, n, k), strict=True):
        assert torch.equal(y[s:t], F.linear(x[s:t], w_e))
        assert torch.equal(dx[s:t], dy[s:t] @ w_e)
        assert torch.equal(dw[e], dy[s:t].float().t() @ x[s:t].float())
        truth = dy[s:t].double().t() @ x[s:t].double()
        size = dy[s:t].double().abs().t() @ x[s:t].double().abs()
        assert ((dw[e].double() - truth).abs() <= 2**-20 * size).all()


def test_mx_codes_dequantized():
    """`mx_mm` of each group, in every role; blocks of 32 along rows do not straddle groups."""
    g, n, k = routed("some_empty"), 64, 96
    x, w, dy = tensors(g, n, k, torch.float32)
    pairs = [quantize_mx(t) for t in (x, w, dy, w.t().contiguous(), dy.t().contiguous(), x.t().contiguous())]
    values = [dequantize_mx(*pair, torch.bfloat16) for pair in pairs]
    y, dx = (m_grouped_plain_mm(values[i], values[j], g.group_of_block, g.starts) for i, j in ((0, 1), (2, 3)))
    dw = k_grouped_plain_mm(values[4], values[5], g.starts, torch.float32).view(g.count, n, k)
    (xc, xs), (wc, ws), (dc, ds), (wtc, wts), (dtc, dts), (xtc, xts) = pairs
    for e, s, t in spans(g):
        mine, blocks, sums = slice(e * n, e * n + n), slice(e * n // 32, (e + 1) * n // 32), slice(s // 32, t // 32)
        assert torch.equal(y[s:t], mx_mm(xc[s:t], wc[mine], xs[s:t], ws[mine], torch.bfloat16))
        own = mx_mm(dc[s:t], wtc[:, mine].contiguous(), ds[s:t], wts[:, blocks], torch.bfloat16)
        assert torch.equal(dx[s:t], own)
        own = mx_mm(dtc[:, s:t].contiguous(), xtc[:, s:t].contiguous(), dts[:, sums], xts[:, sums], torch.float32)
        assert torch.equal(dw[e], own)


def test_no_rows():
    g = routed("random", tokens=0)
    x, w, dy = tensors(g, 16, 32, torch.bfloat16)
    assert m_grouped_plain_mm(x, w, g.group_of_block, g.starts).shape == (0, 16)
    assert (k_grouped_plain_mm(dy.t(), x.t(), g.starts, torch.bfloat16) == 0).all()


@pytest.mark.filterwarnings("ignore")
def test_operators():
    g = routed("random")
    x, w, dy = tensors(g, 16, 32, torch.float32)
    torch.library.opcheck(m_grouped_plain_mm, (x, w, g.group_of_block, g.starts))
    torch.library.opcheck(m_grouped_plain_mm, (dy, w.t(), g.group_of_block, g.starts))
    torch.library.opcheck(k_grouped_plain_mm, (dy.t(), x.t(), g.starts, torch.bfloat16))


@pytest.mark.interpreter
def test_column_major_operands_in_the_interpreter():
    """Transposes are views. INT8 stands for bf16, whose products the interpreter gets wrong."""
    g, n, k, tiling = routed("some_empty"), 80, 144, Tiling(128, 64, 64, 4, 2)
    x, w, dy = (t.mul(20).round().clamp(-127, 127).to(torch.int8) for t in tensors(g, n, k, torch.float32))
    dx, dw = torch.full((g.rows, k), 7, dtype=torch.int32), torch.full((g.count, n, k), 7, dtype=torch.int32)
    launch_m_grouped(dy, matrices(w.t(), n, g.count), dx, tiling, g.group_of_block, g.starts)
    launch_k_grouped(dy.t(), x.t(), dw, tiling, g.starts)
    assert (dx[int(g.starts[-1]) :] == 0).all()
    for (e, s, t), w_e in zip(spans(g), w.view(g.count, n, k).double(), strict=True):
        assert torch.equal(dx[s:t].double(), dy[s:t].double() @ w_e)
        assert torch.equal(dw[e].double(), dy[s:t].double().t() @ x[s:t].double())


def close(out, expected, size):
    assert ((out.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-16 * size).all()


def check_products(g, n, k, rows_mm, sums_mm):
    """rows_mm(a, b), sums_mm(a, b), against fp64."""
    x, w, dy = tensors(g, n, k, torch.bfloat16)
    y, dx, dw = rows_mm(x, w), rows_mm(dy, w.t()), sums_mm(dy.t(), x.t())
    copied = rows_mm(dy, w.t().contiguous()), sums_mm(dy.t().contiguous(), x.t().contiguous())
    last = int(g.starts[-1])
    assert (y[last:] == 0).all() and (dx[last:] == 0).all()
    for (e, s, t), w_e in zip(spans(g), w.view(g.count, n, k).double(), strict=True):
        xs, dys = x[s:t].double(), dy[s:t].double()
        close(y[s:t], xs @ w_e.t(), xs.abs() @ w_e.abs().t())
        for out in (dx, copied[0]):
            close(out[s:t], dys @ w_e, dys.abs() @ w_e.abs())
        for out in (dw, copied[1]):
            close(out.view(g.count, n, k)[e], dys.t() @ xs, dys.abs().t() @ xs.abs())


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, groups, tokens", [(80, 144, 4, 150), (1152, 896, 8, 900), (2048, 768, 16, 4000)])
def test_kernels_on_gpu(n, k, groups, tokens):
    for routing in ROUTINGS:
        g = routed(routing, groups, tokens, "cuda")

        def rows_mm(tiling, a, b, g=g):
            w = matrices(b, a.shape[1], g.count)
            return launch_m_grouped(a, w, a.new_full((g.rows, w.shape[1]), 7.0), tiling, g.group_of_block, g.starts)

        def sums_mm(tiling, a, b, g=g):
            return launch_k_grouped(a, b, a.new_full((g.count, len(a), len(b)), 7.0), tiling, g.starts)

        for tiling in ROWS_TILINGS.values():
            check_products(g, n, k, lambda *ab, t=tiling: rows_mm(t, *ab), lambda *ab, t=tiling: sums_mm(t, *ab))
        for tiling in SUMS_TILINGS.values():
            check_products(
                g, n, k,
                lambda a, b, g=g: m_grouped_plain_mm(a, b, g.group_of_block, g.starts),
                lambda *ab, t=tiling: sums_mm(t, *ab),
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["triton", "cublas", "ref"])
def test_operators_on_gpu(family, monkeypatch):
    monkeypatch.setenv("QTRAIN_IMPL", family)
    for n, k in ((80, 144), (7, 5), (272, 144)):
        for routing in ROUTINGS:
            g = routed(routing, device="cuda")
            for out_dtype in (torch.bfloat16, torch.float32):
                check_products(
                    g, n, k,
                    lambda a, b, g=g: m_grouped_plain_mm(a, b, g.group_of_block, g.starts),
                    lambda a, b, g=g, d=out_dtype: k_grouped_plain_mm(a, b, g.starts, d),
                )  # fmt: skip
