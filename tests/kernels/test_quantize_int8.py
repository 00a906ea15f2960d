"""INT8 quantization against its definition in fp64: nearest and stochastic, ordinary and hostile inputs."""

import pytest
import torch

from qtrain.kernels.quantize_int8 import (
    dequantize_int8_rowwise_ref,
    quantize_int8_dual_ref,
    quantize_int8_rowwise_ref,
    rounding_noise,
)
from tests.cases import KINDS, SHAPES, matrix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_error_is_at_most_half_a_step(kind, dtype):
    for seed, shape in enumerate(SHAPES):
        x = matrix(*shape, seed, kind, dtype)
        codes, scale = quantize_int8_rowwise_ref(x)
        assert codes.dtype == torch.int8 and scale.dtype == torch.float32 and codes.abs().max() <= 127
        error = (x.double() - codes.double() * scale.double()[:, None]).abs()
        assert (error <= scale.double()[:, None] * (0.5 + 1e-4)).all(), (shape, kind)
        absmax = x.double().abs().amax(dim=1)
        assert torch.allclose(scale.double(), (absmax / 127).clamp(min=1e-12), rtol=1e-6)
        back = dequantize_int8_rowwise_ref(codes, scale)
        assert torch.equal(back, codes.float() * scale[:, None])


def test_dual_form_quantizes_columns_too():
    x = matrix(33, 70, 0, "outlier")
    codes, scale, codes_t, scale_t = quantize_int8_dual_ref(x)
    assert codes.shape == (33, 70) and codes_t.shape == (70, 33) and codes_t.is_contiguous()
    assert scale.shape == (33,) and scale_t.shape == (70,)
    assert (x.t().double() - codes_t.double() * scale_t.double()[:, None]).abs().max() <= scale_t.max() * 0.5001


def test_stochastic_rounding_is_unbiased_and_adjacent():
    """The mean of 10,000 draws lies within 4 standard errors of the value; each draw is one of the two neighbours."""
    x = matrix(1, 64, 3)
    _, scale = quantize_int8_rowwise_ref(x)
    draws = 10_000
    many = x.repeat(draws, 1)
    codes, _ = quantize_int8_rowwise_ref(many, rounding_noise(many, torch.tensor(1), torch.tensor(0), 0))
    exact = x.double() / scale.double()
    assert ((codes.double() - exact).abs() < 1 + 1e-5).all()
    fraction = exact - exact.floor()
    sigma = (fraction * (1 - fraction) / draws).sqrt()
    assert ((codes.double().mean(0) - exact[0]).abs() <= 4 * sigma[0] + 1e-6).all()


def test_stochastic_rounding_keeps_exact_codes():
    """Zeros stay zero and the absmax stays 127, whatever the draw."""
    x = torch.zeros(100, 8)
    x[:, 0] = 127.0
    codes, _ = quantize_int8_rowwise_ref(x, rounding_noise(x, torch.tensor(9), torch.tensor(0), 0))
    assert (codes[:, 0] == 127).all() and (codes[:, 1:] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_show(bad):
    """A row with a NaN or Inf comes back as NaN, and touches no other row."""
    x = matrix(4, 16, 1)
    x[2, 5] = bad
    codes, scale = quantize_int8_rowwise_ref(x)
    back = dequantize_int8_rowwise_ref(codes, scale)
    assert back[2].isnan().all()
    assert back[[0, 1, 3]].isfinite().all() and (codes[2] == 0).all()


def test_empty():
    codes, scale = quantize_int8_rowwise_ref(torch.zeros(0, 16))
    assert codes.shape == (0, 16) and scale.shape == (0,)
    codes, scale = quantize_int8_rowwise_ref(torch.zeros(3, 0))
    assert codes.shape == (3, 0) and scale.shape == (3,)
