"""Convolutions of codes against fp64: every geometry, the three products, what is not finite, and the kernels."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.core.hardware.capabilities import has_fp8
from qtrain.kernels.compiler import triton
from qtrain.kernels.conv import gather_mm, grad_weight
from qtrain.kernels.conv.gather_mm import conv_grad_input, conv_output, launch_gather_mm
from qtrain.kernels.conv.geometry import ConvShape
from qtrain.kernels.conv.grad_weight import conv_grad_weight, launch_conv_grad_weight, pixels_each
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, padded_k
from tests.cases import sampled

GEMMS = ("output", "grad_input", "grad_weight")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def conv_shape(n, c, k, size, kernel, stride=1, padding=0, dilation=1) -> ConvShape:
    """Of numbers, or of pairs (height, width)."""
    pairs = [v if isinstance(v, tuple) else (v, v) for v in (size, kernel, stride, padding, dilation)]
    (h, w), (r, s), *rest = pairs
    (stride_h, stride_w), (pad_h, pad_w), (dil_h, dil_w) = rest
    p = (h + 2 * pad_h - dil_h * (r - 1) - 1) // stride_h + 1
    q = (w + 2 * pad_w - dil_w * (s - 1) - 1) // stride_w + 1
    return ConvShape(n, c, k, h, p, r, stride_h, pad_h, dil_h, w, q, s, stride_w, pad_w, dil_w)


SHAPES = {
    "3x3": conv_shape(2, 16, 32, 8, 3, padding=1),
    "stride": conv_shape(3, 16, 16, 9, 3, stride=2, padding=1),
    "stride without padding": conv_shape(1, 32, 16, (7, 10), 3, stride=2),
    "one tap a phase": conv_shape(2, 16, 16, 8, 2, stride=2),
    "phases without taps": conv_shape(2, 16, 16, 7, 1, stride=3),
    "dilation": conv_shape(2, 16, 16, (11, 9), 3, padding=2, dilation=2),
    "dilation and stride": conv_shape(1, 16, 16, 13, (3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 3)),
    "odd": conv_shape(1, 5, 7, (5, 6), (3, 1), padding=(1, 0)),
    "kernel beyond the image": conv_shape(2, 16, 16, 2, 5, padding=3),
    "7x7": conv_shape(1, 3, 16, 15, 7, stride=2, padding=3),
    "one pixel": conv_shape(4, 16, 48, 1, 3, padding=1),
}


def codes(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator, device=device)
    return torch.randn(shape, generator=generator, device=device).mul(30).to(dtype)


def operands(s: ConvShape, dtypes, device: str = "cpu") -> dict[str, Tensor]:
    """Codes of x [N, H, W, C], w [K, R, S, C] and dy [N, P, Q, K]; scales of images and channels."""
    generator = torch.Generator(device).manual_seed(9)
    scales = {name: s_n for name, s_n in (("x", s.n), ("dy", s.n), ("w", s.k), ("wt", s.c))}
    return {
        "x": codes((s.n, s.h, s.w, s.c), dtypes[0], 1, device),
        "w": codes((s.k, s.r, s.s, s.c), dtypes[0], 2, device),
        "dy": codes((s.n, s.p, s.q, s.k), dtypes[1], 3, device),
        **{f"s{name}": torch.rand(n, generator=generator, device=device) * 1e-2 + 1e-3 for name, n in scales.items()},
    }


def truth(s: ConvShape, gemm: str, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    """The result of a GEMM in fp64, channels last, of tensors in fp64 and channels last."""
    x, w, dy = (t.double().permute(0, 3, 1, 2).requires_grad_() for t in (x, w, dy))
    stride, padding, dilation = (s.stride_h, s.stride_w), (s.padding_h, s.padding_w), (s.dilation_h, s.dilation_w)
    y = F.conv2d(x, w, None, stride, padding, dilation)
    assert y.shape == dy.shape
    if gemm == "output":
        return y.detach().permute(0, 2, 3, 1)
    grads = torch.autograd.grad(y, (x, w), dy)
    return grads[0 if gemm == "grad_input" else 1].permute(0, 2, 3, 1)


def images_last(t: Tensor) -> Tensor:
    """[N, H, W, C] -> [HWC, N], as a quantizer writes transposed codes."""
    return t.view(torch.uint8).flatten(1).t().contiguous().view(t.dtype)


def by_operator(s: ConvShape, gemm: str, t: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The result, and in fp64 what it should be and the sum of magnitudes of its products."""
    x, w, dy = (t[name].double() for name in ("x", "w", "dy"))
    per_image = (-1, 1, 1, 1)
    if gemm == "output":
        bias = torch.linspace(-1, 1, s.k, device=w.device)
        out = conv_output(t["x"], t["w"], t["sx"], t["sw"], list(s), dtype, bias)
        x, w = x * t["sx"].double().view(per_image), w * t["sw"].double().view(per_image)
    elif gemm == "grad_input":
        wt = t["w"].view(torch.uint8).permute(3, 1, 2, 0).contiguous().view(t["w"].dtype)
        out = conv_grad_input(t["dy"], wt, t["sdy"], t["swt"], list(s), dtype)
        dy, w = dy * t["sdy"].double().view(per_image), w * t["swt"].double()
    else:
        sdy, sx = t["sdy"][:1], t["sx"][:1]
        out = conv_grad_weight(images_last(t["dy"]), images_last(t["x"]), sdy, sx, list(s), dtype)
        dy, x = dy * sdy.double(), x * sx.double()
    expected, size = truth(s, gemm, x, w, dy), truth(s, gemm, x.abs(), w.abs(), dy.abs())
    if gemm == "output":
        expected, size = expected + bias.double(), size + bias.abs().double()
    return out, expected, size


