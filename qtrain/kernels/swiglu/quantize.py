"""Quantizes in both layouts what a gated MLP makes between its products, as it is made.

    y  [M, I]  = silu(gate) * up       of x [M, 2I], gate, then up: the input of the second product
    dx [M, 2I] = its gradient          from dy [M, I] and x: what the first product's backward reads

Both are the largest activations of a layer. Made, written, and read again for codes they move 10 and 18 bytes an
element of y; here codes are made from x (and dy) where it is read: 6 and 10. y and dx are rounded to bf16 on the way,
so that the codes are those of `swiglu` and `quantize_dual` one after the other.

Where scales are those of whole rows and columns, one read is not enough for all of it. Then forward makes y's rows
only, with the maxima of its columns (5 bytes; `gated_rows.py`), and backward makes y's columns as it makes dx (11;
`gated_gradient.py`), whose maxima are known by the time it is quantized (8): 24 bytes in all, one after the other 34,
and of y only those maxima are kept for backward.
"""

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import EIGHT_BITS
from qtrain.kernels.numerics.philox import ROLES
from qtrain.kernels.quantize.absmax import absmax_of_columns_ref
from qtrain.kernels.quantize.dual_bf16x2 import BLOCK, launch_dual_bf16x2, supports_dual_bf16x2
from qtrain.kernels.quantize.operators import (
    empty_codes,
    quantize,
    quantize_dual,
    quantize_dual_given_scale,
    quantize_transposed,
)
from qtrain.kernels.swiglu.backward import launch_quantize_swiglu_backward
from qtrain.kernels.swiglu.rowwise import launch_quantize_swiglu_rowwise
from qtrain.kernels.swiglu.swiglu import swiglu, swiglu_backward


def activation(x: Tensor, dy: Tensor | None) -> Tensor:
    """What is quantized: y, or dx where dy is given."""
    return swiglu(x) if dy is None else swiglu_backward(dy, x)


