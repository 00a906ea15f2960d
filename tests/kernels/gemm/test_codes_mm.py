"""Products of codes with a thin matrix, against fp64: within the rounding of their result, and of what is scaled."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm.codes_mm import (
    LARGEST_RANK,
    codes_grad_mm,
    codes_grad_mm_ref,
    codes_mm,
    codes_mm_ref,
    launch_codes_grad_mm,
    launch_codes_mm,
    supports_codes_mm,
)
from tests.kernels.gemm.test_scaled_mm import E4M3, E5M2, codes

DTYPES = (torch.int8, E4M3, E5M2)
SHAPES = [(33, 304, 8), (1, 48, 5), (70, 128, 16)]


def operands(m: int, k: int, rank: int, dtype: torch.dtype, thin: torch.dtype, tensorwise=False, device="cpu"):
    """codes [M, K], scale, right [K, r] as a transposed view, left [M, r]."""
    generator = torch.Generator(device).manual_seed(m + k)
    scale = torch.rand(1 if tensorwise else m, generator=generator, device=device) * 1e-2 + 1e-3
    right, left = (torch.randn(size, generator=generator, device=device) for size in ((rank, k), (m, rank)))
    right[0, 0], left[0] = 100.0, left[0] * 1000  # outliers
    c = codes(m, k, dtype, 0, device)
    c[m // 2] = 0
    return c, scale, right.to(thin).t(), left.to(thin)


def check(codes: Tensor, scale: Tensor, right: Tensor, left: Tensor, found: Tensor, found_grad: Tensor) -> None:
    wide, factor = codes.double(), scale.double()[:, None]
    one = 2**-8 if found.dtype == torch.bfloat16 else 2**-22
    for out, terms, scaled in (
        (found, (factor * wide, right.double()), 0.0),
        (found_grad, (wide.t(), factor * left.double()), one),  # left times scale is rounded
    ):
        expected, size = terms[0] @ terms[1], terms[0].abs() @ terms[1].abs()
        assert ((out.double() - expected).abs() <= one * expected.abs() + (2**-18 + scaled) * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("thin", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("m,k,rank", SHAPES)
def test_against_fp64(dtype, thin, tensorwise, m, k, rank):
    c, scale, right, left = operands(m, k, rank, dtype, thin, tensorwise)
    found, found_grad = codes_mm(c, scale, right), codes_grad_mm(c, scale, left)
    assert found.dtype == found_grad.dtype == thin and found.shape == (m, rank) and found_grad.shape == (k, rank)
    check(c, scale, right, left, found, found_grad)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("m,k,rank", [(130, 304, 24), (1, 48, 8), (70, 1056, 16)])
def test_kernels_in_the_interpreter(dtype, m, k, rank):
    """In fp32, whose products the interpreter computes as they are; sums are in one part and in several."""
    for tensorwise in (False, True):
        c, scale, right, left = operands(m, k, rank, dtype, torch.float32, tensorwise)
        check(c, scale, right, left, launch_codes_mm(c, scale, right), launch_codes_grad_mm(c, scale, left))


def test_nonfinite_values_show():
    c, scale, right, left = operands(5, 16, 8, torch.int8, torch.float32)
    scale[3], c[3] = float("nan"), 1
    out = codes_mm(c, scale, right)
    assert out[3].isnan().all() and out[[0, 1, 2, 4]].isfinite().all()
    assert codes_grad_mm(c, scale, left).isnan().all()


@pytest.mark.parametrize("m,k,rank", [(0, 16, 4), (4, 0, 4), (4, 16, 0)])
def test_empty(m, k, rank):
    c, scale = torch.zeros(m, k, dtype=torch.int8), torch.ones(m)
    assert torch.equal(codes_mm(c, scale, torch.ones(k, rank)), torch.zeros(m, rank))
    assert torch.equal(codes_grad_mm(c, scale, torch.ones(m, rank)), torch.zeros(k, rank))


def test_what_the_kernels_take():
    class OnGpu(Tensor):
        is_cuda = True

    def takes(k: int = 64, rank: int = 16, dtype: torch.dtype = E4M3, thin: torch.dtype = torch.bfloat16) -> bool:
        c = torch.zeros(8, k, dtype=dtype).as_subclass(OnGpu)
        return supports_codes_mm(c, torch.zeros(k, rank, dtype=thin))

    assert takes() and takes(dtype=torch.int8) and takes(rank=LARGEST_RANK) and takes(rank=5)
    assert not (takes(k=40) or takes(rank=LARGEST_RANK + 1) or takes(thin=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tensorwise", [False, True])
def test_on_a_gpu(dtype, tensorwise):
    for m, k, rank in [(1, 64, 16), (300, 1040, 5), (1024, 4608, 48), (777, 18944, 16), (8192, 3584, LARGEST_RANK)]:
        c, scale, right, left = operands(m, k, rank, dtype, torch.bfloat16, tensorwise, "cuda")
        assert supports_codes_mm(c, right) and supports_codes_mm(c, left)
        found, found_grad = codes_mm(c, scale, right), codes_grad_mm(c, scale, left)
        check(c, scale, right, left, found, found_grad)
        # Parts are added in one order.
        assert torch.equal(found, codes_mm(c, scale, right)) and torch.equal(found_grad, codes_grad_mm(c, scale, left))


@pytest.mark.gpu
def test_what_no_kernel_takes_on_a_gpu():
    c, scale, right, left = operands(30, 40, 200, E4M3, torch.bfloat16, device="cuda")
    assert torch.equal(codes_mm(c, scale, right), codes_mm_ref(c, scale, right))
    assert torch.equal(codes_grad_mm(c, scale, left), codes_grad_mm_ref(c, scale, left))


def test_operators():
    c, scale, right, left = operands(5, 16, 8, torch.int8, torch.bfloat16)
    torch.library.opcheck(codes_mm, (c, scale, right))
    torch.library.opcheck(codes_grad_mm, (c, scale, left))
