"""INT8 quantization against its definition in fp64: nearest and stochastic, ordinary and hostile inputs."""

import pytest
import torch

from qtrain.kernels.quantize_int8 import (
    dequantize_int8_rowwise_ref,
    quantize_int8_columnwise_ref,
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


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_the_rows_of_the_transpose(kind):
    for seed, shape in enumerate(SHAPES):
        x = matrix(*shape, seed, kind)
        codes, scale = quantize_int8_columnwise_ref(x)
        of_transpose, scale_of_transpose = quantize_int8_rowwise_ref(x.t().contiguous())
        assert codes.is_contiguous() and torch.equal(codes, of_transpose) and torch.equal(scale, scale_of_transpose)


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
    codes, scale = quantize_int8_columnwise_ref(torch.zeros(0, 5))
    assert codes.shape == (5, 0) and scale.shape == (5,)
