"""Rows are added in fp32 one after the other: the kernel gives the bits of the loop."""

import pytest
import torch

from qtrain.kernels.elementwise import (
    BLOCK,
    add_in_order,
    add_in_order_ref,
    launch_add_in_order,
    launch_scaled,
    scaled,
    sum_in_order,
    sum_in_order_ref,
)


def check_kernel(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((1, 1), (2, 2048), (3, 2049), (3, 2064), (5, 4999), (2, 0)):
        total = torch.randn(length, generator=generator)
        terms = (torch.randn(rows, length, generator=generator) * 10 ** torch.arange(rows)[:, None]).to(dtype)
        if length > 1:
            terms[0, 1], terms[-1, 0] = float("inf"), float("nan")
        expected = total.clone()
        add_in_order_ref(expected, terms)
        found = total.to(device)
        launch_add_in_order(found, terms.to(device))
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        found = torch.empty_like(terms[0], device=device)
        launch_add_in_order(found, terms.to(device), new=True)
        torch.testing.assert_close(found.cpu(), sum_in_order_ref(terms), rtol=0, atol=0, equal_nan=True)
        given = torch.zeros_like(found)
        assert sum_in_order(terms.to(device), given) is given
        torch.testing.assert_close(given.cpu(), found.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreter
def test_kernels_in_the_interpreter():
    check_kernel("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_on_the_gpu(dtype):
    check_kernel("cuda", dtype)


def test_the_order_is_that_of_the_rows():
    """1 + 2^24 rounds to 2^24, so the order decides."""
    terms = torch.tensor([[2.0**24], [-(2.0**24)]])
    for rows, expected in ((terms, 0.0), (list(terms.flip(0)), 1.0)):
        total = torch.ones(1)
        add_in_order(total, rows)
        assert total.item() == expected
        assert sum_in_order([torch.ones(1), *rows]).item() == expected


def test_a_sum_is_rounded_once():
    """1 + 2^-8 is 1 in bf16, as often as it is added there."""
    terms = torch.tensor([1.0, *[2.0**-8] * 4], dtype=torch.bfloat16)[:, None]
    before = terms.clone()
    for form in (terms, list(terms)):
        found = sum_in_order(form)
        assert found.dtype == torch.bfloat16 and found.item() == 1 + 2.0**-6
    single = torch.ones(1, 3)
    assert sum_in_order(single).data_ptr() == single.data_ptr() and torch.equal(terms, before)


DTYPES = [torch.float32, torch.bfloat16]


def check(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.tensor(1 / 12345.0, device=device)  # of 24 bits, which bf16 cannot hold
    for shape in ((), (1,), (3, BLOCK // 2 + 1), (0, 4)):
        x = (torch.randn(shape, generator=generator) * 100).to(dtype)
        if x.numel() > 2:
            x[0, 0], x[0, 1] = float("inf"), float("nan")
        found = launch_scaled(x.to(device), factor, out_dtype)
        assert found.dtype == out_dtype and found.shape == x.shape
        exact = (x.double() * factor.cpu().double()).float().to(out_dtype)
        torch.testing.assert_close(
            found.cpu(), exact, rtol=2**-23 if out_dtype == torch.float32 else 2**-7, atol=0, equal_nan=True
        )
        torch.testing.assert_close(scaled(x.to(device), factor, out_dtype), found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreter
def test_scaled_kernel_in_the_interpreter():
    check("cpu", torch.float32, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_kernel_on_gpu(dtype, out_dtype):
    check("cuda", dtype, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operator(dtype):
    """Strided too; rounded once."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    factor = torch.tensor(1 / 3)
    assert torch.equal(scaled(x, factor, torch.bfloat16), (x.float() * factor).bfloat16())
    torch.library.opcheck(scaled, (x, factor, torch.bfloat16))
