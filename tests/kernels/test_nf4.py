"""NF4: every value becomes the nearest of its block's sixteen, whatever the shape."""

import pytest
import torch

from qtrain.kernels.nf4 import BLOCK, TABLE, dequantize_nf4, nf4_table, quantize_nf4
from tests.cases import KINDS, matrix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 64), (17, 130), (5, 33)])
def test_codes_are_the_nearest_values(rows, columns, kind):
    x = matrix(rows, columns, seed=0, kind=kind)
    codes, scale = quantize_nf4(x)
    assert codes.shape == (rows, -(-columns // 2)) and scale.shape == (rows, -(-columns // BLOCK))
    y = dequantize_nf4(codes, scale, nf4_table("cpu"), columns, torch.float32)
    absmax = scale.double().repeat_interleave(BLOCK, dim=1)[:, :columns]
    choices = absmax[..., None] * torch.tensor(TABLE, dtype=torch.float64)
    best = (choices - x.double()[..., None]).abs().amin(dim=-1)
    assert torch.all((y.double() - x.double()).abs() <= best + 1e-6 * absmax)


def test_error_on_normal_weights_is_that_of_the_paper():
    x = matrix(64, 4096, seed=1)
    y = dequantize_nf4(*quantize_nf4(x), nf4_table("cpu"), 4096, torch.bfloat16)
    assert 0.08 < float((y.float() - x).norm() / x.norm()) < 0.10
