"""Transposing bytes: every bit where it belongs, whatever the dtype and the layout."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm.persistent import k_major, launch_transpose_8bit, transpose_8bit
from tests.cases import SHAPES

DTYPES = [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Random bytes; as 8-bit floats some are NaN, which must be moved unchanged too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit(dtype):
    for seed, shape in enumerate([*SHAPES, (0, 5), (5, 0)]):
        x = matrix(*shape, seed)
        out = transpose_8bit(x.view(dtype))
        assert out.dtype == dtype and out.is_contiguous() and torch.equal(out.view(torch.uint8), x.t())


def test_layouts():
    x = matrix(40, 24, 0)
    for view in (x.t(), x[::2], x[:, 3:17]):
        assert torch.equal(transpose_8bit(view), view.t().contiguous())


def test_k_major_copies_only_what_is_not():
    x = matrix(40, 24, 0)
    assert k_major(x) is x
    for view in (x.t(), x[::2], x[:, 3:17]):
        assert k_major(view).is_contiguous() and torch.equal(k_major(view), view)


def test_wider_elements_are_refused():
    with pytest.raises(TypeError, match="bfloat16"):
        transpose_8bit(torch.zeros(2, 2, dtype=torch.bfloat16))


def check_kernel(device: str, shapes: list[tuple[int, int]]) -> None:
    for seed, shape in enumerate(shapes):
        x = matrix(*shape, seed)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            out = launch_transpose_8bit(x.to(device).view(dtype))
            assert torch.equal(out.view(torch.uint8).cpu(), x.t()), shape


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu", [*SHAPES, (0, 5)])


@pytest.mark.gpu
def test_kernel():
    random = torch.Generator().manual_seed(0)
    shapes = [tuple(torch.randint(1, 900, (2,), generator=random).tolist()) for _ in range(200)]
    check_kernel("cuda", [*SHAPES, *shapes, (16384, 4096), (4096, 14336), (70000, 16), (16, 70000)])


def test_operator():
    torch.library.opcheck(transpose_8bit, (matrix(5, 16, 0).view(torch.int8),))
