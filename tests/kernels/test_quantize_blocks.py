"""The quantizer of both layouts under blocks' scales: bitwise equal to the definition."""

import pytest
import torch

from qtrain.kernels.quantize import quantize_dual, quantize_ref, quantize_transposed_ref
from qtrain.kernels.quantize_blocks import launch_quantize_blocks, takes_blocks
from tests.cases import KINDS
from tests.kernels.test_quantize_kernels import hostile, same

CASES = [(fmt, granularity) for fmt in ("int8", "e4m3", "e5m2") for granularity in ("128x128", "1x128")]


def check(x, fmt, granularity, power_of_two=False):
    assert takes_blocks(x, fmt, granularity)
    expected = quantize_ref(x, fmt, granularity, None, power_of_two)
    expected += quantize_transposed_ref(x, fmt, granularity, None, power_of_two)
    found = launch_quantize_blocks(x, fmt, granularity, power_of_two)
    same(found, expected, (tuple(x.shape), fmt, granularity, power_of_two))


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity", CASES)
def test_blocks_in_the_interpreter(fmt, granularity):
    for kind in ("outlier", "bad"):
        check(hostile(144, 272, 2, kind, torch.bfloat16, "cpu"), fmt, granularity, kind == "outlier")
    check(hostile(128, 256, 3, "zero_row", torch.bfloat16, "cpu"), fmt, granularity)


def test_other_inputs_are_not_taken():
    x = torch.zeros(32, 48, dtype=torch.bfloat16)
    assert takes_blocks(x, "e4m3", "1x128")
    assert not takes_blocks(x.float(), "e4m3", "1x128") and not takes_blocks(x[:, :40], "e4m3", "1x128")
    assert not takes_blocks(x.view(-1)[1 : 1 + 16 * 48].view(16, 48), "e4m3", "1x128")  # starts within a word
    assert not takes_blocks(x, "int4", "1x128") and not takes_blocks(x, "e4m3", "32x32")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt,granularity", CASES)
def test_blocks_on_gpu(fmt, granularity):
    generator = torch.Generator().manual_seed(7)
    for number in range(120):
        m, k = (16 * torch.randint(1, 40, (2,), generator=generator)).tolist()
        if number % 3 == 0:
            m, k = -(-m // 128) * 128, -(-k // 128) * 128
        x = hostile(m, k, number, [*KINDS, "bad"][number % 6], torch.bfloat16, "cuda").contiguous()
        check(x, fmt, granularity, number % 4 == 1)
        same(quantize_dual(x, fmt, granularity, granularity), launch_quantize_blocks(x, fmt, granularity), (m, k))
    for shape in [(16, 16), (4096, 14336), (16384, 4096)]:
        check(hostile(*shape, 0, "outlier", torch.bfloat16, "cuda"), fmt, granularity)
