"""Convolutions in low bits: their three products against fp64, which of them are swapped, and how they train."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtrain
from qtrain.core.errors import UserError
from qtrain.core.hardware.capabilities import has_fp8
from qtrain.quant import SCHEMES, LowBitLinear, choose_linears, describe_choices, quantize_linears, reassign
from qtrain.quant.conv2d import LowBitConv2d
from qtrain.quant.health.probe import high_precision
from qtrain.quant.scheme_map import with_overrides
from tests.quant.emulation import fake_quantize

NEAREST = {"stochastic_rounding": False}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilation": {"kernel_size": (3, 1), "dilation": 2},
    "same": {"kernel_size": 4, "padding": "same"},
    "valid": {"kernel_size": (1, 3), "padding": "valid"},
    "patches": {"kernel_size": 2, "stride": 2},
    "pointwise": {"kernel_size": 1},
    "pointwise stride": {"kernel_size": 1, "stride": 2},
    "pointwise padding": {"kernel_size": 1, "padding": 1},
}
CASES = [
    ("int8", NEAREST, ("int8", "rowwise"), ("int8", "rowwise"), False),
    ("int8", NEAREST | {"granularity": "tensorwise"}, ("int8", "tensorwise"), ("int8", "tensorwise"), False),
    ("fp8_tensorwise", {"grad_format": "e5m2"}, ("e4m3", "tensorwise"), ("e5m2", "tensorwise"), False),
    ("fp8_rowwise", {}, ("e4m3", "rowwise"), ("e4m3", "rowwise"), True),
]
"""Scheme, options, what `output` reads of x and w, what `grad_input` reads of dy, powers of two."""


def images(*shape: int, seed: int = 0, outliers: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if outliers:
        x[0] *= 30
        x[:, 1] *= 10
    return x


def conv_of(geometry: str, channels: int = 16, out: int = 32, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(channels, out, bias=bias, **GEOMETRIES[geometry])


def swapped(conv: nn.Conv2d, scheme: str, options: dict[str, Any], seed: int = 0) -> tuple[LowBitConv2d, Any]:
    model = nn.Sequential(copy.deepcopy(conv))
    quantized = quantize_linears(model, SCHEMES.make(scheme, options, "-"), seed=seed)
    assert isinstance(model[0], LowBitConv2d), quantized.choices[0].reason
    return model[0], quantized


def run(module: nn.Module, x: Tensor, dy: Tensor | None = None) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    found = {"output": y.detach(), "grad_input": x.grad, "grad_weight": module.weight.grad}
    return found if module.bias is None else found | {"bias": module.bias.grad}


def emulated(conv: nn.Conv2d, x: Tensor, dy: Tensor, reads_x, reads_dy, power_of_two: bool) -> dict[str, Tensor]:
    """The three products in fp64 of operands that are rounded by formulas; rows are images, and channels of w."""

    def rounded(t: Tensor, reading, dim: int = 0) -> Tensor:
        matrix = t.transpose(0, dim)
        return fake_quantize(matrix.flatten(1), reading, power_of_two).view(matrix.shape).transpose(0, dim)

    def products(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        pads = (conv.stride, conv.padding, conv.dilation)
        y = F.conv2d(a, b, None, *pads)
        return y, *torch.autograd.grad(y, (a, b), c)

    w, whole = conv.weight.detach(), "tensorwise"
    y = products(rounded(x, reads_x), rounded(w, reads_x), dy.double())[0] + conv.bias.double().view(1, -1, 1, 1)
    dx = products(x.double(), rounded(w, reads_x, 1), rounded(dy, reads_dy))[1]
    dw = products(rounded(x, (reads_x[0], whole)), w.double(), rounded(dy, (reads_dy[0], whole)))[2]
    return {"output": y, "grad_input": dx, "grad_weight": dw}


@pytest.mark.parametrize("scheme,options,reads_x,reads_dy,power_of_two", CASES)
@pytest.mark.parametrize("geometry", [name for name in GEOMETRIES if name not in ("pointwise", "pointwise stride")])
def test_products_are_those_of_rounded_operands(geometry, scheme, options, reads_x, reads_dy, power_of_two):
    conv = conv_of(geometry)
    x = images(3, 16, 9, 8)
    dy = images(*conv(x).shape, seed=1)
    found = run(swapped(conv, scheme, options)[0], x, dy)
    for name, expected in emulated(conv, x, dy, reads_x, reads_dy, power_of_two).items():
        error = (found[name].double() - expected).norm() / expected.norm()
        assert error < 1e-6, (name, error)
    torch.testing.assert_close(found["bias"], dy.sum((0, 2, 3)))


@pytest.mark.parametrize("geometry", ["pointwise", "pointwise stride"])
@pytest.mark.parametrize("scheme", ["int8", "fp8_rowwise", "switchback"])
def test_a_kernel_of_one_pixel_is_a_linear(geometry, scheme):
    """Bit for bit, random bits included."""
    conv, options = conv_of(geometry), {}
    linear = nn.Linear(16, 32)
    linear.weight, linear.bias = nn.Parameter(conv.weight.detach().flatten(1)), nn.Parameter(conv.bias.detach())
    model = nn.Sequential(linear)
    quantize_linears(model, SCHEMES.make(scheme, options, "-"), seed=3)
    module, _ = swapped(conv, scheme, options, seed=3)
    x, stride = images(2, 16, 5, 7), conv.stride[0]
    pixels = x[:, :, ::stride, ::stride].permute(0, 2, 3, 1)
    dy = images(*conv(x).shape, seed=1)
    found, expected = run(module, x, dy), run(model[0], pixels, dy.permute(0, 2, 3, 1))
    assert torch.equal(found["output"], expected["output"].permute(0, 3, 1, 2))
    assert torch.equal(found["grad_weight"].flatten(1), expected["grad_weight"])
    dx = found["grad_input"]
    assert torch.equal(dx[:, :, ::stride, ::stride], expected["grad_input"].permute(0, 3, 1, 2))
    assert dx.count_nonzero() <= expected["grad_input"].numel()


@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_each_product_may_stay_in_high_precision(gemm):
    conv, x = conv_of("stride"), images(2, 16, 9, 8)
    others = {name: "bf16" for name in ("output", "grad_input", "grad_weight") if name != gemm}
    options = {**others, "stochastic_rounding": False}
    dy = images(*conv(x).shape, seed=1)
    found, exact = run(swapped(conv, "int8", options)[0], x, dy), run(conv, x, dy)
    for name in others:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-4, atol=1e-4 * float(exact[name].abs().max()))
    error = float((found[gemm] - exact[gemm]).norm() / exact[gemm].norm())
    assert 1e-4 < error < 0.1


def test_stochastic_rounding_is_unbiased():
    """The mean of `grad_weight` over steps comes closer to the exact one than any of them; evaluation draws nothing."""
    conv, x = conv_of("3x3", bias=False), images(4, 16, 6, 6, outliers=False)
    dy = images(*conv(x).shape, seed=1, outliers=False) ** 5
    module, quantized = swapped(conv, "int8", {})
    exact, found = run(conv, x, dy)["grad_weight"].clone(), []
    for step in range(12):
        quantized.set_step(step)
        module.weight.grad = None
        found.append(run(module, x, dy)["grad_weight"])
    errors = [float((one - exact).norm()) for one in found]
    assert float((sum(found) / len(found) - exact).norm()) < 0.5 * min(errors)
    module.eval()
    assert torch.equal(module(x), module(x))


def test_what_is_not_finite_shows_and_zeros_are_zeros():
    conv = conv_of("3x3", bias=False)
    module, _ = swapped(conv, "int8", NEAREST)
    x = images(3, 16, 5, 5)
    assert not module(torch.zeros_like(x)).any()
    for value in (float("nan"), float("inf")):
        x[1, 3, 2, 2] = value
        y = module(x)
        assert y[1].isnan().all() and y[[0, 2]].isfinite().all()
    with torch.no_grad():
        module.weight[4, 0, 0, 0] = float("nan")
    module.refresh()
    assert module(images(1, 16, 5, 5))[0, 4].isnan().all()


@pytest.mark.parametrize("shape", [(1, 16, 5, 5), (16, 5, 5), (2, 16, 3, 1)])
def test_shapes_and_memory_formats(shape):
    """Batch 1, none, and a map of one column; channels last or not, the result has the same values."""
    module, _ = swapped(conv_of("3x3"), "int8", NEAREST)
    x = images(*shape, outliers=False)
    y = module(x)
    assert y.shape == conv_of("3x3")(x).shape
    if x.ndim == 4:
        assert torch.equal(module(x.contiguous(memory_format=torch.channels_last)), y)
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_an_image_smaller_than_the_kernel_is_refused():
    module, _ = swapped(conv_of("dilation"), "int8", {})
    with pytest.raises(ValueError, match=r"larger than the padded image"):
        module(images(1, 16, 4, 4))


# ---- the swap --------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A stem, a residual block with a change of stride, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.skip = nn.Conv2d(16, 32, 1, stride=2)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.fc = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.norm(self.conv(x)) + self.skip(x)
        return self.fc(self.depthwise(x).relu().mean((2, 3)))


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


REFUSED = {
    "conv1d": (nn.Conv1d(16, 16, 3), "a Conv1d, not a plain Conv2d"),
    "conv3d": (nn.Conv3d(16, 16, 3), "a Conv3d, not a plain Conv2d"),
    "transposed": (nn.ConvTranspose2d(16, 16, 3), "a ConvTranspose2d, not a plain Conv2d"),
    "reflect": (nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"), "its padding is reflect, not zeros"),
    "groups": (nn.Conv2d(32, 32, 3, groups=2), "it has 2 groups"),
    "depthwise": (nn.Conv2d(32, 32, 3, groups=32), "it has 32 groups"),
    "stem": (nn.Conv2d(3, 64, 7), "3 input channels are no multiple of 16"),
    "odd": (nn.Conv2d(16, 24, 1), "24 output channels are no multiple of 16"),
    "subclass": (type("Conv2dSame", (nn.Conv2d,), {})(16, 16, 3), "a Conv2dSame, not a plain Conv2d"),
    "normalized": (nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3)), "ParametrizedConv2d"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_in_high_precision_says_why(name):
    conv, reason = REFUSED[name]
    model = nn.Sequential(copy.deepcopy(conv), nn.Linear(16, 16))
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "-"), seed=0)
    assert type(model[0]) is type(conv) and reason in quantized.choices[0].reason
    assert isinstance(model[1], LowBitLinear)


@pytest.mark.parametrize("scheme", SCHEMES.names())
def test_every_scheme_swaps_convolutions_or_says_why(scheme):
    model = blocks()
    options = {"sub_norm": False} if SCHEMES.get(scheme, "-").sub_norm else {}
    made = SCHEMES.make(scheme, options, "-")
    choices = choose_linears(
        model, made if scheme != "auto" else with_overrides({"fc": "bf16"}, made), device=torch.device("cpu")
    )
    reasons = {choice.name: choice.reason for choice in choices if choice.kernel}
    assert reasons["stem"] and reasons["depthwise"]
    works = scheme in ("int8", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "switchback")
    assert (reasons["conv"] is None) == (reasons["skip"] is None) == works


def test_the_listing():
    lines = describe_choices(choose_linears(blocks(), SCHEMES.make("int8", {}, "-"), device=torch.device("cpu")))
    assert lines == [
        "   1 x stem 3x3 3 -> 16: left, 3 input channels are no multiple of 16",
        "   1 x conv 3x3 16 -> 32: quantized",
        "   1 x skip 1x1 16 -> 32: quantized",
        "   1 x depthwise 3x3 32 -> 32, 32 groups: left, it has 32 groups, whose products are too small for tensor "
        "cores",
        "   1 x fc 32 -> 16: quantized",
    ]
    lines = describe_choices(choose_linears(blocks(), SCHEMES.make("bf16", {}, "-"), device=torch.device("cpu")))
    assert lines == ["   5 linears and convolutions: all left, the scheme quantizes nothing"]


def losses(model: nn.Module, quantized: Any, steps: int, lr: float = 3e-3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    found = []
    for step in range(steps):
        quantized.set_step(step)
        x = images(8, 3, 8, 8, seed=step % 4, outliers=False)
        loss = F.cross_entropy(model(x), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        quantized.refresh()
        quantized.assert_fresh()
        found.append(float(loss))
    return found


@pytest.mark.parametrize("scheme,options", [("int8", {}), ("fp8_tensorwise", {"scaling": "delayed", "history": 2})])
def test_it_trains_as_in_high_precision(scheme, options):
    model, plain = blocks(), blocks()
    quantized = quantize_linears(model, SCHEMES.make(scheme, options, "-"), seed=0)
    exact = losses(plain, quantize_linears(plain, SCHEMES.make("bf16", {}, "-"), seed=0), 20)
    found = losses(model, quantized, 20)
    assert exact[-1] < 0.8 * exact[0]
    assert abs(found[-1] - exact[-1]) < 0.1 * exact[0] and found != exact
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_reassigned_there_and_back():
    model = blocks()
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "-"), seed=0)
    parameters, kept = dict(model.named_parameters()), model.conv
    model.conv.register_forward_hook(lambda module, inputs, output: None)
    reassign(model, quantized, {name: SCHEMES.make("bf16", {}, "-") for name in ("conv", "skip")})
    assert type(model.conv) is type(model.skip) is nn.Conv2d and model.conv.stride == kept.stride
    assert len(model.conv._forward_hooks) == 1
    exact = blocks()
    torch.testing.assert_close(model.conv(images(1, 16, 6, 6)), exact.conv(images(1, 16, 6, 6)))
    reassign(model, quantized, {"conv": SCHEMES.make("fp8_rowwise", {}, "-")})
    assert isinstance(model.conv, LowBitConv2d) and quantized.schemes["conv"] == "fp8_rowwise"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    losses(model, quantized, 1)
    with pytest.raises(UserError, match=r"conv cannot run in fp8_blockwise: .*1x128 blocks are for linears"):
        reassign(model, quantized, {"conv": SCHEMES.make("fp8_blockwise", {}, "-")})


def test_a_pass_in_high_precision():
    """As a health sample makes one."""
    model, plain = blocks(), blocks()
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "-"), seed=0)
    x = images(2, 3, 8, 8)
    with high_precision(quantized.linears):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
def test_it_is_compiled_whole(compiler):
    model, x = blocks(), images(2, 3, 8, 8, outliers=False)
    quantize_linears(model, SCHEMES.make("int8", NEAREST, "-"), seed=0)
    again = copy.deepcopy(model)
    compiled = torch.compile(again, fullgraph=True)
    for one in (model, compiled):
        one(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-3 * float(p.grad.abs().max()), msg=name)


def test_any_model_of_convolutions():
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 1))
    found = qtrain.quantize(model, "int8", overrides={"2": "bf16"})
    assert found.schemes == {"0": "int8", "2": "bf16"} and isinstance(model[0], LowBitConv2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight_codes.output_codes.clone()
    model(images(2, 16, 6, 6)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight_codes.output_codes, before)
    with pytest.raises(UserError, match=r"no linear or convolution of this Sequential is quantized: 3 input channels"):
        qtrain.quantize(nn.Sequential(nn.Conv2d(3, 16, 3)), "int8")


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", ["3x3", "stride", "dilation", "same", "patches", "pointwise stride"])
@pytest.mark.parametrize("scheme,options", [("int8", {}), ("int8", {"granularity": "tensorwise"}), ("fp8_rowwise", {})])
def test_on_a_gpu(geometry, scheme, options):
    """In bf16, from images whose number is no multiple of 16: as in high precision but for the rounding of 8 bits."""
    if scheme.startswith("fp8") and not has_fp8(torch.device("cuda")):
        pytest.skip("FP8 needs compute capability 8.9")
    conv = conv_of(geometry, 64, 128).to("cuda", torch.bfloat16)
    x = images(5, 64, 19, 17, outliers=False).to("cuda", torch.bfloat16)
    dy = images(*conv(x).shape, seed=1, outliers=False).to("cuda", torch.bfloat16)
    found, exact = run(swapped(conv, scheme, options)[0], x, dy), run(conv.float(), x.float(), dy.float())
    for name, expected in exact.items():
        error = float((found[name].float() - expected).norm() / expected.norm())
        assert 1e-4 < error < 0.06, (name, error)
