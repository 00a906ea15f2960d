"""A tensor times a scalar of the device, rounded once."""

import pytest
import torch

from qtrain.kernels.scaled import BLOCK, launch_scaled, scaled

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
def test_kernel_in_the_interpreter():
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
