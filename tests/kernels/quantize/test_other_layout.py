"""Transposed codes of row codes: those of the values of the row codes, rounded once."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.quantize.other_layout import launch_transpose_rowwise, transpose_rowwise, transpose_rowwise_ref
from qtrain.kernels.quantize.reference import quantize_ref
from tests.cases import KINDS, matrix

FORMATS = ("int8", "e4m3", "e5m2")
SHAPES = [(1, 1), (1, 64), (3, 130), (70, 66), (129, 200), (600, 64)]


def rows_of(rows: int, columns: int, seed: int, fmt: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix of a kind, with outliers, rows of zeros, NaN and Inf in turns."""
    return quantize_ref(matrix(rows, columns, seed=seed, kind=KINDS[seed % len(KINDS)]), fmt, "rowwise")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_the_quantizer_of_the_values(fmt, kind):
    codes, scale = quantize_ref(matrix(17, 130, seed=0, kind=kind), fmt, "rowwise")
    found, found_scale = transpose_rowwise(codes, scale, fmt)
    expected, expected_scale = quantize_ref(dequantize(codes, scale, fmt, "rowwise", codes.shape).t(), fmt, "rowwise")
    assert torch.equal(found.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(found_scale.nan_to_num(7.0, 8.0), expected_scale.nan_to_num(7.0, 8.0))


def test_error_against_the_fp64_truth_is_that_of_the_format():
    for fmt, bound in (("int8", 0.01), ("e4m3", 0.03)):
        codes, scale = rows_of(64, 512, 0, fmt)
        truth = codes.double() * scale.double()[:, None]
        found, found_scale = transpose_rowwise(codes, scale, fmt)
        assert ((found.double() * found_scale.double()[:, None]).t() - truth).norm() / truth.norm() < bound


def check_kernels(device: str, shapes: list[tuple[int, int]]) -> None:
    for seed, (rows, columns) in enumerate(shapes):
        for fmt in FORMATS:
            codes, scale = rows_of(rows, columns, seed, fmt)
            expected = transpose_rowwise_ref(codes, scale, fmt)
            found = launch_transpose_rowwise(codes.to(device), scale.to(device), fmt)
            assert torch.equal(found[0].cpu().view(torch.int8), expected[0].view(torch.int8)), (rows, columns, fmt)
            assert torch.equal(found[1].cpu().nan_to_num(7.0, 8.0), expected[1].nan_to_num(7.0, 8.0)), (rows, fmt)


@pytest.mark.interpreter
def test_kernels_in_the_interpreter():
    check_kernels("cpu", SHAPES)


@pytest.mark.gpu
def test_kernels():
    random = torch.Generator().manual_seed(0)
    check_kernels("cuda", [*SHAPES, (8960, 1536), *torch.randint(1, 900, (40, 2), generator=random).tolist()])


def test_a_weight_without_rows():
    found, scale = transpose_rowwise(torch.empty(0, 64, dtype=torch.int8), torch.empty(0), "int8")
    assert found.shape == (64, 0) and scale.shape == (64,)


def test_operator():
    torch.library.opcheck(transpose_rowwise, (*rows_of(5, 130, 0, "int8"), "int8"))
