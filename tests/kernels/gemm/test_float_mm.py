"""FP16 accumulation: what its error may be, and that it is FP16's and not FP32's."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm.float_mm import STEP_K, TILINGS, fp16_mm, fp32_mm, launch_fp16_mm
from qtrain.kernels.gemm.persistent import Tiling

SHAPES = [(1, 1, 1), (1, 8, 8), (5, 7, 3), (17, 130, 257), (64, 48, 1000), (0, 8, 8)]


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, k, generator=generator).mul(k**-0.25).half() for rows in (m, n))


def assert_close(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Against fp64: each step of the sum rounds by at most half an ulp of a partial sum, and no partial sum exceeds the
    sum of magnitudes."""
    a, b = a.double(), b.double()
    size = a.abs() @ b.abs().t()
    roundings = 1 + 2 * (a.shape[1] / STEP_K) ** 0.5  # they add up like a random walk; 2 for its tail
    assert out.dtype == torch.float16
    assert ((out.double().cpu() - a @ b.t()).abs() <= 2**-11 * roundings * size + 2**-24).all()


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_against_fp64(m, n, k):
    a, b = operands(m, n, k)
    assert_close(fp16_mm(a, b), a, b)


def test_the_sum_is_kept_in_fp16():
    """Above 2048 FP16 has a spacing of 2: adding 1 is a tie, and is lost. Above 65,504 is Inf."""
    a = torch.ones(1, 16 * STEP_K, dtype=torch.float16)
    b = torch.full_like(a, 1 / STEP_K)
    a[0, 0], b[0, :STEP_K] = 2048, 1
    assert fp16_mm(a, b).item() == 2064
    large = torch.full((1, STEP_K), 100.0, dtype=torch.float16)
    assert fp16_mm(large, large).isinf().all()


def check_kernel(device: str, shapes: list[tuple[int, int, int]], tilings: list[Tiling]) -> None:
    for seed, (m, n, k) in enumerate(shapes):
        a, b = operands(m, n, k, seed)
        for tiling in tilings:
            assert_close(launch_fp16_mm(a.to(device), b.to(device), tiling), a, b)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    small = [Tiling(32, 64, 32, 4, 2), Tiling(64, 32, 16, 4, 2, subtiles=1)]
    check_kernel("cpu", [(1, 16, 16), (70, 104, 80)], small)


@pytest.mark.gpu
def test_kernel():
    random = torch.Generator().manual_seed(0)
    sizes = (torch.randint(1, 40, (3,), generator=random).tolist() for _ in range(200))
    shapes = [(13 * m, 8 * n, 8 * k) for m, n, k in sizes] + [(4096, 4096, 1024), (2048, 896, 4864)]
    check_kernel("cuda", shapes, list(TILINGS.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_operator_takes_every_shape_on_gpu(m, n, k):
    a, b = operands(m, n, k)
    assert_close(fp16_mm(a.cuda(), b.cuda()), a, b)


def test_operator():
    torch.library.opcheck(fp16_mm, operands(3, 8, 16))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize("shape", [(1, 64, 8), (130, 256, 60), (1024, 128, 2048), (64, 1024, 96)])
def test_the_error_is_that_of_fp32(device, dtypes, shape):
    """The terms of an fp32 operand side by side (1024 x 128 x 2048), and one below the other."""
    m, k, n = shape
    g = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=g).to(device, getattr(torch, dtypes[0]))
    b = torch.randn(k, n, generator=g).to(device, getattr(torch, dtypes[1]))
    b[0] *= 100
    truth = a.double() @ b.double()
    found = fp32_mm(a, b)
    assert found.dtype == torch.float32
    bound = 2.0**-15 if dtypes[0] != dtypes[1] else 2.0**-18
    size = (a.double().abs() @ b.double().abs()).max()
    assert (found - truth).abs().max() <= bound * size
    rounded = fp32_mm(a, b, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded - truth).abs() <= 2.0**-8 * truth.abs() + bound * size).all()
