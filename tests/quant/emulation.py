"""Every scheme once more, in fp64 and in other words: operands rounded by formulas, multiplied in double precision.

`TABLE` says, apart from the schemes themselves, in which format and with which scales each GEMM reads its operands:
what the schemes are held against.
"""

import torch
from torch import Tensor, nn

from qtrain.kernels.numerics.philox import ROUNDED_TENSORS, random_bits_ref
from qtrain.kernels.quantize.nvfp4 import SIGNS
from qtrain.quant import SCHEMES, LowBitLinear
from qtrain.quant.scheme import applies

Reading = tuple[str, str]
"""Format and granularity, as the GEMM reads the operand: along its rows."""

# largest number, bits of the mantissa, smallest normal exponent
FLOATS = {"e4m3": (448.0, 3, -6), "e5m2": (57344.0, 2, -14), "e2m1": (6.0, 1, 0)}
INTEGERS = {"int8": 127.0, "int4": 7.0}


def rounded_float(x: Tensor, fmt: str, bits: Tensor | None = None) -> Tensor:
    """x, fp64, rounded to the nearest number of an FP8 format, ties to even, or away from zero where the 16 random bits
    of an element say so; saturating."""
    largest, mantissa, lowest = FLOATS[fmt]
    exponent = torch.frexp(x).exponent.sub(1).clamp(min=lowest)
    steps = x / torch.ldexp(torch.ones_like(x), exponent - mantissa)
    steps = steps.round() if bits is None else (steps.abs() + (bits + 0.5) / 2**16).floor() * steps.sign()
    return torch.ldexp(steps, exponent - mantissa).clamp(-largest, largest)


def rounded_integer(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """x, fp64, rounded to the nearest integer, ties to even, or up where the random bits of an element say so."""
    return x.round() if bits is None else (((x * 2**15).round() + bits // 2) / 2**15).floor()


def fake_quantize(
    x: Tensor,
    reading: Reading,
    power_of_two: bool = False,
    scale: Tensor | None = None,
    bits: Tensor | None = None,
) -> Tensor:
    """x [R, C] rounded, as fp64 values. scale: given for the whole of it; bits: [R, C], to round stochastically."""
    fmt, granularity = reading
    x = x.double()
    if fmt == "mx":
        return _fake_mx(x)
    if fmt == "nvfp4":
        return _fake_nvfp4(x, bits)
    largest = INTEGERS.get(fmt) or FLOATS[fmt][0]
    if scale is None:
        scale = (_absmax(x, granularity).float() * (1 / largest)).clamp(min=1e-12)  # kept in fp32
        if power_of_two:
            fraction, exponent = torch.frexp(scale)
            scale = torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int())
    scaled = x / scale.double()
    if fmt in INTEGERS:
        return rounded_integer(scaled, bits).clamp(-largest, largest) * scale.double()
    return rounded_float(scaled, fmt, bits) * scale.double()


def _absmax(x: Tensor, granularity: str) -> Tensor:
    """|x|'s largest in each element's group, spread over the group: [R, C]."""
    if granularity == "tensorwise":
        return x.abs().amax().expand(x.shape)
    if granularity == "rowwise":
        return x.abs().amax(dim=1, keepdim=True).expand(x.shape)
    rows, columns = (int(n) for n in granularity.split("x"))
    whole = nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = whole.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return (
        blocks.abs()
        .amax(dim=(1, 3), keepdim=True)
        .expand(blocks.shape)
        .reshape(whole.shape)[: x.shape[0], : x.shape[1]]
    )


def _fake_mx(x: Tensor) -> Tensor:
    """e4m3 elements in groups of 32, scaled by 2 ** (exponent of the absmax - 8)."""
    absmax = _absmax(x, "1x32")
    scale = torch.ldexp(torch.ones_like(x), torch.frexp(absmax).exponent - 1 - 8).clamp(min=2.0**-127)
    return rounded_float(x / scale, "e4m3") * scale


def _fake_nvfp4(x: Tensor, bits: Tensor | None) -> Tensor:
    """e2m1 elements in groups of 16 with an e4m3 scale each, under a scale of the whole tensor kept in fp32."""
    tensor_scale = (x.abs().amax().float() / (6 * 448)).clamp(min=1e-12).double()
    scale = rounded_float(_absmax(x, "1x16") / 6 / tensor_scale, "e4m3").clamp(min=2.0**-9) * tensor_scale
    return rounded_float(x / scale, "e2m1", bits) * scale


def rotate(x: Tensor) -> Tensor:
    """x [R, C], fp64: each 16 columns times diag(signs) and the orthonormal Hadamard matrix, C padded with zeros."""
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]) / 4
    rotation = (torch.tensor(SIGNS)[:, None] * hadamard).to(x.device, torch.float64)
    groups = nn.functional.pad(x.double(), (0, -x.shape[1] % 16)).unflatten(1, (-1, 16))
    return (groups @ rotation).flatten(1)


