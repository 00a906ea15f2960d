"""MX: scales are powers of two by the specification's rule, errors against fp64, non-finite values, kernels."""

import pytest
import torch

from qtrain.core.hardware.capabilities import has_mx
from qtrain.kernels.numerics.formats import dequantize_mx
from qtrain.kernels.quantize.mx import launch_quantize_mx, mx_mm, quantize_mx, quantize_mx_ref, tiled_scale
from tests.cases import KINDS, SHAPES, matrix


@pytest.mark.parametrize("elem,largest,step", [("e4m3", 448.0, 2**-4), ("e5m2", 57344.0, 2**-3)])
@pytest.mark.parametrize("kind", KINDS)
def test_against_fp64(elem, largest, step, kind):
    for seed, shape in enumerate(SHAPES[:6]):
        x = matrix(*shape, seed, kind, torch.bfloat16)
        codes, scale = quantize_mx(x, elem)
        assert codes.shape == shape and scale.shape == (shape[0], -(-shape[1] // 32))
        spread = scale.double().repeat_interleave(32, 1)[:, : shape[1]]
        for i in range(0, shape[1], 32):
            top = x[:, i : i + 32].double().abs().amax(1)
            exponent = torch.frexp(top)[1] - 1 - (8 if elem == "e4m3" else 15)
            true = torch.where(top > 0, 2.0 ** exponent.double(), 2.0**-127).clamp(min=2.0**-127)
            assert torch.equal(scale[:, i // 32].double(), true)
        value = (x.double() / spread).clamp(-largest, largest)
        error = (dequantize_mx(codes, scale).double() / spread - value).abs()
        assert (error <= (value.abs() * step).clamp(min=2**-10 if elem == "e4m3" else 2**-17)).all()


@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf")])
def test_nonfinite_values_show_in_their_group_only(nonfinite):
    x = matrix(3, 70, 0)
    x[1, 40] = nonfinite
    back = dequantize_mx(*quantize_mx(x))
    assert back[1, 32:64].isnan().all() and back.isnan().sum() == 32


def check_kernel(device, dtype, shapes):
    for seed, shape in enumerate(shapes):
        for elem in ("e4m3", "e5m2"):
            x = matrix(*shape, seed, KINDS[seed % 5], dtype).contiguous()
            x[0, -1] = float("nan") if seed % 3 == 2 else 1.0
            x = x.to(device)
            for found, true in zip(launch_quantize_mx(x, elem), quantize_mx_ref(x, elem), strict=True):
                assert torch.equal(found.view(torch.uint8), true.view(torch.uint8)), (shape, elem)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu", torch.float32, [(1, 5), (17, 70), (3, 64)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [tuple(torch.randint(1, 600, (2,), generator=generator).tolist()) for _ in range(200)]
    check_kernel("cuda", dtype, [*shapes, (4096, 4096)])


def test_operator():
    torch.library.opcheck(quantize_mx, (torch.randn(3, 40), "e4m3"))
    assert quantize_mx(torch.zeros(0, 40))[1].shape == (0, 2)


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
