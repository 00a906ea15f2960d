"""Rows are added in fp32 one after the other: the kernel gives the bits of the loop."""

import pytest
import torch

from qtrain.kernels.ordered_sum import add_in_order, add_in_order_ref, launch_add_in_order


def check_kernel(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((1, 1), (2, 2048), (3, 2049), (5, 4999), (2, 0)):
        total = torch.randn(length, generator=generator)
        terms = (torch.randn(rows, length, generator=generator) * 10 ** torch.arange(rows)[:, None]).to(dtype)
        if length > 1:
            terms[0, 1], terms[-1, 0] = float("inf"), float("nan")
        expected = total.clone()
        add_in_order_ref(expected, terms)
        found = total.to(device)
        launch_add_in_order(found, terms.to(device))
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
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
