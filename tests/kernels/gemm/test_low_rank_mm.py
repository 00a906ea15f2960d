"""A product of 8-bit codes and one of low rank: the sum within the bound of its formats, by every implementation."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm import low_rank_mm as module
from qtrain.kernels.gemm.low_rank_mm import (
    LARGEST_RANK,
    LOW_RANK_TILINGS,
    TILINGS,
    TWO_PASSES,
    low_rank_mm,
    low_rank_mm_names,
    low_rank_mm_ref,
    plain_low_rank_mm,
)
from qtrain.kernels.gemm.persistent import Tiling, launch_persistent_mm
from tests.kernels.gemm.test_scaled_mm import DTYPES, E4M3, operands, truth

SMALL = Tiling(64, 64, 64, 4, 3)


def low_rank(m: int, n: int, rank: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(9)
    left, right = (torch.randn(size, rank, generator=generator, device=device) for size in (m, n))
    left[0] *= 100  # an outlier
    return left.to(dtype), right.to(dtype)


def check(out: Tensor, a, b, scale_a, scale_b, left, right, bias=None, slack: float = 0.0) -> None:
    """out against fp64. slack: of FP8's accumulators, relative to the sum of magnitudes."""
    expected, size = truth(a, b, scale_a, scale_b)
    added = torch.zeros((), dtype=torch.double) if bias is None else bias.double()
    expected = expected + left.double() @ right.double().t() + added
    size = size + left.double().abs() @ right.double().abs().t() + added.abs()  # two passes round a sum that has it
    rounding = 2**-22 if out.dtype == torch.float32 else 2**-8
    assert ((out.double() - expected).abs() <= rounding * expected.abs() + (2**-21 + slack) * size).all()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m,n,k,rank", [(33, 24, 304, 8), (1, 20, 300, 5), (40, 16, 64, 0)])
def test_against_fp64(dtypes, tensorwise, dtype, m, n, k, rank):
    codes, factors = operands(m, n, k, dtypes, tensorwise=tensorwise), low_rank(m, n, rank, dtype)
    bias = torch.randn(n)
    out = low_rank_mm(*codes, *factors, bias)
    assert out.dtype == dtype and out.shape == (m, n)
    check(out, *codes, *factors, bias)


