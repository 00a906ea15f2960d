"""Rows of tokens to rows of groups and back, and the gradient of a route's weight."""

import pytest
import torch

from qtrain.kernels.grouped.permute import (
    combine_rows,
    combine_rows_ref,
    launch_combine_rows,
    launch_route_weight_grad,
    route_weight_grad,
    route_weight_grad_ref,
    weights_of_rows,
)
from qtrain.kernels.grouped.token_permutation import group_rows
from qtrain.kernels.quantize.gather_rows import gather_rows, gather_rows_ref, launch_gather_rows
from qtrain.kernels.swiglu.swiglu import router_dots_ref, swiglu


def routes(tokens, per_token, groups, seed=0, device="cpu"):
    """TokenPermutation, and weights fp32 [T, k] of which one is zero."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, groups, generator=generator).topk(per_token).indices
    weights = torch.rand(tokens, per_token, generator=generator)
    weights[tokens // 2, 0] = 0
    return group_rows(experts.to(device), groups), weights.to(device)


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_loops(dtype):
    """A row is its token's, times its weight; a token's sum is taken in the order of k, in fp32."""
    g, weights = routes(20, 3, 5)
    x, y = randn(20, 12, dtype=dtype), randn(g.rows, 12, seed=1, dtype=dtype)
    rows, weighted = gather_rows(x, g.token_of_row), gather_rows(x, g.token_of_row, weights_of_rows(weights, g))
    found, plain = combine_rows(y, weights, g.row_of_topk), combine_rows(y, None, g.row_of_topk)
    held = torch.zeros(g.rows, dtype=torch.bool)
    for token in range(20):
        total, total_plain = torch.zeros(12), torch.zeros(12)
        for k, row in enumerate(g.row_of_topk[token].tolist()):
            held[row] = True
            assert torch.equal(rows[row], x[token])
            assert torch.equal(weighted[row], (x[token].float() * weights[token, k]).to(dtype))
            total, total_plain = total + y[row].float() * weights[token, k], total_plain + y[row].float()
        assert torch.equal(found[token], total.to(dtype)) and torch.equal(plain[token], total_plain.to(dtype))
    assert (rows[~held] == 0).all() and (weighted[~held] == 0).all()


def test_gradients_of_each_other():
    """<combine(y, w), x> = <y, gather(x, w)>."""
    g, weights = routes(30, 2, 4)
    x, y = randn(30, 16), randn(g.rows, 16, seed=1)
    left = (combine_rows(y, weights, g.row_of_topk).double() * x).sum()
    right = (y.double() * gather_rows(x, g.token_of_row, weights_of_rows(weights, g))).sum()
    assert torch.allclose(left, right)


def test_weight_gradient_is_autograds():
    g, weights = routes(30, 2, 4)
    weights.requires_grad_()
    gate_up, down, dout = randn(g.rows, 2 * 24), randn(16, 24, seed=1), randn(30, 16, seed=2)
    h = swiglu(gate_up)
    combined = (h @ down.t())[g.row_of_topk.long()] * weights.unsqueeze(-1)
    combined.sum(1).backward(dout)
    dh = gather_rows(dout, g.token_of_row, weights_of_rows(weights.detach(), g)) @ down
    found = route_weight_grad(router_dots_ref(dh, gate_up), weights.detach(), g.row_of_topk)
    zero = weights == 0
    assert zero.any() and (found[zero] == 0).all()
    assert torch.allclose(found[~zero], weights.grad[~zero], rtol=1e-3, atol=1e-4)


def test_a_nan_stays_with_its_token():
    g, weights = routes(20, 2, 4)
    x = randn(20, 8)
    x[3, 2] = float("nan")
    rows = gather_rows(x, g.token_of_row)
    assert rows.isnan().sum() == 2
    assert combine_rows(rows, weights, g.row_of_topk).isnan().nonzero().tolist() == [[3, 2]]


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    g = group_rows(torch.zeros(tokens, 1, dtype=torch.int64), 3)
    x, weights = randn(tokens, 8), torch.ones(tokens, 1)
    rows = gather_rows(x, g.token_of_row)
    assert torch.equal(combine_rows(rows, weights, g.row_of_topk), x)
    grad = route_weight_grad(torch.ones(g.rows, 8), weights, g.row_of_topk)
    assert grad.shape == (tokens, 1)


def test_operators():
    g, weights = routes(20, 2, 4)
    x, y = randn(20, 8), randn(g.rows, 8)
    torch.library.opcheck(gather_rows, (x, g.token_of_row, weights_of_rows(weights, g)))
    torch.library.opcheck(combine_rows, (y, weights, g.row_of_topk))
    torch.library.opcheck(route_weight_grad, (y, weights, g.row_of_topk))


def test_routes_without_a_row():
    """To a group of another process: of no weight in a sum, and without a gradient. No other row is read for them."""
    whole, weights = routes(30, 3, 6)
    g = whole.part(2, 2)
    other = g.row_of_topk < 0
    assert other.any() and not other.all()
    y = randn(whole.rows, 16)
    y[g.token_of_row < 0] = float("nan")
    kept = torch.where(other, 0.0, weights)
    zeros = torch.where((g.token_of_row < 0)[:, None], 0.0, y)
    assert torch.equal(combine_rows(y, weights, g.row_of_topk), combine_rows(zeros, kept, whole.row_of_topk))
    assert torch.equal(weights_of_rows(weights, g), weights_of_rows(kept, whole))
    grad, of_all = (route_weight_grad(y.abs(), weights, p.row_of_topk) for p in (g, whole))
    assert (grad[other] == 0).all() and torch.equal(grad[~other], of_all[~other])


def check_kernels(columns, dtype, device, tokens=40, per_token=2, groups=4):
    g, weights = routes(tokens, per_token, groups, columns, device)
    x, y = (randn(n, columns, seed=n, dtype=dtype, device=device) for n in (tokens, g.rows))
    check_rows(g, weights, x, y)
    check_rows(g.part(1, groups // 2), weights, x, y)


def check_rows(g, weights, x, y):
    for w in (None, weights):
        of_row = None if w is None else weights_of_rows(w, g)
        expected = gather_rows_ref(x, g.token_of_row, of_row)
        assert torch.equal(launch_gather_rows(x, g.token_of_row, of_row), expected)
        assert torch.equal(launch_combine_rows(y, w, g.row_of_topk), combine_rows_ref(y, w, g.row_of_topk))
    dots = y.float()
    found = launch_route_weight_grad(dots, weights, g.row_of_topk)
    expected = route_weight_grad_ref(dots, weights, g.row_of_topk)
    size = dots.abs().sum(1)[g.row_of_topk.long()] / weights
    assert ((found - expected).abs() <= 2**-18 * size.where((weights != 0) & (g.row_of_topk >= 0), 0.0)).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("columns", [8, 40])
def test_kernels_in_the_interpreter(columns):
    check_kernels(columns, torch.float32, "cpu", tokens=10, groups=3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 13, 768, 2048, 7168])
def test_kernels_on_gpu(columns, dtype):
    check_kernels(columns, dtype, "cuda", 1000, 8, 32)
    check_kernels(columns, dtype, "cuda", 1, 1, 4)
