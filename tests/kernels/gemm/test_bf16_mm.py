"""bf16 products by cuBLASLt's algorithms against fp64, in every layout, with a bias, and added to what is in memory."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.gemm import bf16_mm as module
from qtrain.kernels.gemm.bf16_mm import bf16_mm, bf16_mm_into
from qtrain.kernels.gemm.cublas_lt import MOST_ALGORITHMS, plain_mm, takes_plain_mm

SHAPES = [(1, 1, 1), (1, 64, 64), (5, 7, 3), (304, 272, 1040), (130, 256, 61), (0, 8, 8)]
LAYOUTS = list(itertools.product((True, False), repeat=2))
"""Whether A and B are contiguous along K."""


def operands(m: int, n: int, k: int, layouts: tuple[bool, bool] = (True, True), device: str = "cpu") -> tuple:
    """A [M, K] and B [K, N] with outliers and a row of zeros."""
    g = torch.Generator().manual_seed(m + n + k)
    a, b = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
    a[: m // 2, :1] *= 100
    b[:1] = 0
    made = [t.to(device, torch.bfloat16) for t in (a, b)]
    made = [t if along_k else t.t().contiguous().t() for t, along_k in zip(made, layouts, strict=True)]
    return made[0], made[1].t()


def assert_close(out: Tensor, a: Tensor, b: Tensor, added: Tensor | float = 0) -> None:
    """Products of bf16 are exact in fp32. Tensor cores cut their sum after every 16 of them, to 24 bits; it is rounded
    to out's dtype, and where something is added already before that: so cuBLAS with few rows does (an H200: 10.0478 +
    0.4180 is 10.5 in bf16, not 10.4375)."""
    product, size = a.double() @ b.double(), a.double().abs() @ b.double().abs() + torch.as_tensor(added).abs()
    truth, twice = product + added, isinstance(added, Tensor)
    eps, cuts = 2**-8 if out.dtype == torch.bfloat16 else 2**-23, a.shape[1] // 16 + 2
    rounded = truth.abs() + product.abs() if twice else truth.abs()
    assert ((out.double() - truth).abs() <= eps * rounded + cuts * 2**-23 * size).all()


def mean_error(out: Tensor, a: Tensor, b: Tensor) -> float:
    return (out.double() - a.double() @ b.double()).abs().mean().item()


@pytest.fixture
def _sums_in_fp32() -> Iterator[None]:
    """PyTorch lets cuBLAS add parts of K in bf16: torch.addmm with K = 61 made -552 of -546.77 (an H200)."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.usefixtures("_sums_in_fp32")
@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operators_take_every_shape(m, n, k, layouts, device, monkeypatch):
    monkeypatch.setattr(module, "LEAST_PRODUCTS", 0)
    a, b = operands(m, n, k, layouts, device)
    assert_close(bf16_mm(a, b), a, b)
    bias = torch.linspace(-2, 2, n, device=device).bfloat16()
    assert_close(bf16_mm(a, b, bias), a, b, bias.double())
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.full((m, n), float("nan"), device=device, dtype=dtype)
        bf16_mm_into(out, a, b)  # what was there is not read
        assert_close(out, a, b)
        once = out.double()
        bf16_mm_into(out, a, b, keep=True)
        assert_close(out, a, b, once)


def test_other_dtypes():
    a, b = (t.float() for t in operands(5, 7, 3))
    assert torch.equal(bf16_mm(a, b), a @ b)


@pytest.mark.parametrize("bias", [None, torch.zeros(7, dtype=torch.bfloat16)])
def test_opcheck(bias):
    a, b = operands(5, 7, 3)
    torch.library.opcheck(bf16_mm, (a, b, bias))
    torch.library.opcheck(bf16_mm_into, (torch.zeros(5, 7), a, b, True))


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("algorithm", range(MOST_ALGORITHMS))
def test_algorithms(layouts, algorithm):
    for m, n, k in [(1, 64, 64), (304, 272, 1040), (1152, 896, 8192), (3584, 2560, 4112)]:
        a, b = operands(m, n, k, layouts, "cuda")
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float32):
            before = torch.randn(m, n, device="cuda", dtype=dtype)
            if not takes_plain_mm(a, b.t(), before):
                assert m == 1 and not layouts[0]  # a column of one element each
                continue
            found = plain_mm(a, b.t(), before.clone(), algorithm=algorithm)
            assert_close(found, a, b)
            # No sums of fewer bits than PyTorch's: it tells an algorithm that adds parts of K in bf16.
            torchs = torch.mm(a, b) if dtype == torch.bfloat16 else torch.mm(a, b, out_dtype=dtype)
            assert mean_error(found, a, b) <= 1.5 * mean_error(torchs, a, b) + 1e-9
            added = plain_mm(a, b.t(), before.clone(), algorithm=algorithm, add=True)
            assert_close(added, a, b, before.double())
        with_bias = plain_mm(a, b.t(), torch.empty_like(bias.expand(m, n)), algorithm=algorithm, bias=bias)
        assert_close(with_bias, a, b, bias.double())


@pytest.mark.gpu
def test_nonfinite_numbers_stay_in_their_rows():
    a, b = operands(256, 512, 384, device="cuda")
    a[3, 5], a[7, 0] = float("nan"), float("inf")
    for algorithm in range(MOST_ALGORITHMS):
        out = plain_mm(a, b.t(), torch.empty(256, 512, device="cuda", dtype=torch.bfloat16), algorithm=algorithm)
        rows = (~out.isfinite()).any(dim=1).nonzero().flatten().tolist()
        assert rows == [3, 7] and out[3].isnan().all()


@pytest.mark.gpu
def test_what_is_not_taken():
    a, b = operands(64, 64, 64, device="cuda")
    out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    assert takes_plain_mm(a, b.t(), out)
    refused = [
        (a[::2], b.t()[::2], out[:32, :32]),  # every second row is a stride like any other
        (a[:, ::2], b.t()[:, ::2], out),
        (a[:, 1:33], b.t()[:, 1:33], out),
        (a.float(), b.t(), out),
        (a, b.t(), out.t()),
        (a.cpu(), b.t().cpu(), out.cpu()),
    ]
    assert [takes_plain_mm(*operands) for operands in refused] == [True, False, False, False, False, False]


@pytest.mark.gpu
def test_a_large_product_is_chosen(monkeypatch, tmp_path):
    """Also in a CUDA graph, and equal to what PyTorch computes but for the order of fp32 sums."""
    monkeypatch.setenv("QTRAIN_CACHE", str(tmp_path))
    asked = []
    choose = module.choose
    monkeypatch.setattr(module, "choose", lambda op, *rest: asked.append(op) or choose(op, *rest))
    a, b = operands(2048, 2048, 1024, device="cuda")
    assert_close(bf16_mm(a, b), a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bf16_mm(a, b)
    graph.replay()
    assert_close(out, a, b)
    assert asked == ["bf16_mm", "bf16_mm"]
    small = operands(64, 64, 64, device="cuda")
    assert torch.equal(bf16_mm(*small), F.linear(small[0], small[1].t())) and len(asked) == 2
