"""The geometry of a 2-D convolution without groups, and what its GEMMs read of an image.

    x [N, H, W, C] (channels_last)   w [K, R, S, C]   y [N, P, Q, K]

    output       y  [NPQ, K]  = patches of x [NPQ, RSC]  · w [K, RSC]ᵀ
    grad_input   dx [NHW, C]  = patches of dy [NHW, RSK] · w [C, RSK]ᵀ
    grad_weight  dw [K, RSC]  = dy [NPQ, K]ᵀ · patches of x [NPQ, RSC]

A scale is a factor of the whole sum only where it does not depend on an index that is summed over:

    output       x: one for the tensor, or one per image (a patch lies in one image); w: one, or one per output channel
    grad_input   dy: one for the tensor, or one per image; w: one, or one per input channel
    grad_weight  dy: one, or one per output channel; x: one, or one per input channel; this package keeps to one

One per pixel is a factor of `output` and `grad_input` for 1x1 kernels alone, which are linears over pixels.

In one dimension, a pass over an image is a `Taps`: which outputs it computes and which inputs each of them reads.
`grad_input` of stride d is d passes in each dimension: outputs h ≡ phase (mod d) read the same taps, without a product
with a zero between the rows of dy. A phase that no tap reaches has none, and its gradient is zero.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Taps(NamedTuple):
    """Output `first + i * step`, i < count, adds up the inputs `i * multiply + offset + j * move`, j < taps, each times
    row `tap_first + j * tap_step` of the kernel. Inputs outside of the image are zero."""

    first: int
    step: int
    count: int
    multiply: int
    offset: int
    move: int
    tap_first: int
    tap_step: int
    taps: int

    def inputs(self, size: int, device: torch.device) -> Tensor:
        """int64 [count, taps]: the input of each output and tap; `size` for one outside of [0, size)."""
        outputs = torch.arange(self.count, device=device)[:, None] * self.multiply + self.offset
        found = outputs + torch.arange(self.taps, device=device) * self.move
        return torch.where((found >= 0) & (found < size), found, size)

    @property
    def kernel_rows(self) -> range:
        """The rows of the kernel that it reads."""
        return range(self.tap_first, self.tap_first + self.taps * self.tap_step, self.tap_step)


class Dimension(NamedTuple):
    """One dimension of a convolution: sizes of its input, output and kernel. padding: zeros before the input; those
    after it follow from the size of the output."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def forward(self) -> Taps:
        """The pass of `output`."""
        return Taps(0, 1, self.outputs, self.stride, -self.padding, self.dilation, 0, 1, self.kernel)

    def backward(self) -> list[Taps]:
        """The passes of `grad_input`: input h reads output p by tap r where h + padding = p * stride + r * dilation."""
        return [self._phase(phase) for phase in range(min(self.stride, self.inputs))]

    def _phase(self, phase: int) -> Taps:
        count = -(-(self.inputs - phase) // self.stride)
        reached = [r for r in range(self.kernel) if (phase + self.padding - r * self.dilation) % self.stride == 0]
        if not reached:
            return Taps(phase, self.stride, count, 1, 0, 0, 0, 1, 0)
        # Solutions of a linear congruence: every tap_step-th tap, which lies `move` outputs further.
        tap_step = self.stride // math.gcd(self.dilation, self.stride)
        offset = (phase + self.padding - reached[0] * self.dilation) // self.stride
        move = -tap_step * self.dilation // self.stride
        return Taps(phase, self.stride, count, 1, offset, move, reached[0], tap_step, len(reached))


class ConvShape(NamedTuple):
    """Sizes of a convolution; flat, so that a custom op takes it as a list of integers."""

    n: int
    c: int
    k: int
    h: int
    p: int
    r: int
    stride_h: int
    padding_h: int
    dilation_h: int
    w: int
    q: int
    s: int
    stride_w: int
    padding_w: int
    dilation_w: int

    @property
    def height(self) -> Dimension:
        return Dimension(self.h, self.p, self.r, self.stride_h, self.padding_h, self.dilation_h)

    @property
    def width(self) -> Dimension:
        return Dimension(self.w, self.q, self.s, self.stride_w, self.padding_w, self.dilation_w)

    @property
    def multiply_adds(self) -> int:
        """Of each of the three GEMMs."""
        return self.n * self.p * self.q * self.k * self.r * self.s * self.c


def gather_patches(codes: Tensor, height: Taps, width: Taps) -> Tensor:
    """codes [N, H, W, C] of one byte -> the rows of the implicit GEMM, [N * count * count, taps * taps * C]."""
    n, h, w, c = codes.shape
    # A row and a column of zeros, which all inputs outside of the image are read from.
    padded = F.pad(codes.view(torch.uint8), (0, 0, 0, 1, 0, 1))
    rows, columns = height.inputs(h, codes.device), width.inputs(w, codes.device)
    # [N, count, taps, count, taps, C]
    found = padded[:, rows[:, :, None, None], columns]
    patches = found.transpose(2, 3).reshape(n * height.count * width.count, height.taps * width.taps * c)
    return patches.view(codes.dtype)


def kernel_taps(codes: Tensor, height: Taps, width: Taps) -> Tensor:
    """codes [O, R, S, I] of a weight -> those of the taps that a pass reads, [O, taps * taps * I]."""
    rows = torch.tensor(list(height.kernel_rows), device=codes.device)
    columns = torch.tensor(list(width.kernel_rows), device=codes.device)
    found = codes.view(torch.uint8)[:, rows[:, None], columns]
    return found.reshape(codes.shape[0], -1).view(codes.dtype)
