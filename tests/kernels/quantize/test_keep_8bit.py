"""What is kept in 8 bits for backward: rounding against fp64, non-finite blocks, kernel and reference alike."""

import pytest
import torch

from qtrain.kernels.quantize.keep_8bit import keep_8bit, launch_restore_8bit, restore_8bit, restore_8bit_ref
from tests.cases import KINDS, matrix

SHAPES = [(1, 1), (1, 256), (3, 5), (17, 130), (5, 2050), (4, 4224), (0, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_error_against_fp64(dtype):
    """At most half the spacing of e4m3: 1/16 of a value, or 2**-10 of the scale; and rounding to the dtype."""
    for kind in KINDS:
        for seed, (m, k) in enumerate(SHAPES[:-1]):
            x = matrix(m, k, seed, kind, dtype)
            codes, scale, zero = keep_8bit(x)
            assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape and scale.shape == (m, -(-k // 128))
            assert zero.dtype == dtype and zero.tolist() == [0]
            back = restore_8bit(codes, scale, dtype)
            assert back.dtype == dtype
            steps = scale.double().repeat_interleave(128, 1)[:, :k]
            bound = torch.maximum(x.double().abs() / 16, steps / 1024) * (1 + 1e-5)
            bound += 1.1 * x.double().abs() * torch.finfo(dtype).eps
            assert ((back.double() - x.double()).abs() <= bound).all(), (kind, m, k)


def test_measured_error():
    """Of normal numbers 2.6% (RMS), and of those that share a block with one 1,000 times as large."""
    torch.manual_seed(0)
    x = torch.randn(256, 2048)
    for outlier in (1, 1000):
        y = x.clone()
        y[:, ::128] *= outlier
        error = restore_8bit(*keep_8bit(y)[:2], torch.float32) - y
        relative = (error[:, 1::128].norm() / y[:, 1::128].norm()).item()
        assert 0.02 < relative < 0.028


def test_zeros_stay_and_what_is_not_finite_makes_its_block_nan():
    x = matrix(4, 300, 0)
    x[0], x[1, 5], x[2, 290], x[3, 130] = 0, float("nan"), float("inf"), -float("inf")
    back = restore_8bit(*keep_8bit(x)[:2], torch.float32)
    assert (back[0] == 0).all()
    expected = torch.zeros(4, 300, dtype=torch.bool)
    expected[1, :128] = expected[2, 256:] = expected[3, 128:256] = True
    assert torch.equal(back.isnan(), expected) and back[~expected].isfinite().all()


def check_kernel(device, dtypes):
    for dtype in dtypes:
        for seed, shape in enumerate(SHAPES):
            codes, scale, _ = keep_8bit(matrix(*shape, seed, "outlier" if shape[0] else "normal").to(device))
            found = launch_restore_8bit(codes, scale, dtype)
            assert torch.equal(found, restore_8bit_ref(codes, scale, dtype)), shape


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu", [torch.float32])


@pytest.mark.gpu
def test_kernel():
    check_kernel("cuda", [torch.float32, torch.bfloat16])
    x = matrix(70_000, 256, 0, dtype=torch.bfloat16).cuda()
    for on_gpu, on_cpu in zip(keep_8bit(x), keep_8bit(x.cpu()), strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)
    codes, scale, _ = keep_8bit(x)
    assert torch.equal(launch_restore_8bit(codes, scale, x.dtype), restore_8bit_ref(codes, scale, x.dtype))


def check_operators(device):
    x = torch.randn(3, 200, device=device)
    fakes = ("test_faketensor", "test_aot_dispatch_dynamic")  # a CPU cannot compare FP8 tensors, as test_schema does
    torch.library.opcheck(torch.ops.qtrain.keep_8bit.default, (x,), test_utils=fakes[:1])
    codes, scale, _ = keep_8bit(x)
    torch.library.opcheck(torch.ops.qtrain.restore_8bit.default, (codes, scale, torch.bfloat16), test_utils=fakes)


def test_operators():
    check_operators("cpu")


@pytest.mark.gpu
def test_operators_on_gpu():
    check_operators("cuda")
