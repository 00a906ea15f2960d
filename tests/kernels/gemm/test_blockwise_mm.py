"""Products of blockwise-scaled codes: every combination of blocks, K and rows that do not fill their last block."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm import blockwise_mm as module
from qtrain.kernels.gemm.blockwise_mm import BLOCKS, TILINGS, BlockwiseTiling, blockwise_mm, launch_blockwise_mm
from tests.kernels.gemm.test_scaled_mm import E4M3, E5M2, codes, random_shapes

BLOCK_PAIRS = [
    ("1x128", "128x128"),
    ("1x128", "1x128"),
    ("128x128", "128x128"),
    ("128x128", "1x128"),
    ("32x32", "32x32"),
]
DTYPES = [(torch.int8, torch.int8), (E4M3, E4M3), (E5M2, E4M3)]


def operands(m: int, n: int, k: int, blocks: tuple[str, str], dtypes, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    scales = []
    for rows, block in ((m, blocks[0]), (n, blocks[1])):
        height, width = BLOCKS[block]
        scales.append(torch.rand(-(-rows // height), -(-k // width), generator=generator) * 1e-2 + 1e-3)
    return codes(m, k, dtypes[0], seed), codes(n, k, dtypes[1], seed + 1), *scales


def truth(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, blocks: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """The product in fp64, element by element of the scales, and the sum of magnitudes behind each element."""

    def values(x: Tensor, scale: Tensor, block: str) -> Tensor:
        height, width = BLOCKS[block]
        rows = torch.arange(x.shape[0], device=x.device) // height
        columns = torch.arange(x.shape[1], device=x.device) // width
        return x.double() * scale.double()[rows][:, columns]

    x, w = values(a, scale_a, blocks[0]), values(b, scale_b, blocks[1])
    return x @ w.t(), x.abs() @ w.abs().t()


@pytest.mark.parametrize("blocks", BLOCK_PAIRS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("m,n,k", [(1, 8, 16), (130, 40, 300), (33, 140, 128)])
def test_against_fp64(blocks, dtypes, m, n, k):
    arguments = operands(m, n, k, blocks, dtypes)
    bias = torch.randn(n)
    expected, size = truth(*arguments, blocks)
    out = blockwise_mm(*arguments, *blocks, torch.float32, bias)
    assert ((out - bias).double() - expected).abs().max() <= 2**-20 * (size.max() + 1)


def test_blocks_that_cut_k_differently_are_refused():
    a, b, scale_a, _ = operands(8, 8, 64, ("1x128", "1x128"), DTYPES[0])
    with pytest.raises(ValueError, match="32x32"):
        blockwise_mm(a, b, scale_a, torch.ones(1, 2), "1x128", "32x32", torch.float32)


def test_operator():
    arguments = operands(8, 16, 128, BLOCK_PAIRS[0], DTYPES[0])
    torch.library.opcheck(blockwise_mm, (*arguments, *BLOCK_PAIRS[0], torch.bfloat16))


def check(device: str, tilings: list[BlockwiseTiling], dtypes, shapes, blockss, rounding: float) -> None:
    for number, shape in enumerate(shapes):
        for blocks in blockss:
            arguments = [t.to(device) for t in operands(*shape, blocks, dtypes, number)]
            expected, size = truth(*arguments, blocks)
            bias = torch.randn(shape[1], device=device) if number % 2 and len(shapes) < 50 else None
            for tiling in tilings:
                out = torch.empty(shape[:2], dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
                launch_blockwise_mm(*arguments, *blocks, out, tiling, bias)
                wanted = expected if bias is None else expected + bias.double()
                error = (out.double() - wanted).abs()
                assert (error <= rounding * wanted.abs() + 2**-12 * size).all(), (shape, blocks, tiling)


@pytest.mark.interpreter
@pytest.mark.parametrize("columns", [32, 64])
def test_in_the_interpreter(columns):
    check("cpu", [BlockwiseTiling(32, columns, 4, 2)], DTYPES[0], [(1, 16, 16), (70, 132, 272)], BLOCK_PAIRS, 2**-20)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_kernel(dtypes, name):
    shapes = [(1, 16, 16), (130, 272, 144), (512, 512, 8192), *random_shapes(200)]
    pairs = BLOCK_PAIRS if name == next(iter(TILINGS)) else BLOCK_PAIRS[-1:]
    check("cuda", [TILINGS[name]], dtypes, shapes[:20], pairs, 2**-8)
    check("cuda", [TILINGS[name]], dtypes, shapes[20::2], BLOCK_PAIRS[:2], 2**-8)  # every second one: no bias


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", BLOCK_PAIRS)
@pytest.mark.parametrize("family", ["triton", "cublas", "ref"])
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (5, 7, 3), (0, 8, 16), (256, 384, 640)])
def test_operator_takes_every_shape(family, blocks, m, n, k, monkeypatch):
    monkeypatch.setenv("QTRAIN_IMPL", family)
    arguments = operands(m, n, k, blocks, (E4M3, E4M3))
    out = blockwise_mm(*(t.cuda() for t in arguments), *blocks, torch.bfloat16)
    expected, size = truth(*arguments, blocks)
    assert ((out.cpu().double() - expected).abs() <= 2**-8 * expected.abs() + 2**-12 * size).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("blocks", BLOCK_PAIRS[:1] + BLOCK_PAIRS[-1:])
def test_a_sum_over_any_number_of_tokens_runs_by_a_kernel(blocks, dtypes, monkeypatch):
    arguments = [t.cuda() for t in operands(96, 64, 1003, blocks, dtypes)]
    expected, size = truth(*arguments, blocks)
    monkeypatch.setattr(module, "blockwise_mm_ref", None)
    error = (blockwise_mm(*arguments, *blocks, torch.bfloat16).double() - expected).abs()
    assert (error <= 2**-8 * (expected.abs() + size)).all()
