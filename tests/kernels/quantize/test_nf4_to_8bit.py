"""8-bit codes of an NF4 weight, in both layouts: those of its fp32 values, rounded once."""

import pytest
import torch

from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.quantize.nf4 import dequantize_nf4, quantize_nf4
from qtrain.kernels.quantize.nf4_to_8bit import launch_nf4_to_8bit, nf4_to_8bit, nf4_to_8bit_ref
from qtrain.kernels.quantize.reference import quantize_ref
from tests.cases import KINDS, matrix

FORMATS = ("int8", "e4m3")
SHAPES = [(1, 2), (1, 64), (3, 130), (70, 66), (129, 200), (5, 4160), (600, 64)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_definition_is_the_quantizer_of_the_dequantized_weight(fmt, kind, transposed):
    """Also of the rows, whose absmax is taken from the scales."""
    codes, scale = quantize_nf4(matrix(17, 130, seed=0, kind=kind))
    values = dequantize_nf4(codes, scale, 130, torch.float32)
    found, found_scale = nf4_to_8bit_ref(codes, scale, 130, fmt, transposed)
    expected, expected_scale = quantize_ref(values.t() if transposed else values, fmt, "rowwise")
    assert torch.equal(found_scale.isfinite(), expected_scale.isfinite())
    assert torch.equal(found_scale.nan_to_num(), expected_scale.nan_to_num())
    assert torch.equal(found.view(torch.int8), expected.view(torch.int8))


@pytest.mark.parametrize("fmt", FORMATS)
def test_error_against_the_fp64_truth_is_that_of_the_8_bit_format(fmt):
    codes, scale = quantize_nf4(matrix(64, 512, seed=1))
    truth = dequantize_nf4(codes, scale, 512, torch.float32).double()
    for transposed in (False, True):
        found, found_scale = nf4_to_8bit(codes, scale, 512, fmt, transposed)
        value = dequantize(found, found_scale, fmt, "rowwise", found.shape).double()
        error = ((value.t() if transposed else value) - truth).norm() / truth.norm()
        assert error < (0.01 if fmt == "int8" else 0.03)


def check_kernel(device: str, shapes: list[tuple[int, int]]) -> None:
    for seed, (rows, columns) in enumerate(shapes):
        codes, scale = quantize_nf4(matrix(rows, columns, seed=seed, kind=KINDS[seed % len(KINDS)]))
        if seed % 3 == 1:
            scale.view(-1)[:3] = torch.tensor([0.0, torch.inf, torch.nan])[: scale.numel()]
        for fmt in FORMATS:
            for transposed in (False, True):
                found = launch_nf4_to_8bit(codes.to(device), scale.to(device), columns, fmt, transposed)
                expected = nf4_to_8bit_ref(codes, scale, columns, fmt, transposed)
                case = (rows, columns, fmt, transposed)
                assert torch.equal(found[0].cpu().view(torch.int8), expected[0].view(torch.int8)), case
                assert torch.equal(found[1].cpu().nan_to_num(7.0, 8.0), expected[1].nan_to_num(7.0, 8.0)), case


@pytest.mark.interpreter
def test_kernels_in_the_interpreter():
    check_kernel("cpu", SHAPES)


@pytest.mark.gpu
def test_kernels():
    random = torch.Generator().manual_seed(0)
    shapes = [(r, 2 * c) for r, c in torch.randint(1, 500, (60, 2), generator=random).tolist()]
    check_kernel("cuda", [*SHAPES, (8960, 1536), (70000, 66), *shapes])


def test_a_weight_without_rows():
    empty = torch.empty(0, 32, dtype=torch.uint8), torch.empty(0, 1), 64, "int8"
    for transposed, shape in ((False, (0, 64)), (True, (64, 0))):
        found, scale = launch_nf4_to_8bit(*empty, transposed)
        assert found.shape == shape and scale.shape == shape[:1]


def test_operator():
    codes, scale = quantize_nf4(matrix(5, 130, seed=0))
    for fmt in FORMATS:
        for transposed in (False, True):
            torch.library.opcheck(nf4_to_8bit, (codes, scale, 130, fmt, transposed))
