"""Quantizes in both layouts what a gated MLP makes between its products, without writing it in high precision.

    y  [M, I]  = silu(gate) * up       of x [M, 2I], gate, then up: the input of the second product
    dx [M, 2I] = its gradient          from dy [M, I] and x: what the first product's backward reads

Both are the largest activations of a layer. Made, written, and read again for codes they move 10 and 18 bytes an
element of y; here codes are made from x (and dy) where it is read: 6 and 10, and where scales are those of whole rows
and columns, which take a pass of their own, 10 and 16 instead of 12 and 22. y and dx are rounded to bf16 on the way, so
that the codes are those of `silu_mul` and `quantize_dual` one after the other.
"""

import torch
from torch import Tensor

from qtrain.kernels.quantize import empty_codes, quantize_dual, quantize_dual_given
from qtrain.kernels.quantize_blocks import BLOCK, launch_quantize_blocks, takes_blocks
from qtrain.kernels.silu_mul import silu_mul, silu_mul_backward


def activation(x: Tensor, dy: Tensor | None) -> Tensor:
    """What is quantized: y, or dx where dy is given."""
    return silu_mul(x) if dy is None else silu_mul_backward(dy, x)


def _empty_like(x: Tensor, dy: Tensor | None) -> Tensor:
    """What `activation` makes, uninitialized."""
    return x.new_empty(x.shape[0], x.shape[1] // 2 if dy is None else x.shape[1])


def takes_gated(fmt: str, granularity: str) -> bool:
    """Whether there is a kernel; else it is `activation` and its quantizer, one after the other."""
    return fmt in ("int8", "e4m3", "e5m2") and granularity in ("rowwise", "1x128", "128x128")


def _direct(x: Tensor, dy: Tensor | None, fmt: str, granularity: str, given: bool) -> bool:
    """Whether the kernel does this; x and dy are contiguous."""
    tensors = [x] if dy is None else [x, dy]
    return (
        (given or takes_gated(fmt, granularity))
        and x.is_cuda
        and x.numel() > 0
        and x.shape[1] % (2 * BLOCK) == 0
        and all(takes_blocks(t, fmt, granularity, given) for t in tensors)
    )


@torch.library.custom_op("qtrain::quantize_gated", mutates_args=())
def quantize_gated(
    x: Tensor,
    dy: Tensor | None,
    fmt: str,
    granularity: str,
    power_of_two: bool = False,
    key: Tensor | None = None,
    role: int = 0,
    stochastic: str = "both",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual` of y, or of dx: codes, scale, codes_t, scale_t; both layouts in the same format."""
    x, dy = x.contiguous(), None if dy is None else dy.contiguous()
    if not _direct(x, dy, fmt, granularity, False):
        y = activation(x, dy)
        return quantize_dual(y, fmt, granularity, granularity, key, role, power_of_two, stochastic=stochastic)
    return launch_quantize_blocks(
        x, fmt, granularity, power_of_two, of_gate=True, dy=dy, key=key, role=role, stochastic=stochastic
    )


@quantize_gated.register_fake
def _(x, dy, fmt, granularity, power_of_two=False, key=None, role=0, stochastic="both"):
    made = _empty_like(x, dy)
    return *empty_codes(made, fmt, granularity), *empty_codes(made, fmt, granularity, transposed=True)


@torch.library.custom_op("qtrain::quantize_gated_given", mutates_args=())
def quantize_gated_given(
    x: Tensor,
    dy: Tensor | None,
    fmt: str,
    scale: Tensor,
    key: Tensor | None = None,
    role: int = 0,
    stochastic: str = "both",
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_dual_given` of y, or of dx: codes, codes_t, absmax fp32 [1]. scale: fp32 [1]."""
    x, dy = x.contiguous(), None if dy is None else dy.contiguous()
    if not _direct(x, dy, fmt, "tensorwise", True):
        return quantize_dual_given(activation(x, dy), fmt, scale, key, role, stochastic=stochastic)
    most = torch.zeros(1, dtype=torch.int32, device=x.device)
    codes, _, codes_t, _ = launch_quantize_blocks(
        x, fmt, "tensorwise", False, scale, most, True, dy, key, role, stochastic
    )
    return codes, codes_t, most.view(torch.float32)


@quantize_gated_given.register_fake
def _(x, dy, fmt, scale, key=None, role=0, stochastic="both"):
    made = _empty_like(x, dy)
    codes, codes_t = empty_codes(made, fmt, "tensorwise")[0], empty_codes(made, fmt, "tensorwise", transposed=True)[0]
    return codes, codes_t, x.new_empty(1, dtype=torch.float32)
