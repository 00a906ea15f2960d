"""The router's product: fp32 results from bf16 operands."""

import pytest
import torch

from qtrain.kernels.gemm.fp32_mm import fp32_mm


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