def assert_close(out: Tensor, expected: Tensor, size: Tensor, accumulation: float = 2**-23) -> None:
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-22
    assert out.shape == expected.shape
    assert ((out.double() - expected).abs() <= rounding * expected.abs() + accumulation * size + 1e-30).all()


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", SHAPES)
def test_against_fp64(name, gemm):
    s = SHAPES[name]
    for dtypes, dtype in (((torch.int8, torch.int8), torch.float32), ((E4M3, E5M2), torch.bfloat16)):
        assert_close(*by_operator(s, gemm, operands(s, dtypes), dtype))


def test_one_scale_for_all():
    s = SHAPES["stride"]
    t = operands(s, (torch.int8, torch.int8))
    t |= {name: t[name][:1] for name in ("sx", "sw", "sdy", "swt")}
    for gemm in GEMMS:
        assert_close(*by_operator(s, gemm, t, torch.float32))


def test_zeros_give_zeros():
    s = SHAPES["3x3"]
    t = {
        name: torch.zeros_like(v) if v.dtype == torch.int8 else v for name, v in operands(s, (torch.int8,) * 2).items()
    }
    assert not conv_output(t["x"], t["w"], t["sx"], t["sw"], list(s), torch.bfloat16).any()
    for gemm in ("grad_input", "grad_weight"):
        assert not by_operator(s, gemm, t, torch.bfloat16)[0].any()


def test_nonfinite_scale_shows():
    """An image with a NaN, whose codes are zeros, is NaN in the output; the others are not."""
    s = SHAPES["3x3"]
    t = operands(s, (torch.int8, torch.int8))
    t["sx"][1], t["sdy"][0] = float("nan"), float("inf")
    out = conv_output(t["x"], t["w"], t["sx"], t["sw"], list(s), torch.bfloat16)
    assert out[1].isnan().all() and out[0].isfinite().all()
    dx = by_operator(s, "grad_input", t, torch.bfloat16)[0]
    assert not dx[0].isfinite().any() and dx[1].isfinite().all()


def test_long_sums_do_not_overflow():
    """All codes at their largest, more products than an int32 sum holds."""
    s = conv_shape(1, 1, 1, 400, 1)
    x = torch.full((400 * 400, 1), 127, dtype=torch.int8)
    assert s.p * s.q > LONGEST_EXACT_K
    out = conv_grad_weight(-x, x, torch.ones(1), torch.ones(1), list(s), torch.float32)
    assert out.item() == pytest.approx(-127 * 127 * s.p * s.q, rel=1e-6)
    # So many tiles that SMs alone would ask for one slice: it would be too long.
    shape, tiling = conv_shape(256, 512, 512, 56, 3, padding=1), Tiling(64, 128, 128, 4, 4)
    assert 256 * 56 * 56 > LONGEST_EXACT_K >= 256 * pixels_each(shape, 256, tiling, 132) > 0.9 * LONGEST_EXACT_K


def test_every_pixel_of_grad_input_is_of_one_phase():
    for s in SHAPES.values():
        for dimension in (s.height, s.width):
            passes = dimension.backward()
            seen = [taps.first + i * taps.step for taps in passes for i in range(taps.count)]
            assert sorted(seen) == list(range(dimension.inputs))
            # No tap twice, and of a kernel that is no longer than its stride none that multiplies a zero.
            assert sum(taps.taps for taps in passes) <= dimension.kernel


