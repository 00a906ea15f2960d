"""The table of convolutions: the three products of each convolution of ResNet-50 and ConvNeXt-T, and the layer.

Products of codes are those that a scheme runs: an implicit GEMM, for 1x1 kernels the GEMMs of a linear over pixels.
Quantizing is not timed with them. A layer is a step with one micro-batch: it refreshes the weight's codes, quantizes x
and dy, and computes all three. bf16 is cuDNN's, channels last, with the fastest algorithm for each.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

from qtrain.bench.case import Bench, Case, Check, check_against, largest_share, swapped, within
from qtrain.bench.matmuls import BF16_SUM, FP8_SUM, FP32_SUM, need_capability
from qtrain.bench.tables import Cell, Table
from qtrain.core.hardware.capabilities import FP8_CAPABILITY
from qtrain.kernels.conv.geometry import ConvShape
from qtrain.kernels.gemm.scaled_mm import scaled_mm
from qtrain.kernels.numerics.philox import NEAREST
from qtrain.quant import SCHEMES
from qtrain.quant.conv2d import conv_product
from qtrain.quant.quantizers import quantize_columns, quantize_rows
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

GEMMS: tuple[Gemm, ...] = ("output", "grad_input", "grad_weight")
FORMATS = {"INT8": "int8", "FP8": "e4m3"}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "int8 tensorwise": ("int8", {"granularity": "tensorwise"}),
    "fp8_tensorwise": ("fp8_tensorwise", {}),
}
"""Schemes of whole layers, with their options."""
COLUMNS = [
    *(f"{gemm} {arithmetic}" for gemm in GEMMS for arithmetic in ("bf16", *FORMATS)),
    *(f"layer {scheme}" for scheme in LAYERS),
]
BATCH = 256
SUM_ROW = "sum, each as often as it occurs"


@dataclass(frozen=True)
class ConvProblem:
    """A convolution, and how often the network has it."""

    name: str
    shape: ConvShape
    count: int
    device: torch.device

    @property
    def pointwise(self) -> bool:
        return self.shape.r == self.shape.s == 1

    @property
    def geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        s = self.shape
        return (s.stride_h, s.stride_w), (s.padding_h, s.padding_w), (s.dilation_h, s.dilation_w)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, C, H, W], w [K, C, R, S], dy [N, K, P, Q]: bf16 on a GPU, channels last."""
        s = self.shape
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        like = {"device": self.device, "dtype": dtype, "generator": generator}
        shapes = ((s.n, s.h, s.w, s.c), (s.k, s.r, s.s, s.c), (s.n, s.p, s.q, s.k))
        x, w, dy = (torch.randn(shape, **like).permute(0, 3, 1, 2) for shape in shapes)
        return x, 0.05 * w, dy


def network(device: torch.device) -> list[ConvProblem]:
    """The convolutions of ResNet-50 at 224 (He et al., with the stride in the 3x3, as in timm) and of ConvNeXt-T (Liu
    et al.) that run in low bits. On a CPU a small network."""
    found: Counter[tuple[str, ConvShape]] = Counter()
    batch, size, widths, blocks = (BATCH, 56, (64, 128, 256, 512), (3, 4, 6, 3))
    if device.type == "cpu":
        batch, size, widths, blocks = 2, 8, (16, 32), (1, 1)

    def add(model: str, c: int, k: int, size: int, kernel: int, stride: int, padding: int) -> None:
        out = (size + 2 * padding - kernel) // stride + 1
        side = size, out, kernel, stride, padding, 1
        by = f"/{stride}" if stride > 1 else ""
        found[f"{model} {kernel}x{kernel}{by} {c}-{k} {size}", ConvShape(batch, c, k, *side, *side)] += 1

    c = widths[0]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            add("resnet50", c, width, size, 1, 1, 0)
            add("resnet50", width, width, size, 3, stride, 1)
            if not block:
                add("resnet50", c, 4 * width, size, 1, stride, 0)  # the shortcut's
            size = (size - 1) // stride + 1
            add("resnet50", width, 4 * width, size, 1, 1, 0)
            c = 4 * width
    for width, size in ((96, 56), (192, 28), (384, 14)) if device.type == "cuda" else ((16, 8),):
        add("convnext_tiny", width, 2 * width, size, 2, 2, 0)
    return [ConvProblem(name, shape, count, device) for (name, shape), count in found.items()]


# ---- checks ----------------------------------------------------------------------------------------------------------


