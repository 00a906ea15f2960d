"""The plain INT8 product: exact integers at every shape."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm.int8_mm import (
    EXACT_FP32_K,
    LONGEST_EXACT_K,
    TILINGS,
    fp32_products,
    int8_mm,
    int8_mm_ref,
    launch_int8_mm,
)
from qtrain.kernels.gemm.persistent import Tiling

SHAPES = [(1, 1, 1), (16, 32, 1), (1, 8, 16), (5, 7, 3), (17, 130, 257), (64, 48, 1000), (0, 8, 8), (3, 4, 0)]


def codes(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_exact_at_every_shape(m, n, k):
    a, b = codes(m, k, 0), codes(n, k, 1)
    for product in (int8_mm_ref(a, b), int8_mm(a, b)):
        assert product.dtype == torch.int32 and torch.equal(product.long(), a.long() @ b.long().t())


def test_products_in_fp32_are_exact():
    for k in (1, 40, EXACT_FP32_K, EXACT_FP32_K + 1, 5000):
        a, b = codes(7, k, 0), codes(9, k, 1)
        a[0], b[0], a[1], b[1] = -128, -128, 127, -127  # the largest sums
        product = fp32_products(a, b)
        assert product.dtype == torch.int32 and torch.equal(product.long(), a.long() @ b.long().t())


def test_longest_sum_fits():
    a, b = torch.full((1, LONGEST_EXACT_K), 127, dtype=torch.int8), torch.full((1, LONGEST_EXACT_K), -127).char()
    assert int8_mm(a, b).item() == -127 * 127 * LONGEST_EXACT_K


def check_kernel(device: str, shapes: list[tuple[int, int, int]], tilings: list[Tiling]) -> None:
    for seed, (m, n, k) in enumerate(shapes):
        a, b = codes(m, k, seed), codes(n, k, seed + 1)
        expected = (a.double() @ b.double().t()).int()  # exact: sums below 2**53
        for tiling in tilings:
            out = launch_int8_mm(a.to(device), b.to(device), tiling)
            assert torch.equal(out.cpu(), expected), (m, n, k, tiling.name)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    small = [Tiling(32, 64, 32, 4, 2), Tiling(64, 64, 64, 4, 2, subtiles=4), Tiling(32, 32, 32, 4, 2, subtiles=1)]
    check_kernel("cpu", [(1, 16, 16), (70, 100, 80)], small)


@pytest.mark.gpu
def test_kernel():
    """Every tiling, bitwise, on 200 random shapes and some large ones."""
    random = torch.Generator().manual_seed(0)
    sizes = (torch.randint(1, 40, (3,), generator=random).tolist() for _ in range(200))
    shapes = [(13 * m, 4 * n, 16 * k) for m, n, k in sizes] + [(4096, 4096, 1024), (8192, 896, 4864)]
    check_kernel("cuda", shapes, list(TILINGS.values()))


@pytest.mark.gpu
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_operator_takes_every_shape_on_gpu(m, n, k):
    a, b = codes(m, k, 0), codes(n, k, 1)
    for product in (int8_mm_ref(a.cuda(), b.cuda()), int8_mm(a.cuda(), b.cuda())):
        assert torch.equal(product.cpu().long(), a.long() @ b.long().t())


def test_operator():
    torch.library.opcheck(int8_mm, (codes(3, 16, 0), codes(8, 16, 1)))
