"""Products of MX operands: exact where emulated, scales laid out as cuBLAS reads them."""

import pytest
import torch

from qtrain.core.hardware import has_mx
from qtrain.kernels.gemm.mx_mm import mx_mm, tiled_scale
from qtrain.kernels.quantize.mx import quantize_mx
from tests.cases import matrix


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp64 values of an MX operand."""
    spread = scale.double().repeat_interleave(32, 1)[:, : codes.shape[1]]
    return codes.double() * spread


@pytest.mark.parametrize("shape", [(1, 32, 16), (37, 70, 5), (64, 128, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emulated(shape, dtype):
    m, k, n = shape
    a, b = quantize_mx(matrix(m, k, 0, "outlier"), "e5m2"), quantize_mx(matrix(n, k, 1), "e4m3")
    bias = torch.randn(n)
    y = mx_mm(a[0], b[0], a[1], b[1], dtype, bias)
    true = values(*a) @ values(*b).t() + bias.double()
    assert y.dtype == dtype
    assert (y.double() - true).norm() < (2e-6 if dtype == torch.float32 else 5e-3) * true.norm()


def test_bf16_holds_every_element_times_its_scale():
    x = torch.cat([matrix(8, 64, 0) * 10.0**e for e in range(-20, 20, 4)])
    for elem in ("e4m3", "e5m2"):
        codes, scale = quantize_mx(x, elem)
        true = values(codes, scale)
        assert torch.equal(true.bfloat16().double(), true)


def test_tiles_of_scales():
    """Group g of row r is at 16 * (r % 32) + 4 * (r // 32) + g in its tile of 128 x 4; tiles are row-major."""
    rows, groups = 200, 6
    scale = torch.randint(1, 255, (rows, groups), dtype=torch.uint8)
    tiled = tiled_scale(scale.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert tiled.numel() == 256 * 8
    for r in range(0, rows, 7):
        for g in range(groups):
            tile = (r // 128) * 2 + g // 4
            assert tiled[tile * 512 + 16 * (r % 32) + 4 * (r % 128 // 32) + g % 4] == scale[r, g]


@pytest.mark.gpu
def test_on_the_gpu():
    if not has_mx(torch.device("cuda")):
        pytest.skip("this GPU multiplies no MX operands")
    a, b = (quantize_mx(matrix(256, 512, seed).cuda()) for seed in (0, 1))
    y = mx_mm(a[0], b[0], a[1], b[1], torch.bfloat16)
    true = values(*a) @ values(*b).t()
    assert (y.double() - true).norm() < 5e-3 * true.norm()