def test_nonfinite_values_show():
    codes, (left, right) = operands(5, 8, 16, DTYPES[0]), low_rank(5, 8, 8, torch.float32)
    left[3, 2], right[1, 0] = float("inf"), float("nan")
    out = low_rank_mm(*codes, left, right)
    assert not out[3].isfinite().any() and out[:, 1].isnan().all()
    assert out[[0, 1, 2, 4]][:, [0, 2, 3, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("m,n,k", [(0, 8, 16), (8, 0, 16), (8, 8, 0)])
def test_empty(m, n, k):
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8)
    left, right = low_rank(m, n, 4, torch.float32) if m else (torch.ones(0, 4), torch.ones(n, 4))
    assert torch.equal(low_rank_mm(a, b, torch.ones(m), torch.ones(n), left, right), left @ right.t())


def test_what_the_kernel_cannot_take_has_two_passes(monkeypatch):
    monkeypatch.setattr(module, "has_fp8", lambda device: True)

    def names(k: int = 64, n: int = 64, rank: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        a, b = torch.zeros(8, k, dtype=E4M3), torch.zeros(n, k, dtype=E4M3)
        return low_rank_mm_names(a, b, torch.zeros(8, rank, dtype=dtype))

    assert len(names()) == len(TILINGS) + 1 and names()[-1] == TWO_PASSES
    assert TWO_PASSES not in names(rank=LARGEST_RANK)[:-1] and len(names(rank=LARGEST_RANK)) > 1
    for refused in ({"k": 40}, {"n": 20}, {"rank": 12}, {"rank": LARGEST_RANK + 8}, {"dtype": torch.float32}):
        assert names(**refused) == [TWO_PASSES], refused


@pytest.mark.interpreter
@pytest.mark.parametrize("dtypes", DTYPES[:2])
@pytest.mark.parametrize("m,n,k,rank", [(130, 72, 208, 16), (1, 128, 64, 8), (65, 64, 144, 24)])
def test_kernel_in_the_interpreter(dtypes, m, n, k, rank):
    """In fp32, whose products the interpreter computes as they are."""
    codes, factors = operands(m, n, k, dtypes), low_rank(m, n, rank, torch.float32)
    (a, b, *scales), bias, out = codes, torch.randn(n), torch.full((m, n), float("nan"))
    launch_persistent_mm(a, b, out, SMALL, tuple(scales), bias=bias, low_rank=factors)
    torch.testing.assert_close(out, low_rank_mm_ref(*codes, *factors, torch.float32, bias), rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", [*TILINGS, *LOW_RANK_TILINGS, TWO_PASSES])
@pytest.mark.parametrize("tensorwise", [False, True])
def test_every_implementation(dtypes, name, tensorwise, monkeypatch):
    monkeypatch.setattr(module, "choose", lambda op, key, names, run: name)
    ran = 0
    for m, n, k in [(1, 64, 64), (300, 264, 1040), (128, 256, 208), (1024, 4608, 3584), (777, 3584, 18944)]:
        for rank in (8, 16, 48, LARGEST_RANK):
            codes = operands(m, n, k, dtypes, tensorwise=tensorwise, device="cuda")
            factors = low_rank(m, n, rank, torch.bfloat16, "cuda")
            if name not in low_rank_mm_names(codes[0], codes[1], factors[0]):
                continue
            bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
            out = low_rank_mm(*codes, *factors, bias)
            # As in `test_fp8_kernel`; two passes round twice.
            rounding = 2**-8 if name == TWO_PASSES else 2**-12 if dtypes[0] == torch.int8 else 2**-9
            check(out, *codes, *factors, bias, slack=rounding)
            ran += 1
    assert ran


def test_operator():
    codes, factors = operands(5, 16, 32, DTYPES[0]), low_rank(5, 16, 8, torch.bfloat16)
    torch.library.opcheck(low_rank_mm, (*codes, *factors))


def check_plain(device: str) -> None:
    """Against fp64, B as both GEMMs of a linear have it; of which the first one is rounded, then the sum."""
    for m, n, k, rank in [(33, 24, 300, 8), (1, 20, 64, 5), (7, 16, 8, 0), (0, 8, 8, 4)]:
        for dtype in (torch.float32, torch.bfloat16):
            a, b = (t.to(device, dtype) for t in (torch.randn(m, k), torch.randn(n, k)))
            left, right = (low_rank(m, n, rank, dtype, device)) if m else (a.new_ones(0, rank), a.new_ones(n, rank))
            bias = torch.randn(n).to(device, dtype)
            for weight, added in ((b, bias), (b.t().contiguous().t(), None)):
                out = plain_low_rank_mm(a, weight, left, right, added)
                product = a.double() @ b.double().t() + (0 if added is None else added.double())
                expected = product + left.double() @ right.double().t()
                size = a.double().abs() @ b.double().abs().t() + left.double().abs() @ right.double().abs().t() + 3
                rounding = torch.finfo(dtype).eps * (product.abs() + expected.abs())
                assert out.dtype == dtype and ((out.double() - expected).abs() <= rounding + 2**-20 * size).all()


def test_plain():
    check_plain("cpu")
    a, b, left, right = torch.randn(5, 8), torch.randn(8, 6).t(), torch.randn(5, 4), torch.randn(4, 6).t()
    torch.library.opcheck(plain_low_rank_mm, (a, b, left, right))
    left[2, 1] = float("nan")
    assert plain_low_rank_mm(a, b, left, right).isnan().any(1).tolist() == [False, False, True, False, False]


@pytest.mark.gpu
def test_plain_on_gpu():
    check_plain("cuda")
