"""Gradients on the wire in 8 or 4 bits, rounded stochastically: unbiased, at about half or a quarter of bf16's bytes.

Each rank quantizes its message to every other in blocks of consecutive elements with one fp32 scale each; the receiver
dequantizes and adds in fp32, so that a gradient is rounded once however many ranks add theirs. (ZeRO++ sends 4 bits the
same way, rounded to nearest: Wang et al., arXiv:2306.10209.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.quantize.operators import quantize
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

ROLE = ROUNDED_TENSORS.index("dy")
FIRST_NUMBER = 1 << 20
"""The Philox number of the first message: above those of all linears."""


@dataclass(frozen=True)
class GradientWire:
    """How a message is encoded. block: elements that share a scale."""

    fmt: str
    block: int

    @property
    def bytes_per_element(self) -> float:
        return 1 / FORMATS[self.fmt].packing + 4 / self.block

    def size(self, elements: int) -> int:
        """Bytes of a message of this many elements."""
        blocks = -(-elements // self.block)
        return blocks * (self.block // FORMATS[self.fmt].packing + 4)

    def encode(self, message: Tensor, key: Tensor) -> Tensor:
        """message [n] -> uint8 [size(n)]: codes, then scales. key: int64 [3], Philox."""
        if not len(message):
            return message.new_empty(0, dtype=torch.uint8)
        # [blocks, block]; zeros have code 0.
        blocks = F.pad(message, (0, -len(message) % self.block)).view(-1, self.block)
        codes, scale = quantize(blocks, self.fmt, "rowwise", key, ROLE)  # a row of the matrix is a block of the message
        # One message: a second collective for the scales would cost its latency again.
        return torch.cat([codes.view(torch.uint8).flatten(), scale.view(torch.uint8)])

    def decode(self, encoded: Tensor, elements: int) -> Tensor:
        """The inverse of `encode`: fp32 [elements]."""
        if not elements:
            return encoded.new_empty(0, dtype=torch.float32)
        blocks = -(-elements // self.block)
        fmt = FORMATS[self.fmt]
        codes, scale = encoded.split([blocks * self.block // fmt.packing, blocks * 4])
        codes, scale = codes.view(blocks, self.block // fmt.packing).view(fmt.dtype), scale.view(torch.float32)
        values = QuantizedTensor(codes, scale, OperandFormat(self.fmt, "rowwise")).dequantize(torch.float32)
        return values.view(-1)[:elements]


GRADIENT_WIRES: dict[str, GradientWire | None] = {
    "exact": None,
    "int8": GradientWire("int8", 256),
    "fp8": GradientWire("e4m3", 256),
    "int4": GradientWire("int4", 64),
}
"""The choices of --gradient_wire. exact: gradients in their own dtype."""
