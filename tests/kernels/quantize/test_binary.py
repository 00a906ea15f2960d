"""Signs of a matrix less its mean: against the definition in fp64, non-finite numbers, means of parts."""

import pytest
import torch

from qtrain.kernels.numerics.formats import unpack
from qtrain.kernels.quantize.binary import binary_center, binary_codes, binary_scale, binary_statistic
from tests.cases import KINDS, SHAPES, matrix


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [M, K], scale fp32 [1]."""
    statistic = binary_statistic(x)
    codes = binary_codes(x, binary_center(statistic))
    assert codes.dtype == torch.uint8 and codes.shape == (x.shape[0], -(-x.shape[1] // 8))
    return unpack(codes, "binary", x.shape[1]), binary_scale(statistic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scale_are_the_definitions(kind, dtype):
    """Also of a matrix that is far from centered, most of whose elements are above 0."""
    for seed, shape in enumerate(SHAPES):
        for offset in (0.0, 0.5):
            x = (matrix(*shape, seed, kind) + offset).to(dtype)
            codes, scale = quantized(x)
            mean = x.double().mean().float().double()  # kept in fp32
            expected = torch.where(x.double() >= mean, 1, -1)
            assert torch.equal(codes.long(), expected), (shape, offset)
            assert scale.item() == pytest.approx(x.double().abs().mean().clamp(min=1e-12).item(), rel=1e-6)


def test_zeros_are_above_their_mean():
    """The sign of 0 is 1, as the paper has it; so it is for each element that is the mean."""
    codes, scale = quantized(torch.zeros(3, 9))
    assert (codes == 1).all() and scale.item() == pytest.approx(1e-12)
    codes, _ = quantized(torch.tensor([[1.0, 2.0, 3.0]]))
    assert codes.tolist() == [[-1, 1, 1]]


def test_the_mean_is_not_rounded_to_the_dtype_of_the_matrix():
    """1 + 2^-10 is 1 in bf16, which would not be below it."""
    x = torch.ones(1, 1024, dtype=torch.bfloat16)
    x[0, 0] = 2
    codes, _ = quantized(x)
    assert codes[0, 0] == 1 and (codes[0, 1:] == -1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_of_a_matrix_with_a_nonfinite_number_are_nan(value):
    x = matrix(9, 17, 0)
    x[4, 5] = value
    codes, scale = quantized(x)
    assert (codes * scale).isnan().all()


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    x = matrix(130, 257, 1, "outlier")
    whole, parts = binary_statistic(x), sum(binary_statistic(rows) for rows in x.split([1, 0, 70, 59]))
    assert torch.allclose(parts, whole, rtol=1e-14)
    assert torch.equal(binary_scale(parts), binary_scale(whole))
    assert torch.equal(binary_center(parts), binary_center(whole))


def test_an_empty_matrix():
    for shape in [(0, 16), (3, 0)]:
        assert quantized(torch.zeros(shape))[0].shape == shape


@pytest.mark.gpu
def test_on_gpu():
    for seed, shape in enumerate(SHAPES):
        x = matrix(*shape, seed, "outlier", torch.bfloat16)
        center = binary_center(binary_statistic(x))
        assert torch.equal(binary_codes(x.cuda(), center.cuda()).cpu(), binary_codes(x, center))
        assert torch.allclose(binary_statistic(x.cuda()).cpu(), binary_statistic(x), rtol=1e-12)
