"""Sums of columns: no further from fp64 than fp32 sums may be, in any shape, and the same bits in shards."""

import pytest
import torch

from qtrain.kernels.column_sums import column_sums, column_sums_ref, launch_column_sums

SHAPES = [(1, 1), (5, 130), (200, 96), (1000, 300)]
LARGE = [(32768, 1152), (16448, 6144), (4096, 16), (396, 896)]
DTYPES = [torch.bfloat16, torch.float32]


def matrix(m: int, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(m)) * torch.logspace(-3, 2, n)
    x[m // 2] = 0
    x[-1] *= 1000  # an outlier
    return x.to(device, dtype)


def check(device: str, shapes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    for shape in shapes:
        x = matrix(*shape, dtype, device)
        truth, size = x.double().sum(0), x.double().abs().sum(0)
        found = launch_column_sums(x)
        assert found.dtype == torch.float32
        # Sums of registers, then of CTAs: errors of some dozens of additions, not of all rows.
        assert ((found - truth).abs() <= 64 * 2**-24 * size).all(), shape
        assert launch_column_sums(x).equal(found)
        half = shape[1] // 2
        if half:  # shards of the columns, whose rows are longer than they are wide
            parts = [launch_column_sums(part) for part in (x[:, :half], x[:, half:])]
            assert torch.cat(parts).equal(found), shape
        for bad in (torch.nan, torch.inf):
            x[0, -1] = bad
            sums = launch_column_sums(x)
            assert sums[:-1].equal(found[:-1]) and not sums[-1].isfinite()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_in_the_interpreter(dtype):
    check("cpu", SHAPES if dtype is torch.float32 else SHAPES[1:3], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel(dtype):
    check("cuda", SHAPES + LARGE, dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operator(device):
    for x in (matrix(40, 24, torch.bfloat16, device), matrix(24, 40, torch.float32, device).t()):
        torch.library.opcheck(torch.ops.qtrain.column_sums.default, (x,))
        torch.testing.assert_close(column_sums(x), column_sums_ref(x))
    assert column_sums(torch.empty(0, 3, device=device)).tolist() == [0, 0, 0]
