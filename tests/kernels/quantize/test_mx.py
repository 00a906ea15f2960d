"""MX: scales are powers of two by the specification's rule, errors against fp64, non-finite values, kernels."""

import pytest
import torch

from qtrain.kernels.numerics.dequantize import dequantize_mx
from qtrain.kernels.quantize.mx import launch_quantize_mx, quantize_mx, quantize_mx_ref
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
