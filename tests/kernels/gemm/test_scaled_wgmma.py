"""Warp-specialized products: INT8 bit for bit the definition, FP8 against fp64; what the kernel does not take."""

import pytest
import torch

from qtrain.core.hardware import capabilities
from qtrain.kernels.gemm.scaled_mm import scaled_mm_ref
from qtrain.kernels.gemm.scaled_wgmma import (
    LOW_RANK_TILINGS,
    SCALED_TILINGS,
    launch_scaled_wgmma,
    supports_scaled_wgmma,
)
from tests.kernels.gemm.test_scaled_mm import DTYPES, operands, truth

# K of one step and less, of fewer steps than stages, of as many, of more; more tiles than SMs.
SHAPES = [(128, 256, 16), (256, 512, 208), (128, 256, 512), (384, 768, 896), (4096, 4608, 3584), (2048, 256, 18960)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCALED_TILINGS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("tensorwise", [False, True])
def test_products_on_a_gpu(name, dtypes, tensorwise):
    for number, (m, n, k) in enumerate(SHAPES):
        a, b, *scales = operands(m, n, k, dtypes, number, tensorwise, "cuda")
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if number % 2 else None
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        launch_scaled_wgmma(a, b, *scales, out, SCALED_TILINGS[name], bias=bias)
        if dtypes[0] == torch.int8:
            assert torch.equal(out, scaled_mm_ref(a, b, *scales, torch.bfloat16, bias)), (m, n, k)
            continue
        expected, size = truth(a, b, *scales)
        expected = expected if bias is None else expected + bias.double()
        error = (out.double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 2**-9 * size).all(), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOW_RANK_TILINGS)
def test_nan_and_infinity_show(name):
    a, b, *scales = operands(256, 512, 208, DTYPES[-1], 0, False, "cuda")
    factors = torch.randn(256, 16, device="cuda").bfloat16(), torch.randn(512, 16, device="cuda").bfloat16()
    out = torch.empty(256, 512, dtype=torch.bfloat16, device="cuda")
    a.view(torch.uint8)[70, 200] = 0x7F  # NaN
    factors[1][300, 9] = float("inf")
    launch_scaled_wgmma(a, b, *scales, out, LOW_RANK_TILINGS[name], low_rank=factors)
    assert out[70].isnan().all() and not out[:, 300].isfinite().any()
    out[70], out[:, 300] = 0, 0
    assert out.isfinite().all()


def test_other_sizes_and_dtypes_are_not_taken(monkeypatch):
    monkeypatch.setattr("qtrain.kernels.gemm.scaled_wgmma.has_wgmma", lambda device: True)
    a, b = torch.zeros(256, 64, dtype=torch.int8), torch.zeros(512, 64, dtype=torch.int8)
    assert supports_scaled_wgmma(a, b, torch.bfloat16) and supports_scaled_wgmma(a, b, torch.float16)
    assert not supports_scaled_wgmma(a, b, torch.float32)
    assert supports_scaled_wgmma(a, b, torch.bfloat16, fast_accum=False)
    assert not supports_scaled_wgmma(a.to(torch.float8_e4m3fn), b, torch.bfloat16, fast_accum=False)
    assert not supports_scaled_wgmma(a[:200], b, torch.bfloat16)
    assert not supports_scaled_wgmma(a, b[:384], torch.bfloat16)
    assert not supports_scaled_wgmma(a[:, :56].contiguous(), b[:, :56].contiguous(), torch.bfloat16)
    assert not supports_scaled_wgmma(a[:0], b, torch.bfloat16)
    monkeypatch.undo()
    monkeypatch.setattr(capabilities, "compute_capability", lambda device: (10, 0))
    assert not supports_scaled_wgmma(a, b, torch.bfloat16)
