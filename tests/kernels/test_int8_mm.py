"""The INT8 product: exact integers, scales applied once, sums longer than int32 can hold."""

import pytest
import torch

from qtrain.kernels.int8_mm import (
    LONGEST_EXACT_K,
    int8_mm_ref,
    launch_scaled_int8_mm,
    scaled_int8_mm,
    scaled_int8_mm_ref,
)


@pytest.mark.parametrize(
    "m,n,k", [(1, 1, 1), (16, 32, 1), (1, 8, 16), (5, 7, 3), (17, 130, 257), (64, 48, 1000), (0, 8, 8)]
)
def test_exact_at_every_shape(m, n, k):
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    assert torch.equal(int8_mm_ref(a, b).long(), a.long() @ b.long().t())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_scaled_against_fp64(out_dtype):
    a = torch.randint(-127, 128, (33, 300), dtype=torch.int8)
    b = torch.randint(-127, 128, (20, 300), dtype=torch.int8)
    scale_a, scale_b = torch.rand(33) * 1e-2, torch.rand(20) * 1e-2
    truth = (a.double() @ b.double().t()) * scale_a.double()[:, None] * scale_b.double()[None, :]
    out = scaled_int8_mm_ref(a, b, scale_a, scale_b, out_dtype)
    assert out.dtype == out_dtype
    tolerance = 3 * 2**-24 if out_dtype == torch.float32 else 2**-8
    assert ((out.double() - truth).abs() <= tolerance * truth.abs() + 1e-30).all()


def test_longest_sum_does_not_overflow():
    """All codes at their largest, K beyond what int32 holds: the total is still right."""
    k = LONGEST_EXACT_K + 1000
    a, b = torch.full((1, k), 127, dtype=torch.int8), torch.full((1, k), -127, dtype=torch.int8)
    out = scaled_int8_mm_ref(a, b, torch.ones(1), torch.ones(1), torch.float32)
    assert out.item() == pytest.approx(-127 * 127 * k, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (1, 8, 16), (5, 7, 3), (17, 130, 257), (64, 48, 1000)])
def test_exact_on_gpu(m, n, k):
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    assert torch.equal(int8_mm_ref(a.cuda(), b.cuda()).cpu().long(), a.long() @ b.long().t())


def check_kernel(device, out_dtype, shapes):
    """Bitwise equal to the definition: the sum is exact, and both round the same fp32 product."""
    generator = torch.Generator().manual_seed(1)
    for m, n, k in shapes:
        a = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator).to(device)
        b = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator).to(device)
        scales = torch.rand(m, generator=generator).to(device), torch.rand(n, generator=generator).to(device)
        out = launch_scaled_int8_mm(a, b, *scales, out_dtype)
        assert torch.equal(out, scaled_int8_mm_ref(a, b, *scales, out_dtype)), (m, n, k)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu", torch.float32, [(1, 16, 16), (130, 272, 144), (3, 520, 400)])


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_kernel(out_dtype):
    random = torch.Generator().manual_seed(0)
    shapes = [(1, 16, 16), (130, 272, 144), (4096, 4096, 1024), (32768, 896, 4864)]
    for _ in range(200):
        m, n, k = torch.randint(1, 40, (3,), generator=random).tolist()
        shapes.append((m * 13, n * 16, k * 16))
    check_kernel("cuda", out_dtype, shapes)


def test_operator():
    a, b = torch.ones(3, 16, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8)
    torch.library.opcheck(scaled_int8_mm, (a, b, torch.rand(3), torch.rand(8), torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (5, 7, 3), (0, 8, 16), (64, 40, 48)])
def test_operator_takes_every_shape_on_gpu(m, n, k):
    a, b = torch.randint(-9, 9, (m, k), dtype=torch.int8), torch.randint(-9, 9, (n, k), dtype=torch.int8)
    scales = torch.rand(m), torch.rand(n)
    out = scaled_int8_mm(a.cuda(), b.cuda(), scales[0].cuda(), scales[1].cuda(), torch.float32)
    assert torch.allclose(out.cpu(), scaled_int8_mm_ref(a, b, *scales, torch.float32))
