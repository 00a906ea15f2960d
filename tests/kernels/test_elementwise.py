"""Rows are added in fp32 one after the other: the kernel gives the bits of the loop."""

import pytest
import torch

from qtrain.kernels.elementwise import (
    BLOCK,
    add_in_order,
    add_in_order_ref,
    launch_add_in_order,
    scaled_sum,
    scaled_sum_ref,
    sum_in_order,
    sum_in_order_ref,
)


def exactly(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_kernel(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((1, 1), (2, 2048), (3, 2049), (3, 2064), (5, 4999), (2, 0)):
        total = torch.randn(length, generator=generator)
        terms = (torch.randn(rows, length, generator=generator) * 10 ** torch.arange(rows)[:, None]).to(dtype)
        if length > 1:
            terms[0, 1], terms[-1, 0] = float("inf"), float("nan")
        added, from_zeros = total.clone(), torch.empty(length)
        add_in_order_ref(added, terms)
        add_in_order_ref(from_zeros, terms, new=True)
        for start, expected in (("out", added), ("zero", from_zeros), ("term", sum_in_order_ref(terms, torch.float32))):
            found = total.to(device, copy=True)
            launch_add_in_order(found, terms.to(device), start)
            exactly(found, expected)
        for form in (terms.to(device), [term.clone() for term in terms.to(device)]):  # in one tensor, and apart
            for out_dtype in (dtype, torch.float32):
                given = torch.zeros(length, dtype=out_dtype, device=device)
                assert sum_in_order(form, given) is given
                exactly(given, sum_in_order_ref(terms, out_dtype))
            found = total.to(device, copy=True)
            assert add_in_order(found, form) is found
            exactly(found, added)
            found.fill_(float("nan"))  # of a new total nothing is read
            exactly(add_in_order(found, form, new=True), from_zeros)
    found = torch.ones(64, device=device)
    launch_add_in_order(found, torch.full((2, 64), -0.0, device=device), "zero")
    assert (found == 0).all() and not found.signbit().any()


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


def check_scaled(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Of one term and of several, of which the first one may be in fp32."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.tensor(1 / 12345.0, device=device)  # of 24 bits, which bf16 cannot hold
    for rows, first in ((1, dtype), (4, dtype), (3, torch.float32)):
        for shape in ((), (1,), (3, BLOCK // 2 + 1), (0, 4)):
            terms = [(torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(rows)]
            terms[0] = terms[0].to(first)
            if terms[0].numel() > 2:
                terms[0][0, 0], terms[-1][0, 1] = float("inf"), float("nan")
            exact = (sum(t.double() for t in terms) * factor.cpu().double()).float().to(out_dtype)
            expected = scaled_sum_ref(terms, factor.cpu(), out_dtype)
            bits = 2**-23 if out_dtype == torch.float32 else 2**-7
            # Terms of both signs: a sum's error is relative to the largest of them, some 400 times the factor.
            atol = 0 if rows == 1 else rows * 2**-23 * 400 / 12345
            torch.testing.assert_close(expected, exact, rtol=bits, atol=atol, equal_nan=True)
            given = [t.to(device, copy=True) for t in terms]
            out = torch.empty_like(given[0], dtype=out_dtype)
            launch_add_in_order(out, given, "term", factor)
            exactly(out, expected)
            found = scaled_sum(given, factor, out_dtype)
            exactly(found, expected)
            assert found.dtype == out_dtype and found.shape == terms[0].shape
            assert (found is given[0]) == (first == out_dtype)  # in its memory


@pytest.mark.interpreter
def test_scaled_sums_in_the_interpreter():
    check_scaled("cpu", torch.float32, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_scaled_sums_on_the_gpu(dtype, out_dtype):
    check_scaled("cuda", dtype, out_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scaled_sum_is_rounded_once(dtype):
    terms = [torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    factor = torch.tensor(1 / 3)
    expected = ((terms[0].float() + terms[1].float() + terms[2].float()) * factor).bfloat16()
    assert torch.equal(scaled_sum(terms, factor, torch.bfloat16), expected)
