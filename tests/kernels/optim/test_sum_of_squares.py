"""The sum of squares of many tensors: against fp64, of every size and dtype, and non-finite where one element is."""

import math

import pytest
import torch

from qtrain.kernels.optim.sum_of_squares import LOOPS, TILE, SumOfSquares
from qtrain.kernels.optim.update_launch import aligned

SIZES = (1, 7, TILE, TILE * LOOPS - 1, TILE * LOOPS + 1, 0)


def tensors(device: str, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, size in enumerate(SIZES):
        t = torch.randn(size, generator=generator) * 10.0 ** (4 * number - 8)
        found.append(t.to(device, torch.bfloat16 if number % 2 else torch.float32))
    return [*found, torch.randn(33, 65, generator=generator).t().to(device), found[3][1:]]  # strided; at an odd address


def truth(members: list[torch.Tensor]) -> float:
    return math.fsum(float(t.double().square().sum()) for t in members)


def check_kernel(device: str) -> None:
    squares = SumOfSquares()
    for seed in range(2):  # the tables of the first call, with other addresses
        members = tensors(device, seed)
        readable = [aligned(t) for t in members]
        assert float(squares.launch(readable)) == pytest.approx(truth(members), rel=1e-14)
        assert float(squares(members)) == pytest.approx(truth(members), rel=1e-12)
    readable[2][-1] = math.inf
    assert float(squares.launch(readable)) == math.inf
    readable[4][-1] = math.nan
    assert math.isnan(float(squares.launch(readable)))
    assert float(squares.launch([torch.zeros(0, device=device)])) == 0


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu")


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel("cuda")


def test_the_definition():
    members = tensors("cpu")
    assert float(SumOfSquares()(members)) == pytest.approx(truth(members), rel=1e-12)