def same(a: Reading | None, b: Reading | None = None) -> dict[str, tuple[Reading, Reading] | None]:
    """All three GEMMs read their operands alike."""
    return {gemm: (a, b or a) if a else None for gemm in ("output", "grad_input", "grad_weight")}


_BY_TOKEN = ("e4m3", "1x128")
_ROTATED = ("nvfp4", "1x16 rotated")

TABLE: dict[str, dict[str, tuple[Reading, Reading] | None]] = {
    "int8": same(("int8", "rowwise")),
    "switchback": same(("int8", "rowwise"), ("int8", "tensorwise")) | {"grad_weight": None},
    "int8_blockwise": same(("int8", "32x32")),
    "fp8_tensorwise": same(("e4m3", "tensorwise")),
    "fp8_rowwise": same(("e4m3", "rowwise")),
    "fp8_rowwise_gw_hp": {
        "output": (("e4m3", "rowwise"), ("e4m3", "rowwise")),
        "grad_input": (("e4m3", "rowwise"), ("e4m3", "tensorwise")),
        "grad_weight": None,
    },
    "fp8_blockwise": same(_BY_TOKEN, ("e4m3", "128x128")) | {"grad_weight": (_BY_TOKEN, _BY_TOKEN)},
    "int4": same(("int8", "rowwise")) | {"output": (("int4", "rowwise"), ("int4", "rowwise"))},
    "mxfp8": same(("mx", "1x32")),
    "nvfp4": same(("nvfp4", "1x16")) | {"grad_weight": (_ROTATED, _ROTATED)},
}
POWER_OF_TWO = {"fp8_rowwise"}


class Emulated(torch.autograd.Function):
    """y = x · wᵀ and its gradients, fp64, each operand rounded as the linear's readings and draws say."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, linear: "EmulatedLinear"):
        ctx.save_for_backward(x, w)
        ctx.linear = linear
        a, b = linear.operands("output", x=x, w=w)
        return a @ b.t()

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, w = ctx.saved_tensors
        a, b = ctx.linear.operands("grad_input", dy=dy, w=w.t())
        c, d = ctx.linear.operands("grad_weight", dy=dy.t(), x=x.t())
        return a @ b.t(), c @ d.t(), None


class EmulatedLinear(nn.Module):
    """An nn.Linear in fp64 whose GEMMs are those of a scheme.

    key: what the GEMMs that `stochastic` says draw under, as a LowBitLinear's.
    """

    key: Tensor | None = None
    stochastic: bool | tuple[str, ...] = False
    stochastic_tensors: tuple[str, ...] = ("x", "w", "dy")

    def __init__(self, linear: nn.Linear, readings: dict, power_of_two: bool):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().double())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().double())
        self.readings, self.power_of_two = readings, power_of_two

    def forward(self, x: Tensor) -> Tensor:
        y = Emulated.apply(x.flatten(0, -2), self.weight, self)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def operands(self, gemm: str, **tensors: Tensor) -> list[Tensor]:
        """Both operands of a GEMM, by the names that they draw under, rounded as it reads them: along their rows."""
        pair = self.readings[gemm]
        if pair is None:
            return [t.double() for t in tensors.values()]
        found = []
        for reading, (name, t) in zip(pair, tensors.items(), strict=True):
            bits, t = None, rotate(t) if reading[1].endswith("rotated") else t
            if self.key is not None and applies(self.stochastic, gemm) and name in self.stochastic_tensors:
                turned = (gemm, name) in (("grad_input", "w"), ("grad_weight", "dy"), ("grad_weight", "x"))
                bits = random_bits_ref(t.t().shape if turned else t.shape, self.key, ROUNDED_TENSORS.index(name))
                bits = bits.t() if turned else bits
            found.append(fake_quantize(t, reading, self.power_of_two, bits=bits))
        return found


def emulate(model: nn.Module, readings: dict, power_of_two: bool) -> nn.Module:
    """`model`, converted in place: double precision, every linear emulated."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, EmulatedLinear(module, readings, power_of_two))
    return model.double()


def draw_alike(high: nn.Module, low: nn.Module) -> None:
    """Every emulated linear of `high` rounds stochastically where the one of `low` does, with the same bits."""
    for name, emulated in high.named_modules():
        linear = low.get_submodule(name)
        if isinstance(emulated, EmulatedLinear) and isinstance(linear, LowBitLinear):
            emulated.key, emulated.stochastic = linear.key, linear.scheme.stochastic_rounding
            if SCHEMES.name_of(linear.scheme) == "nvfp4":
                emulated.stochastic_tensors = ("dy",)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))