def sampled_truth(p: ConvProblem, gemm: Gemm, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    """A sample of the result in fp64, of tensors as `ConvProblem.tensors` has them (`sampled_rows`)."""
    s, rows = p.shape, sampled_rows(p, gemm)
    if gemm == "output":
        return F.conv2d(x[rows].double(), w.double(), None, *p.geometry)
    if gemm == "grad_input":
        return conv2d_input((2, s.c, s.h, s.w), w.double(), dy[rows].double(), *p.geometry)
    return conv2d_weight(x.double(), (3, s.c, s.r, s.s), dy[:, rows].double(), *p.geometry)


def sampled_rows(p: ConvProblem, gemm: Gemm) -> list[int]:
    """The first and the last image of a result [N, K, P, Q] or [N, C, H, W]; of grad_weight [K, C, R, S] three output
    channels."""
    return [0, p.shape.k // 2, p.shape.k - 1] if gemm == "grad_weight" else [0, p.shape.n - 1]


def check_conv(
    p: ConvProblem, gemm: Gemm, values: Callable[[], tuple[Tensor, Tensor, Tensor]], accumulation: float
) -> Check:
    """Elementwise, as `check_product` does. values: what is multiplied, in place of x, w and dy."""

    def check(out: object) -> float:
        assert isinstance(out, Tensor)
        x, w, dy = values()
        result = out[sampled_rows(p, gemm)]
        truth, size = sampled_truth(p, gemm, x, w, dy), sampled_truth(p, gemm, x.abs(), w.abs(), dy.abs())
        allowed = 2.0**-8 * truth.abs() + accumulation * size + 1e-30
        return within(largest_share(result.double() - truth, allowed))

    return check


# ---- cases -----------------------------------------------------------------------------------------------------------


def plain_case(p: ConvProblem, gemm: Gemm) -> Case:
    """A product by cuDNN."""
    x, w, dy = p.tensors()
    stride, padding, dilation = p.geometry

    def run(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        if gemm == "output":
            return F.conv2d(x, w, None, stride, padding, dilation)
        mask = [gemm == "grad_input", gemm == "grad_weight", False]
        backward = torch.ops.aten.convolution_backward
        return backward(dy, x, w, None, stride, padding, dilation, False, [0, 0], 1, mask)[mask.index(True)]

    return Case((x, w, dy), run, check_conv(p, gemm, lambda: (x, w, dy), BF16_SUM))


def coded_case(p: ConvProblem, gemm: Gemm, arithmetic: str) -> Case:
    """A product of codes, whose values in fp64 are the truth's operands."""
    if arithmetic == "FP8":
        need_capability("FP8", FP8_CAPABILITY, p.device)
    s, fmt, dtype = p.shape, FORMATS[arithmetic], torch.bfloat16
    tensors = dict(zip(("x", "w", "dy"), p.tensors(), strict=True))
    if p.pointwise:
        tensors["x"] = tensors["x"][:, :, :: s.stride_h, :: s.stride_w]
    names = {"output": ("x", "w"), "grad_input": ("dy", "w"), "grad_weight": ("dy", "x")}[gemm]
    a, b = (_operand(p, gemm, name, tensors[name], fmt) for name in names)

    def run(a_codes: Tensor, b_codes: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
        left, right = a._replace(codes=a_codes, scale=a_scale), b._replace(codes=b_codes, scale=b_scale)
        fast_accum = gemm != "grad_weight"  # as in FP8 schemes
        if not p.pointwise:
            return conv_product(gemm, left, right, s, dtype, None, fast_accum).permute(0, 3, 1, 2)
        out = scaled_mm(left.codes, right.codes, left.scale, right.scale, dtype, None, fast_accum)
        if gemm == "grad_weight":
            return out.view(s.k, s.c, 1, 1)
        return out.view(s.n, s.p, s.q, -1).permute(0, 3, 1, 2)

    def values() -> tuple[Tensor, Tensor, Tensor]:
        known = {name: _values(p, gemm, name, t) for name, t in zip(names, (a, b), strict=True)}
        return tuple(known.get(name, tensors[name]) for name in ("x", "w", "dy"))  # pyrefly: ignore

    checked = p
    if p.pointwise:  # of the pixels that the stride takes
        side = s.p, s.p, 1, 1, 0, 1
        checked = ConvProblem(p.name, ConvShape(s.n, s.c, s.k, *side, *side), p.count, p.device)
    check = check_conv(checked, gemm, values, FP32_SUM if fmt == "int8" else FP8_SUM)
    return Case((a.codes, b.codes, a.scale, b.scale), run, check)


def _matrix(p: ConvProblem, gemm: Gemm, name: str, t: Tensor) -> Tensor:
    """The matrix that an operand is quantized as."""
    last = t.permute(0, 2, 3, 1)  # channels last, contiguous but for a stride's pixels
    if name == "w":
        return t.permute(1, 2, 3, 0).flatten(1) if gemm == "grad_input" else last.flatten(1)
    return last.reshape(-1, t.shape[1]) if p.pointwise else last.flatten(1)


def _operand(p: ConvProblem, gemm: Gemm, name: str, t: Tensor, fmt: str) -> QuantizedTensor:
    matrix = _matrix(p, gemm, name, t).contiguous()
    if gemm == "grad_weight":
        granularity = "rowwise" if p.pointwise else "tensorwise"
        return quantize_columns(matrix, OperandFormat(fmt, granularity), NEAREST, False)
    return quantize_rows(matrix, OperandFormat(fmt, "rowwise"), NEAREST, False)


def _values(p: ConvProblem, gemm: Gemm, name: str, t: QuantizedTensor) -> Tensor:
    """What an operand's codes stand for, laid out as the tensor, in fp32."""
    s, values = p.shape, t.dequantize(torch.float32)
    if gemm == "grad_weight":
        values = values.t()
    if name == "w":
        if gemm == "grad_input":
            return values.reshape(s.c, s.r, s.s, s.k).permute(3, 0, 1, 2)
        return values.reshape(s.k, s.r, s.s, s.c).permute(0, 3, 1, 2)
    h, w = (s.p, s.q) if name == "dy" or p.pointwise else (s.h, s.w)
    return values.reshape(s.n, h, w, -1).permute(0, 3, 1, 2)


def layer_case(p: ConvProblem, layer: str) -> Case:
    """Forward and backward of the layer, and the refresh of its codes."""
    scheme, options = LAYERS[layer]
    if scheme.startswith("fp8"):
        need_capability("FP8", FP8_CAPABILITY, p.device)
    s, (x, w, dy), (stride, padding, dilation) = p.shape, p.tensors(), p.geometry
    conv = nn.Conv2d(s.c, s.k, (s.r, s.s), stride, padding, dilation, bias=False, device=p.device, dtype=w.dtype)
    conv.weight = nn.Parameter(w.clone())  # channels last, as w is
    model, made = nn.Sequential(conv), SCHEMES.make(scheme, options, "-")
    quantized = swapped(model, made)

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        quantized.refresh_weights()
        y = model(x)
        return y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), dy)

    def truth() -> tuple[Tensor, ...]:
        exact = x.detach().requires_grad_()
        weight = w.detach().requires_grad_()
        y = F.conv2d(exact, weight, None, stride, padding, dilation)
        return tuple(t.float() for t in (y.detach(), *torch.autograd.grad(y, (exact, weight), dy)))

    return Case((x, dy), run, check_against(("y", "dx", "dw"), truth, made))


def conv2d_table(bench: Bench) -> Table:
    """Milliseconds of every convolution in every column, and their sums over a network."""
    problems = network(bench.device)
    notes = [
        f"{problems[0].shape.n} images; name: kernel/stride, channels, size of the image. Products of codes do not "
        "include quantizing; layers do, with a refresh of the weight's codes. 1x1 kernels run as linears."
    ]
    table = Table("Convolutions", "ms; speed over bf16", COLUMNS, notes)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for p in problems:
            _fill_row(table, p, bench)
    for model in dict.fromkeys(p.name.split()[0] for p in problems):
        _add_sums(table, model, [p for p in problems if p.name.startswith(f"{model} ")])
    return table


def _fill_row(table: Table, p: ConvProblem, bench: Bench) -> None:
    row = f"{p.count} x {p.name}"
    for column in COLUMNS:
        what, _, arithmetic = column.partition(" ")
        plain = table.rows.get(row, {}).get(f"{what} bf16", Cell()).value

        def prepare(what: str = what, arithmetic: str = arithmetic) -> Case:
            if what == "layer":
                return layer_case(p, arithmetic)
            gemm: Gemm = what  # pyrefly: ignore
            return plain_case(p, gemm) if arithmetic == "bf16" else coded_case(p, gemm, arithmetic)

        def show(_: Case, ms: float, plain: float | None = plain, each: int = 3 if what == "layer" else 1) -> Cell:
            over = f", {plain / ms:.2f}x" if plain else ""
            tflops = each * 2.0 * p.shape.multiply_adds / ms / 1e9
            return Cell(ms, text=f"{ms:.3g}{over}", details={"tflops": tflops, "count": p.count})

        bench.fill(table, row, column, prepare, show)


def _add_sums(table: Table, model: str, problems: list[ConvProblem]) -> None:
    """The row of a model's convolutions together, each as often as the model has it."""
    for column in COLUMNS:
        what, _, arithmetic = column.partition(" ")

        def total(column: str) -> float | None:
            cells = [(p.count, table.rows[f"{p.count} x {p.name}"][column].value) for p in problems]
            return None if any(ms is None for _, ms in cells) else sum(count * (ms or 0.0) for count, ms in cells)

        ms, plain = total(column), total(f"{what} bf16")
        over = f", {plain / ms:.2f}x" if plain and ms and arithmetic != "bf16" else ""
        cell = Cell(reason="not every convolution has a figure") if ms is None else Cell(ms, text=f"{ms:.3g}{over}")
        table.put(f"{model}, {SUM_ROW}", column, cell)
