"""The blockwise kernel with warps of their own for loads, on a Hopper GPU: no interpreter runs Gluon."""

import pytest
import torch

from qtrain.core.hardware.capabilities import has_wgmma
from qtrain.kernels.gemm.blockwise_mm import TILINGS, launch_blockwise_mm, tilings_for
from qtrain.kernels.gemm.blockwise_wgmma import WGMMA_TILINGS
from qtrain.kernels.numerics.formats import empty_scale
from tests.kernels.gemm.test_blockwise_mm import DTYPES, operands, truth
from tests.kernels.gemm.test_scaled_mm import random_shapes

BLOCK_PAIRS = [("1x128", "128x128"), ("1x128", "1x128")]
SHAPES = [(1, 16, 16), (1, 128, 1024), (130, 272, 144), (64, 264, 1040), (512, 512, 8192), (1000, 1160, 400)]
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and not has_wgmma(torch.device("cuda")),
    reason="the kernel is for compute capability 9.0",
)


def arguments_of(shape, blocks, dtypes, seed=0):
    """With scales in the layout of the quantizers."""
    a, b, *scales = (t.cuda() for t in operands(*shape, blocks, dtypes, seed))
    laid_out = (empty_scale(block, *t.shape, t) for block, t in zip(blocks, (a, b), strict=True))
    return a, b, *(empty.copy_(scale) for empty, scale in zip(laid_out, scales, strict=True))


def product(arguments, blocks, name, out_dtype=torch.bfloat16, bias=None):
    a, b, *_ = arguments
    out = torch.full((a.shape[0], b.shape[0]), 7.0, dtype=out_dtype, device="cuda")
    return launch_blockwise_mm(*arguments, *blocks, out, WGMMA_TILINGS[name], bias)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", WGMMA_TILINGS)
@pytest.mark.parametrize("blocks", BLOCK_PAIRS)
@pytest.mark.parametrize("dtypes", DTYPES[1:])
def test_against_fp64(dtypes, blocks, name):
    for number, shape in enumerate([*SHAPES, *random_shapes(20)]):
        arguments, n = arguments_of(shape, blocks, dtypes, number), shape[1]
        if name not in tilings_for(*arguments[:2], arguments[3], *blocks, torch.bfloat16):
            assert blocks[1] == "1x128" and n % 4
            continue
        expected, size = truth(*arguments, blocks)
        bias = torch.randn(n, device="cuda") if number % 2 else None
        out_dtype = torch.float16 if number % 3 == 0 else torch.bfloat16
        wanted = expected if bias is None else expected + bias.double()
        error = (product(arguments, blocks, name, out_dtype, bias).double() - wanted).abs()
        assert (error <= 2**-8 * wanted.abs() + 2**-12 * size).all(), shape


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", WGMMA_TILINGS)
@pytest.mark.parametrize("blocks", BLOCK_PAIRS)
def test_same_result_every_time(blocks, name):
    """Warps that read a step before it is loaded, or after it is overwritten, would find other operands."""
    arguments = arguments_of((2048, 2304, 2176), blocks, DTYPES[1])
    first = product(arguments, blocks, name)
    for _ in range(20):
        assert torch.equal(product(arguments, blocks, name), first)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("name", WGMMA_TILINGS)
@pytest.mark.parametrize("blocks", BLOCK_PAIRS)
def test_special_values(blocks, name):
    """NaN in a row of A reaches the row's output alone, an infinite scale too; a row of zeros gives zeros."""
    a, b, scale_a, scale_b = arguments_of((300, 384, 640), blocks, DTYPES[1])
    a.view(torch.uint8)[7, 300] = 0x7F
    a.view(torch.uint8)[9] = 0
    a.view(torch.uint8)[200, 130] = 0x38
    scale_a[200, 1] = float("inf")
    out = product((a, b, scale_a, scale_b), blocks, name)
    assert out[7].isnan().all() and not out[200].isfinite().any() and (out[9] == 0).all()
    rest = torch.ones(300, dtype=torch.bool)
    rest[[7, 200]] = False
    assert out[rest.cuda()].isfinite().all()


@pytest.mark.gpu
@on_hopper
def test_other_operands_have_other_kernels():
    a, b, _, scale_b = arguments_of((128, 256, 256), BLOCK_PAIRS[1], DTYPES[1])

    def names(a=a, b=b, scale_b=scale_b, block_a="1x128", block_b="1x128", out_dtype=torch.bfloat16):
        return list(tilings_for(a, b, scale_b, block_a, block_b, out_dtype))

    assert names() == [*WGMMA_TILINGS, *TILINGS]
    codes = a.view(torch.int8), b.view(torch.int8)
    refused = ({"a": codes[0], "b": codes[1]}, {"scale_b": scale_b.contiguous()}, {"out_dtype": torch.float32})
    for changed in (*refused, {"block_a": "128x128"}, {"block_b": "32x32"}):
        assert names(**changed) == list(TILINGS), changed
