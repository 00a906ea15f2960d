"""Stacked matrices: codes and scales of each matrix quantized alone, put together."""

import pytest
import torch

from qtrain.kernels.numerics.rounding import NEAREST, Rounding
from qtrain.kernels.quantize.operators import quantize, quantize_dual, quantize_transposed
from qtrain.kernels.quantize.stacked import quantize_stacked_dual, quantize_stacked_transposed
from tests.cases import matrix
from tests.kernels.quantize.test_kernels import KEY, ROLE, same


@pytest.mark.parametrize("rows", [256, 40])
@pytest.mark.parametrize("fmt", ["int8", "e4m3", "int4"])
@pytest.mark.parametrize("granularity", ["rowwise", "1x128", "128x128", "32x32"])
def test_each_matrix_as_if_alone(rows, fmt, granularity):
    w = matrix(3 * rows, 64, 0, "outlier")
    codes, scale, codes_t, scale_t = quantize_stacked_dual(w, 3, fmt, granularity, granularity, NEAREST)
    alone = [quantize_dual(part, fmt, granularity, granularity) for part in w.split(rows)]
    same(codes.chunk(3), [part[0] for part in alone], "codes")
    same(codes_t.chunk(3, 1), [part[2] for part in alone], "codes_t")
    same(scale.chunk(3), [part[1] for part in alone], "scale")
    same(scale_t.chunk(3, scale_t.ndim - 1), [part[3] for part in alone], "scale_t")
    same(quantize_stacked_transposed(w, 3, fmt, granularity, NEAREST), [codes_t, scale_t], "transposed")


@pytest.mark.parametrize("rows", [256, 40])
def test_one_scale_for_all_matrices(rows):
    w = matrix(3 * rows, 64, 0, "outlier")
    found = quantize_stacked_dual(w, 3, "int8", "tensorwise", "tensorwise", NEAREST)
    same(found, [*quantize(w, "int8", "tensorwise"), *quantize_transposed(w, "int8", "tensorwise")], rows)


@pytest.mark.parametrize("rows", [128, 40])
def test_matrices_draw_bits_of_their_own(rows):
    """Equal matrices are rounded stochastically in different ways; both ops draw the same bits."""
    w = matrix(rows, 64, 0).repeat(2, 1)
    rounding = Rounding(KEY, ROLE)
    *_, codes_t, scale_t = quantize_stacked_dual(w, 2, "int8", "rowwise", "rowwise", rounding)
    first, second = codes_t.chunk(2, 1)
    assert not torch.equal(first, second) and (first - second).abs().max() <= 1
    same(quantize_stacked_transposed(w, 2, "int8", "rowwise", rounding), [codes_t, scale_t], rows)