def _empty_like(x: Tensor, dy: Tensor | None) -> Tensor:
    """What `activation` makes, uninitialized."""
    return x.new_empty(x.shape[0], x.shape[1] // 2 if dy is None else x.shape[1])


def supports_swiglu_dual(fmt: str, granularity: str) -> bool:
    """Whether `quantize_swiglu` has a kernel; else it is `activation` and its quantizer, one after the other."""
    return fmt in EIGHT_BITS and granularity in ("1x128", "128x128")


def supports_swiglu_rowwise(fmt: str, granularity: str) -> bool:
    """Whether `quantize_swiglu_rowwise` and `quantize_swiglu_backward` are for this."""
    return fmt in EIGHT_BITS and granularity == "rowwise"


def _direct(x: Tensor, dy: Tensor | None, fmt: str, granularity: str, given: bool = False) -> bool:
    """Whether a kernel takes x and dy, contiguous. A tile of `quantize_blocks` must not lie in gate and up both."""
    width = 16 if granularity == "rowwise" else BLOCK
    takes = all(supports_dual_bf16x2(t, fmt, granularity, given) for t in (x, dy) if t is not None)
    return takes and x.is_cuda and x.numel() > 0 and x.shape[1] % (2 * width) == 0


@torch.library.custom_op("qtrain::quantize_swiglu", mutates_args=())
def quantize_swiglu(
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
    if not (supports_swiglu_dual(fmt, granularity) and _direct(x, dy, fmt, granularity)):
        y = activation(x, dy)
        return quantize_dual(y, fmt, granularity, granularity, key, role, power_of_two, stochastic=stochastic)
    return launch_dual_bf16x2(
        x, fmt, granularity, power_of_two, of_gate=True, dy=dy, key=key, role=role, stochastic=stochastic
    )


@quantize_swiglu.register_fake
def _(x, dy, fmt, granularity, power_of_two=False, key=None, role=0, stochastic="both"):
    made = _empty_like(x, dy)
    return *empty_codes(made, fmt, granularity), *empty_codes(made, fmt, granularity, transposed=True)


@torch.library.custom_op("qtrain::quantize_swiglu_given_scale", mutates_args=())
def quantize_swiglu_given_scale(
    x: Tensor,
    dy: Tensor | None,
    fmt: str,
    scale: Tensor,
    key: Tensor | None = None,
    role: int = 0,
    stochastic: str = "both",
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_dual_given_scale` of y, or of dx: codes, codes_t, absmax fp32 [1]. scale: fp32 [1]."""
    x, dy = x.contiguous(), None if dy is None else dy.contiguous()
    if not _direct(x, dy, fmt, "tensorwise", True):
        return quantize_dual_given_scale(activation(x, dy), fmt, scale, key, role, stochastic=stochastic)
    most = torch.zeros(1, dtype=torch.int32, device=x.device)
    codes, _, codes_t, _ = launch_dual_bf16x2(x, fmt, "tensorwise", False, scale, most, True, dy, key, role, stochastic)
    return codes, codes_t, most.view(torch.float32)


@quantize_swiglu_given_scale.register_fake
def _(x, dy, fmt, scale, key=None, role=0, stochastic="both"):
    made = _empty_like(x, dy)
    codes, codes_t = empty_codes(made, fmt, "tensorwise")[0], empty_codes(made, fmt, "tensorwise", transposed=True)[0]
    return codes, codes_t, x.new_empty(1, dtype=torch.float32)


@torch.library.custom_op("qtrain::quantize_swiglu_rowwise", mutates_args=())
def quantize_swiglu_rowwise(
    x: Tensor, fmt: str, power_of_two: bool = False, key: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize` of y along its rows: codes, scale; and what `quantize_swiglu_backward` wants to know of its columns.

    key: rounds stochastically, as the x of its linear.
    """
    x, role = x.contiguous(), ROLES.index("x")
    if _direct(x, None, fmt, "rowwise"):
        return launch_quantize_swiglu_rowwise(x, fmt, power_of_two, key, role)
    y = swiglu(x)
    return *quantize(y, fmt, "rowwise", key, role, power_of_two), absmax_of_columns_ref(y)


@quantize_swiglu_rowwise.register_fake
def _(x, fmt, power_of_two=False, key=None):
    y = _empty_like(x, None)
    return *empty_codes(y, fmt, "rowwise"), x.new_empty(y.shape[1], dtype=torch.int32)


@torch.library.custom_op("qtrain::quantize_swiglu_backward", mutates_args=())
def quantize_swiglu_backward(
    x: Tensor,
    dy: Tensor,
    columns: Tensor,
    fmt: str,
    power_of_two: bool,
    key: Tensor | None,
    fmt_y: str,
    power_of_two_y: bool,
    key_y: Tensor | None,
    stochastic: str = "both",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual` of dx, rowwise: codes, scale, codes_t, scale_t; and `quantize_transposed` of y: codes_t, scale_t.

    columns: as `quantize_swiglu_rowwise` gave it. key, stochastic: dx's, drawn as the dy of its linear; key_y: y's.
    """
    x, dy, role, role_y = x.contiguous(), dy.contiguous(), ROLES.index("dy"), ROLES.index("x")
    if not (_direct(x, dy, fmt, "rowwise") and supports_swiglu_rowwise(fmt_y, "rowwise")):
        dual = quantize_dual(
            swiglu_backward(dy, x), fmt, "rowwise", "rowwise", key, role, power_of_two, stochastic=stochastic
        )
        return *dual, *quantize_transposed(swiglu(x), fmt_y, "rowwise", key_y, role_y, power_of_two_y)
    codes_t, scale_t, dx, maxima = launch_quantize_swiglu_backward(x, dy, columns, fmt_y, power_of_two_y, key_y, role_y)
    dual = launch_dual_bf16x2(
        dx, fmt, "rowwise", power_of_two, key=key, role=role, stochastic=stochastic, maxima=maxima
    )
    return *dual, codes_t, scale_t


@quantize_swiglu_backward.register_fake
def _(x, dy, columns, fmt, power_of_two, key, fmt_y, power_of_two_y, key_y, stochastic="both"):
    dual = *empty_codes(x, fmt, "rowwise"), *empty_codes(x, fmt, "rowwise", transposed=True)
    return *dual, *empty_codes(dy, fmt_y, "rowwise", transposed=True)
