"""A rounding request says what each layout draws: the tensor's bits, or nothing."""

import pytest
import torch

from qtrain.kernels.numerics.philox import random_bits_ref
from qtrain.kernels.numerics.rounding import NEAREST, Rounding

KEY, SHAPE = torch.tensor([7, 3, 2]), (3, 16)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_layouts(rows, columns):
    rounding = Rounding(KEY, 2, rows, columns)
    assert (rounding.row_key is KEY, rounding.column_key is KEY) == (rows, columns)
    assert rounding.same == (rows == columns)
    for bits, stochastic in zip(rounding.bits(SHAPE), (rows, columns), strict=True):
        assert torch.equal(bits, random_bits_ref(SHAPE, KEY, 2)) if stochastic else bits is None


def test_nearest():
    for rounding in (NEAREST, Rounding(None, 1, True, False)):
        assert rounding.row_key is rounding.column_key is None and rounding.same
        assert rounding.bits(SHAPE) == (None, None)
