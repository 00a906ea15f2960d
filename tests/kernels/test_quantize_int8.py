"""INT8 quantization against its definition in fp64: nearest and stochastic, ordinary and hostile inputs."""

import pytest
import torch

from qtrain.kernels.philox import uniform_ref
from qtrain.kernels.quantize_int8 import (
    dequantize_int8_rowwise_ref,
    launch_quantize_int8_dual,
    launch_quantize_int8_rowwise,
    quantize_int8_columnwise_ref,
    quantize_int8_dual,
    quantize_int8_rowwise,
    quantize_int8_rowwise_ref,
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
    codes, _ = quantize_int8_rowwise_ref(many, uniform_ref(many.shape, torch.tensor([1, 0, 0]), 0))
    exact = x.double() / scale.double()
    assert ((codes.double() - exact).abs() < 1 + 1e-5).all()
    fraction = exact - exact.floor()
    sigma = (fraction * (1 - fraction) / draws).sqrt()
    assert ((codes.double().mean(0) - exact[0]).abs() <= 4 * sigma[0] + 1e-6).all()


def test_stochastic_rounding_keeps_exact_codes():
    """Zeros stay zero and the absmax stays 127, whatever the draw."""
    x = torch.zeros(100, 8)
    x[:, 0] = 127.0
    codes, _ = quantize_int8_rowwise_ref(x, uniform_ref(x.shape, torch.tensor([9, 0, 0]), 0))
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


def check_kernels(device, dtype, shapes):
    """Codes and scales bitwise equal to the definition, nearest and stochastic, for rows and columns."""
    drawn = torch.tensor([2**40 + 77, 9, 5], device=device)
    for number, shape in enumerate(shapes):
        for kind in KINDS:
            x = matrix(*shape, number, kind, dtype).contiguous().to(device)
            for key in (None, drawn):
                if key is not None and shape[1] % 8:
                    continue
                noise = [None if key is None else uniform_ref(x.shape, key, role) for role in (3, 4)]
                rows = quantize_int8_rowwise_ref(x, noise[0])
                columns = quantize_int8_columnwise_ref(x, noise[1])
                found = [*launch_quantize_int8_rowwise(x, key, 3), *launch_quantize_int8_dual(x, key, 3, 4)]
                for got, expected in zip(found, [*rows, *rows, *columns], strict=True):
                    assert torch.equal(got, expected), (shape, kind, key is not None)


@pytest.mark.interpreter
def test_kernels_in_the_interpreter():
    check_kernels("cpu", torch.float32, [(1, 8), (3, 5), (17, 64), (130, 136)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels(dtype):
    shapes = [(1, 8), (3, 5), (17, 64), (130, 136), (257, 1000), (1000, 4096), (64, 18944)]
    random = torch.Generator().manual_seed(0)
    shapes += [tuple(torch.randint(1, 600, (2,), generator=random).tolist()) for _ in range(200)]
    check_kernels("cuda", dtype, shapes)


@pytest.mark.gpu
def test_bad_values_on_gpu():
    x = matrix(40, 64, 0).cuda()
    x[3, 5], x[7, 9] = float("nan"), float("inf")
    codes, scale, codes_t, scale_t = launch_quantize_int8_dual(x, None, 0, 1)
    bad_rows, bad_columns = ~scale.isfinite(), ~scale_t.isfinite()
    assert bad_rows.nonzero().flatten().tolist() == [3, 7] and bad_columns.nonzero().flatten().tolist() == [5, 9]
    assert (codes[[3, 7]] == 0).all() and (codes_t[[5, 9]] == 0).all()


def test_operators():
    for key in (None, torch.tensor([3, 1, 0])):
        torch.library.opcheck(quantize_int8_rowwise, (torch.randn(5, 16), key, 1))
        torch.library.opcheck(quantize_int8_dual, (torch.randn(5, 16), key, 1, 2))
