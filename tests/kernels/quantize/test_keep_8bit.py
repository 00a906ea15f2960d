"""What is kept in 8 bits for backward: rounding against fp64, non-finite blocks, kernel and reference alike."""

import pytest
import torch

from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.quantize.keep_8bit import keep_8bit, launch_restore_8bit, restore_8bit, restore_8bit_ref
from qtrain.kernels.quantize.reference import quantize_ref
from tests.cases import KINDS, matrix
from tests.system import ROOT

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


def _data(kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(1024, 4096)
    if "Student" in kind:
        x = torch.distributions.StudentT(4.0).sample(x.shape)
    elif "log-normal" in kind:
        x *= torch.randn(4096).exp()
    elif "elements" in kind:
        x = torch.where(torch.rand(x.shape) < 0.002, 50 * x, x)
    elif "columns" in kind:
        x[:, ::100] *= 30
    return x.bfloat16()


def _computed(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    gate, up = x.chunk(2, 1)
    s = gate.sigmoid()
    return [x, dy * up * s * (1 + gate * (1 - s)), dy * gate * s, gate * s * up]


def test_the_documentation_has_the_measured_error():
    """The table of `docs/memory.md`: of what backward computes from e4m3 codes, and from INT8 ones, within 0.2%."""
    text = (ROOT / "docs/memory.md").read_text()
    lines = text[text.index("| gate and up are") :].split("\n\n")[0].splitlines()[2:]
    assert len(lines) == 5
    for line in lines:
        kind, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        x = _data(kind)
        dy = torch.randn(1024, 2048).double()
        exact = _computed(x.double(), dy)
        for place, fmt in enumerate(("e4m3", "int8")):
            codes, scale = quantize_ref(x, fmt, "1x128")
            rounded = dequantize(codes, scale, fmt, "1x128", x.shape, torch.bfloat16)
            for cell, found, true in zip(cells, _computed(rounded.double(), dy), exact, strict=True):
                error = 100 * ((found - true).norm() / true.norm()).item()
                assert error == pytest.approx(float(cell.split(", ")[place]), abs=0.2), (kind, fmt)


def test_error_does_not_depend_on_neighbors():
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
