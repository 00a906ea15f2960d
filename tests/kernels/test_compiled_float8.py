"""Compiled FP8 casts store the codes that PyTorch's own cast gives: run before a pin of torch or Triton moves.

Triton 3.8 as Inductor of torch 2.14 uses it does not, in some launch configurations: beside `min.NaN` or `max.NaN`
instructions a transposed, vectorized store of FP8 codes writes bytes that decode as NaN (pytorch issue 188841, triton
issue 11111, torchao pull request 4652). The codes of the same values that are stored along rows are right. Our own
quantizers are compared with their definition in `quantize/`; tested here is what Inductor generates.
"""

import itertools

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - it follows the skip

from qtrain.core.hardware.capabilities import has_fp8  # noqa: E402

E4M3_MAX = 448.0
TILES = (16, 32, 64, 128)
SHAPES = ((256, 256), (512, 384), (1024, 4096))


@triton.jit
def _cast_twice_kernel(x_ptr, rows_ptr, columns_ptr, m, k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes of a tile of x [m, k], and the same codes transposed; sizes are multiples of the tile's."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row[:, None] * k + column[None, :]).to(tl.float32)
    x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    codes = x.to(tl.float8e4nv)
    tl.store(rows_ptr + row[:, None] * k + column[None, :], codes)
    tl.store(columns_ptr + column[None, :] * m + row[:, None], codes)


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [M, K] and of its transpose [K, M], as torchao's training asks Inductor for them."""
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, codes.t().contiguous()


@pytest.fixture
def gpu() -> torch.device:
    device = torch.device("cuda")
    if not has_fp8(device):
        pytest.skip("needs a GPU that converts to FP8")
    return device


def values(shape: tuple[int, int], device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, device=device, generator=generator) * 100  # some saturate
    return x.bfloat16()


def assert_same_codes(found: tuple[Tensor, Tensor], x: Tensor, what: str) -> None:
    for name, codes, expected in zip(("rows", "transposed"), found, cast(x), strict=True):
        wrong = int((codes.view(torch.uint8) != expected.view(torch.uint8)).sum())
        assert wrong == 0, f"{what}: {wrong} of {codes.numel()} codes of the {name} store are wrong"


def cast_by_kernel(x: Tensor, block_m: int, block_k: int, warps: int) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    rows, columns = (torch.empty(s, dtype=torch.float8_e4m3fn, device=x.device) for s in ((m, k), (k, m)))
    grid = (m // block_m, k // block_k)
    _cast_twice_kernel[grid](x, rows, columns, m, k, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps)
    return rows, columns


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [2, 4, 8])
def test_a_transposed_store_beside_clamps_that_propagate_nan(warps, gpu):
    x = values((256, 256), gpu)
    for tile in itertools.product(TILES, TILES):
        assert_same_codes(cast_by_kernel(x, *tile, warps), x, f"tile {tile}, {warps} warps")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_inductors_casts(mode, gpu):
    torch._dynamo.reset()
    compiled = torch.compile(cast, mode=mode, dynamic=False)
    for shape in SHAPES:
        x = values(shape, gpu)
        assert_same_codes(compiled(x), x, f"{mode}, {shape}")


@pytest.mark.gpu
def test_inductors_scaled_casts_are_finite_and_close(gpu):
    """Codes of values over a tensorwise scale, where Inductor may round the product in another way than eager."""

    def scaled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = x.abs().amax().float().clamp(min=1e-12) / E4M3_MAX
        codes, transposed = cast(x / scale)
        return codes, transposed, scale

    torch._dynamo.reset()
    compiled = torch.compile(scaled, dynamic=False)
    for shape in SHAPES:
        x = values(shape, gpu)
        codes, transposed, scale = compiled(x)
        for found, true in ((codes, x), (transposed, x.t())):
            error = (found.float() * scale - true.float()).norm() / true.float().norm()
            assert error < 2**-4, f"{shape}: relative error {float(error):.3f}"  # half a step of 3 bits is 2**-4
        assert torch.equal(codes.t().contiguous().view(torch.uint8), transposed.view(torch.uint8)), shape