def test_operators_are_traced_as_one_call():
    """Fakes have the shape and dtype of results."""
    s = SHAPES["stride"]
    t = operands(s, (torch.int8, torch.int8))
    x, w, dy, one = t["x"], t["w"], t["dy"], torch.ones(1)
    wt = w.permute(3, 1, 2, 0).contiguous()
    for op, arguments in (
        (conv_output, (x, w, t["sx"], t["sw"], list(s), torch.bfloat16)),
        (conv_grad_input, (dy, wt, t["sdy"], t["swt"], list(s), torch.bfloat16)),
        (conv_grad_weight, (images_last(dy), images_last(x), one, one, list(s), torch.float32)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


# ---- kernels ---------------------------------------------------------------------------------------------------------

SMALL = Tiling(16, 32, 32, 4, 2)


def run_kernels(s: ConvShape, gemm: str, t: dict[str, Tensor], tiling: Tiling) -> Tensor:
    """A GEMM by its kernel, in fp32, with scales as `by_operator` has them."""
    if gemm == "grad_weight":
        dy, x = padded_k(images_last(t["dy"])), padded_k(images_last(t["x"]))
        return launch_conv_grad_weight(dy, x, t["sdy"][:1], t["sx"][:1], list(s), torch.float32, tiling)
    if gemm == "output":
        out = torch.full((s.n, s.p, s.q, s.k), float("nan"), device=t["x"].device)
        bias = torch.linspace(-1, 1, s.k, device=out.device)
        passes = (s.height.forward(), s.width.forward())
        launch_gather_mm(t["x"], t["w"], t["sx"], t["sw"], out, passes, tiling, bias=bias, fast_accum=False)
        return out
    out = torch.full((s.n, s.h, s.w, s.c), float("nan"), device=t["x"].device)
    wt = t["w"].view(torch.uint8).permute(3, 1, 2, 0).contiguous().view(t["w"].dtype)
    for height in s.height.backward():
        for width in s.width.backward():
            passes = (height, width)
            launch_gather_mm(t["dy"], wt, t["sdy"], t["swt"], out, passes, tiling, fast_accum=False)
    return out


@pytest.mark.interpreter
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(
    "name",
    sampled(["stride", "dilation and stride", "phases without taps", "one pixel"], lambda name: name != "stride"),
)
def test_in_the_interpreter(name, gemm):
    """In fp32: the interpreter's products of bf16 and its rounding to bf16 are wrong."""
    s = SHAPES[name]
    for dtypes in ((torch.int8, torch.int8), (E4M3, E4M3)):
        t = operands(s, dtypes)
        if dtypes[0] == E4M3:  # one scale for all too
            t |= {name: t[name][:1] for name in ("sx", "sw", "sdy", "swt")}
        assert_close(run_kernels(s, gemm, t, SMALL), *by_operator(s, gemm, t, torch.float32)[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("name", [*SHAPES, "resnet", "wide"])
def test_kernels_on_a_gpu(name, gemm):
    """Every tiling, against fp64; INT8 sums are exact, so all tilings agree with the definition to a rounding."""
    more = {
        "resnet": conv_shape(32, 64, 64, 56, 3, padding=1),
        "wide": conv_shape(24, 96, 272, 15, 3, stride=2, padding=1),
    }
    s = (SHAPES | more)[name]
    if s.c % 16 or s.k % 16:
        pytest.skip("stays in bf16")
    dtypes = [(torch.int8, torch.int8), *([(E4M3, E4M3), (E4M3, E5M2)] if has_fp8(torch.device("cuda")) else [])]
    for pair in dtypes:
        t = operands(s, pair, "cuda")
        out, expected, size = by_operator(s, gemm, t, torch.bfloat16)
        # FP8's tensor cores add 32 products at a time and keep about 13 bits; with fast accumulation of the sum too.
        fast, exact = (2**-23, 2**-20) if pair[0] == torch.int8 else (2**-10, 2**-12)
        assert_close(out, expected, size, fast)
        tilings = (grad_weight if gemm == "grad_weight" else gather_mm).TILINGS
        for tiling in tilings.values():
            try:
                assert_close(run_kernels(s, gemm, t, tiling), expected, size, exact)
            except triton.runtime.errors.OutOfResources:  # as `choose` drops it
                continue


@pytest.mark.gpu
def test_operators_run_kernels(monkeypatch):
    """The dispatch reaches a kernel for shapes of networks, and the definition where it is forced."""
    launches = []
    for module, name in ((gather_mm, "launch_gather_mm"), (grad_weight, "launch_conv_grad_weight")):
        launch = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, launch=launch, **kw: (launches.append(1), launch(*args, **kw))[1]
        )
    t = operands(SHAPES["3x3"], (torch.int8, torch.int8), "cuda")
    for count, gemm in enumerate(GEMMS, 1):
        by_operator(SHAPES["3x3"], gemm, t, torch.bfloat16)
        assert len(launches) >= count
    monkeypatch.setenv("QTRAIN_IMPL", "ref")
    launches.clear()
    assert_close(*by_operator(SHAPES["3x3"], "output", t, torch.bfloat16))
    assert not launches
