"""A convolution whose three GEMMs a scheme runs.

    forward    y  [N, P, Q, K] = x conv w       `output`: codes of x [N, HWC], codes of w [K, RSC]
    backward   dx [N, H, W, C] = dy conv* w     `grad_input`: codes of dy [N, PQK], codes of w [C, RSK]
               dw [K, R, S, C]                  `grad_weight`: transposed codes [PQK, N] and [HWC, N]

x and dy are quantized as matrices with a row for each image, by the quantizers of linears: a scale per row is one per
image, and transposed codes have the images innermost, as `grad_weight` reads them. That sums over pixels as well as
images, so its scales are tensorwise, whatever the scheme's granularity (`kernels/conv/geometry.py`).

A 1x1 kernel without padding is a linear over the pixels that its stride takes, and runs as one, with its scales: one
per pixel or channel where the scheme's are rowwise.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.kernels.conv.gather_mm import conv_grad_input, conv_output
from qtrain.kernels.conv.geometry import ConvShape
from qtrain.kernels.conv.grad_weight import conv_grad_weight
from qtrain.kernels.numerics.formats import EIGHT_BITS
from qtrain.quant.arguments import LinearArguments, codes_or, save_operands, saved_operands
from qtrain.quant.execute import quantize_operands
from qtrain.quant.linear import LowBitLinear, LowBitLinearFunction
from qtrain.quant.quantizers import ReuseBuffers, quantize_rows
from qtrain.quant.scales import Reduce
from qtrain.quant.scheme import LowBitScheme, applies
from qtrain.quant.tensor_roles import Gemm, NeedsOperand
from qtrain.tensors.quantized_tensor import Operand, OperandFormat, Operands, QuantizedTensor

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
CHANNELS = 16
"""Channels come in multiples of it: 16 codes are what a thread loads at once."""


# ---- which convolutions are swapped ----------------------------------------------------------------------------------


def cannot_convolve(conv: Convolution) -> str | None:
    """Why a convolution stays in high precision whatever scheme it has; None: the scheme decides."""
    # Not isinstance: a subclass may pad or normalize in a forward pass of its own, which the swap would drop.
    if type(conv) is not nn.Conv2d:
        return f"a {type(conv).__name__}, not a plain Conv2d"
    if conv.groups > 1:
        return f"it has {conv.groups} groups, whose products are too small for tensor cores"
    if conv.padding_mode != "zeros":
        return f"its padding is {conv.padding_mode}, not zeros"
    for channels, side in ((conv.in_channels, "input"), (conv.out_channels, "output")):
        if channels % CHANNELS:
            return f"{channels} {side} channels are no multiple of {CHANNELS}"
    return None


def has_no_convolution(scheme: LowBitScheme) -> str | None:
    """Why a scheme leaves convolutions in high precision; None: it runs them."""
    if scheme.latent or scheme.stored_format is not None or scheme.packed_weight is not None:
        return "the scheme is for weights of linears"
    for gemm in ("output", "grad_input", "grad_weight"):
        for fmt in filter(None, scheme.operand_formats(gemm)):
            if fmt.fmt not in EIGHT_BITS:
                return f"the scheme's {fmt.fmt} products are for linears"
            if fmt.granularity not in ("tensorwise", "rowwise"):
                return f"the scheme's scales of {fmt.granularity} blocks are for linears"
    return None


def is_pointwise(conv: "nn.Conv2d | LowBitConv2d") -> bool:
    """Whether it is a linear over pixels."""
    return tuple(conv.kernel_size) == (1, 1) and conv.padding in ("valid", "same", 0, (0, 0))


# ---- the products ----------------------------------------------------------------------------------------------------


def conv_product(
    gemm: Gemm, a: Operand, b: Operand, shape: ConvShape, dtype: torch.dtype, bias: Tensor | None, fast_accum: bool
) -> Tensor:
    """The product of `gemm` in dtype, channels last; (a, b) are (x, w), (dy, w) or (dy, x). Both are codes, or both are
    tensors: images [N, HWC] or [N, PQK], a weight [K, C, R, S]."""
    if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
        operands = (a.codes, b.codes, a.scale, b.scale, list(shape), dtype)
        if gemm == "output":
            return conv_output(*operands, bias, fast_accum)
        return (conv_grad_input if gemm == "grad_input" else conv_grad_weight)(*operands, fast_accum)
    s, w = shape, cast(Tensor, b)
    geometry = (s.stride_h, s.stride_w), (s.padding_h, s.padding_w), (s.dilation_h, s.dilation_w)

    def images(t: Any, h: int, w: int) -> Tensor:
        return t.view(s.n, h, w, -1).permute(0, 3, 1, 2)

    if gemm == "output":
        out = F.conv2d(images(a, s.h, s.w), w, bias, *geometry)
    elif gemm == "grad_input":
        out = torch.nn.grad.conv2d_input((s.n, s.c, s.h, s.w), w, images(a, s.p, s.q), *geometry)
    else:
        size = (s.k, s.c, s.r, s.s)
        out = torch.nn.grad.conv2d_weight(images(b, s.h, s.w), size, images(a, s.p, s.q), *geometry)
    return out.permute(0, 2, 3, 1).to(dtype)


class LowBitConv2dFunction(torch.autograd.Function):
    """y = x conv w + bias, with each GEMM, forward and backward, run by the scheme."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [N, H, W, C], contiguous
        weight: Tensor,  # [K, C, R, S], the master: it receives the gradient
        bias: Tensor | None,  # [K]
        linear: LinearArguments,
        shape: ConvShape,
        grad_enabled: bool,  # inside a Function gradients are always disabled
    ) -> Tensor:
        needs_dx = grad_enabled and ctx.needs_input_grad[0]
        needs_dw = grad_enabled and ctx.needs_input_grad[1]
        x_output, x_grad_weight = quantize_operands(x.flatten(1), linear.request("x", NeedsOperand(True, needs_dw)))
        save_operands(
            ctx, codes_or(linear.weight.columns, weight) if needs_dx else None, x_grad_weight if needs_dw else None
        )
        # Backward takes the weight's codes from the saved tensors, which activation checkpointing recomputes.
        ctx.linear, ctx.shape, ctx.weight_dtype = linear._replace(weight=None), shape, weight.dtype
        fast_accum = applies(linear.scheme.fast_accum, "output")
        w_output = codes_or(linear.weight.rows, weight)
        return conv_product("output", x_output, w_output, shape, x.dtype, bias, fast_accum)

    @staticmethod
    def backward(ctx, dy: Tensor):
        w_grad_input, x_grad_weight = saved_operands(ctx)
        linear, shape = ctx.linear, ctx.shape
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if needs_dx or needs_dw:
            request = linear.request("dy", NeedsOperand(needs_dx, needs_dw))
            dy_grad_input, dy_grad_weight = quantize_operands(dy.contiguous().flatten(1), request)
        if needs_dx:
            fast_accum = applies(linear.scheme.fast_accum, "grad_input")
            dx = conv_product("grad_input", dy_grad_input, w_grad_input, shape, dy.dtype, None, fast_accum)
        if needs_dw:
            fast_accum = applies(linear.scheme.fast_accum, "grad_weight")
            dw = conv_product("grad_weight", dy_grad_weight, x_grad_weight, shape, ctx.weight_dtype, None, fast_accum)
            dw = dw.permute(0, 3, 1, 2).contiguous()  # [K, C, R, S]
        if needs_dbias:
            # In fp32: a sum over all pixels in bf16 would lose the small terms.
            dbias = dy.sum(dim=(0, 1, 2), dtype=torch.float32).to(ctx.weight_dtype)
        return dx, dw, dbias, None, None, None


class LowBitConv2d(LowBitLinear):
    """Replaces an nn.Conv2d and keeps its parameters: `weight` and `bias` are the same objects. As a linear it has
    C * R * S in-features."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]

    KEPT = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")

    def __init__(self, conv: nn.Conv2d, scheme: LowBitScheme, key: Tensor, reduce: Reduce | None = None):
        super().__init__(conv, scheme, key, reduce)
        for name in self.KEPT:
            setattr(self, name, getattr(conv, name))

    def plain(self) -> nn.Conv2d:
        """A convolution of the same geometry, with parameters of its own."""
        geometry: dict[str, Any] = {name: getattr(self, name) for name in self.KEPT}
        return nn.Conv2d(**geometry, bias=self.bias is not None)

    @torch.no_grad()
    def _quantize(self, weight: Tensor, reuse: ReuseBuffers | None = None) -> Operands:
        if weight.shape[2:].numel() == 1:
            return super()._quantize(weight.flatten(1), reuse)
        # Two quantizers: the sum of `grad_input` is over taps and output channels, so no layout is the other's
        # transpose. A scale per row is one per output channel, and one per input channel.
        rows, columns = self.scheme.formats_of("w")
        rounding = self.scheme.rounding("w", self.weight_key if self.scheme.stochastic_rounding else None)

        def codes(order: tuple[int, ...], fmt: OperandFormat | None, stochastic: bool) -> QuantizedTensor | None:
            matrix = weight.permute(order).reshape(weight.shape[order[0]], -1)
            own = rounding._replace(rows=stochastic)
            return None if fmt is None else quantize_rows(matrix, fmt, own, self.scheme.power_of_two)

        # [K, R, S, C] and [C, R, S, K]
        return Operands(codes((0, 2, 3, 1), rows, rounding.rows), codes((1, 2, 3, 0), columns, rounding.columns))

    def forward(self, x: Tensor) -> Tensor:  # [N, C, H, W], in any memory format
        """y [N, K, P, Q], channels last in memory."""
        if x.ndim == 3:
            return self(x[None])[0]
        if is_pointwise(self):
            pixels = x[:, :, :: self.stride[0], :: self.stride[1]].permute(0, 2, 3, 1)  # [N, P, Q, C]
            # The linear's own function: it reads the weight as a matrix.
            y = LowBitLinearFunction.apply(
                pixels.reshape(-1, self.in_channels),
                self.weight.flatten(1),
                self.bias,
                self.arguments(),
                torch.is_grad_enabled(),
            ).view(*pixels.shape[:3], self.out_channels)
        else:
            padding, rest = _zeros_around(self)
            if any(rest):
                x = F.pad(x, (0, rest[1], 0, rest[0]))
            shape = conv_shape(x, self, padding)
            y = LowBitConv2dFunction.apply(
                x.permute(0, 2, 3, 1).contiguous(),
                self.weight,
                self.bias,
                self.arguments(),
                shape,
                torch.is_grad_enabled(),
            )
        return y.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        geometry = ", ".join(f"{name}={getattr(self, name)}" for name in self.KEPT[2:6])
        return f"{self.in_channels}, {self.out_channels}, {geometry}, scheme={self.scheme}"


def conv_shape(x: Tensor, conv: LowBitConv2d, padding: tuple[int, ...]) -> ConvShape:
    """The sizes of a convolution of x [N, C, H, W]. ValueError where the padded image is smaller than the kernel."""
    found: list[int] = []
    for size, kernel, stride, pad, dilation in zip(
        x.shape[2:], conv.kernel_size, conv.stride, padding, conv.dilation, strict=True
    ):
        outputs = (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        if outputs < 1:
            raise ValueError(f"a {conv.kernel_size} kernel is larger than the padded image {tuple(x.shape)}")
        found += [size, outputs, kernel, stride, pad, dilation]
    return ConvShape(x.shape[0], conv.in_channels, conv.out_channels, *found)


def _zeros_around(conv: LowBitConv2d) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of both dimensions: zeros on both sides, and those after the end besides. padding="same" has one more there where
    their number is odd, as in torch."""
    if not isinstance(conv.padding, str):
        return conv.padding, (0, 0)
    if conv.padding == "valid":
        return (0, 0), (0, 0)
    total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    return (total[0] // 2, total[1] // 2), (total[0] % 2, total[1] % 2)
