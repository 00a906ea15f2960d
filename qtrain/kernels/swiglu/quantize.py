"""Codes of a SwiGLU's output and of its gradient, in both layouts, computed as x (and dy) are read.

    y  [M, I]  = silu(gate) * up       of x [M, 2I], gate, then up: the input of a gated MLP's second product
    dx [M, 2I] = its gradient          from dy [M, I] and x: what backward of the first product reads

Both are the largest activations of a layer. Written, and read again for their codes, they move 10 and 18 bytes per
element of y; fused, 6 and 10. y and dx are rounded to bf16 in between, so the codes are those of `swiglu` followed by
`quantize_dual`.

Scales of whole rows and columns take more than one read. There forward produces y's row codes and the absmax of its
columns (5 bytes; `rowwise.py`), and backward y's column codes along with dx (11; `backward.py`), whose absmaxes are
then known when it is quantized (8): 24 bytes in all, against 34 unfused, and of y only its column absmaxes are saved
for backward.
"""

import torch
from torch import Tensor

from qtrain.kernels.column_sums import column_sums_if, empty_column_sums
from qtrain.kernels.compiler import operator
from qtrain.kernels.numerics.formats import EIGHT_BITS, empty_codes
from qtrain.kernels.numerics.philox import Rounding
from qtrain.kernels.quantize.absmax import column_absmax_ref
from qtrain.kernels.quantize.column_groups import block_groups
from qtrain.kernels.quantize.delayed_scale import launch_swiglu_delayed_scale
from qtrain.kernels.quantize.dual_bf16x2 import BLOCK, BLOCK_PAIRS, launch_dual_bf16x2, supports_dual_bf16x2
from qtrain.kernels.quantize.operators import quantize, quantize_dual, quantize_dual_delayed, quantize_transposed
from qtrain.kernels.swiglu.backward import launch_quantize_swiglu_backward
from qtrain.kernels.swiglu.rowwise import launch_quantize_swiglu_rowwise
from qtrain.kernels.swiglu.swiglu import empty_router_dots, swiglu, swiglu_backward, swiglu_backward_dots


def activation(x: Tensor, dy: Tensor | None) -> Tensor:
    """The tensor that is quantized: y, or dx if dy is given."""
    return swiglu(x) if dy is None else swiglu_backward(dy, x)


def activation_dots(x: Tensor, dy: Tensor | None, router_dots: bool) -> tuple[Tensor, Tensor]:
    """`activation`, and `router_dots_ref(dy, x)` fp32 [M, n], or [M, 0] if they are not wanted; only with dy."""
    if not router_dots:
        return activation(x, dy), empty_router_dots(x, False)
    return swiglu_backward_dots(dy, x)


def _empty_like(x: Tensor, dy: Tensor | None) -> Tensor:
    """The result of `activation`, uninitialized."""
    return x.new_empty(x.shape[0], x.shape[1] // 2 if dy is None else x.shape[1])


def supports_swiglu_dual(fmt: str, granularity: str, granularity_t: str) -> bool:
    """Whether `quantize_swiglu` is fused; otherwise it is `activation` followed by the quantizer."""
    return fmt in EIGHT_BITS and (granularity, granularity_t) in BLOCK_PAIRS


def supports_swiglu_rowwise(fmt: str, granularity: str) -> bool:
    """Whether `quantize_swiglu_rowwise` and `quantize_swiglu_backward` are fused."""
    return fmt in EIGHT_BITS and granularity == "rowwise"


def _kernel_takes(x: Tensor, dy: Tensor | None, fmt: str, granularity: str, given: bool = False) -> bool:
    """Whether a fused kernel takes x and dy, contiguous. A tile must not straddle gate and up."""
    width = 16 if granularity == "rowwise" else BLOCK  # columns of a tile that must be of gate, or of up, alone
    # bf16, multiples of 16, aligned.
    takes = all(supports_dual_bf16x2(t, fmt, granularity, given) for t in (x, dy) if t is not None)
    return takes and x.is_cuda and x.numel() > 0 and x.shape[1] % (2 * width) == 0


def _empty_quantize_swiglu(x, dy, fmt, granularity, granularity_t, columns, groups, router_dots):
    y = _empty_like(x, dy)
    columns = empty_codes(y, fmt, granularity_t, transposed=True, groups=groups)
    return *empty_codes(y, fmt, granularity), *columns, empty_router_dots(x, router_dots)


@operator("quantize_swiglu", fake=_empty_quantize_swiglu)
def quantize_swiglu(
    x: Tensor,
    dy: Tensor | None,
    fmt: str,
    granularity: str,
    granularity_t: str,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
    group_of_block: Tensor | None = None,
    groups: int = 1,
    router_dots: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual` of y, or of dx: codes, scale, codes_t, scale_t; codes of both layouts in the same format.
    router_dots: as for `activation_dots`, the last result, here and below."""
    x, dy, rounding = x.contiguous(), None if dy is None else dy.contiguous(), Rounding(key, role, rows, columns)
    if not (supports_swiglu_dual(fmt, granularity, granularity_t) and _kernel_takes(x, dy, fmt, granularity)):
        t, dots = activation_dots(x, dy, router_dots)
        grouped = {"group_of_block": group_of_block, "groups": groups}
        # y or dx once in memory: the same codes at 4 and 8 bytes of traffic per element more.
        return *quantize_dual(t, fmt, granularity, granularity_t, *rounding, power_of_two, **grouped), dots
    dots = empty_router_dots(x, router_dots)  # fp32 [M, I / 128]; [M, 0] where nobody reads them
    kernel = {"granularity_t": granularity_t, "swiglu": True, "dy": dy, "router_dots": dots if router_dots else None}
    return *launch_dual_bf16x2(x, fmt, granularity, rounding, power_of_two, **kernel), dots


def _empty_quantize_swiglu_delayed(x, dy, fmt, router_dots, sums):
    y = _empty_like(x, dy)
    (codes, scale), codes_t = empty_codes(y, fmt, "tensorwise"), empty_codes(y, fmt, "tensorwise", transposed=True)[0]
    dots, total = empty_router_dots(x, router_dots), empty_column_sums(x, y.shape[1] if sums else 0)
    return codes, codes_t, scale, torch.empty_like(scale), dots, total


@operator("quantize_swiglu_delayed", fake=_empty_quantize_swiglu_delayed)
def quantize_swiglu_delayed(
    x: Tensor,
    dy: Tensor | None,
    fmt: str,
    known: Tensor,
    key: Tensor | None = None,
    role: int = 0,
    rows: bool = True,
    columns: bool = True,
    power_of_two: bool = False,
    router_dots: bool = False,
    group_of_block: Tensor | None = None,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual_delayed` of y, or of dx: codes, codes_t, scale fp32 [1], absmax fp32 [1], dots, sums."""
    x, dy, rounding = x.contiguous(), None if dy is None else dy.contiguous(), Rounding(key, role, rows, columns)
    if not _kernel_takes(x, dy, fmt, "tensorwise", True):
        t, dots = activation_dots(x, dy, router_dots)
        *quantized, total = quantize_dual_delayed(t, fmt, known, *rounding, power_of_two, sums=sums)
        return *quantized, dots, total
    # Reads x and dy only where no scale is known yet, in the first step.
    scale, amax = launch_swiglu_delayed_scale(x, dy, known, fmt, power_of_two)
    width = x.shape[1] // 2 if dy is None else x.shape[1]  # of y or dx
    dots, total = empty_router_dots(x, router_dots), empty_column_sums(x, width if sums else 0)
    # power_of_two False: the given scale is rounded already.
    codes, _, codes_t, _ = launch_dual_bf16x2(
        x, fmt, "tensorwise", rounding, False, scale, amax, swiglu=True, dy=dy, held=group_of_block,
        router_dots=dots if router_dots else None, column_sums=total if sums else None,
    )  # fmt: skip
    return codes, codes_t, scale, amax.view(torch.float32), dots, total


def _empty_quantize_swiglu_rowwise(x, fmt, groups):
    y = _empty_like(x, None)  # [M, I]; only its shape is used
    return *empty_codes(y, fmt, "rowwise"), x.new_empty(groups * y.shape[1], dtype=torch.int32)


@operator("quantize_swiglu_rowwise", fake=_empty_quantize_swiglu_rowwise)
def quantize_swiglu_rowwise(
    x: Tensor,
    fmt: str,
    key: Tensor | None = None,
    role: int = 0,
    power_of_two: bool = False,
    group_of_block: Tensor | None = None,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize` of y along its rows: codes, scale; and bits of the absmax of its columns, int32 [I], for
    `quantize_swiglu_backward`. group_of_block, groups: as for `quantize_transposed`; columns of each group
    [groups * I]."""
    x, column_groups = x.contiguous(), block_groups(x.shape[0], group_of_block, groups, "rowwise")
    if _kernel_takes(x, None, fmt, "rowwise"):  # one read of x; y is never in memory
        return launch_quantize_swiglu_rowwise(x, fmt, Rounding(key, role), power_of_two, column_groups)
    y = swiglu(x)  # bf16 [M, I], rounded as the fused kernel rounds it before it quantizes
    return *quantize(y, fmt, "rowwise", key, role, power_of_two), column_absmax_ref(y, column_groups)


def _empty_quantize_swiglu_backward(x, dy, fmt, fmt_y, groups, router_dots, sums):
    dual = *empty_codes(x, fmt, "rowwise"), *empty_codes(x, fmt, "rowwise", transposed=True, groups=groups)
    columns = empty_codes(dy, fmt_y, "rowwise", transposed=True, groups=groups)
    return *dual, *columns, empty_router_dots(x, router_dots), empty_column_sums(x, x.shape[1] if sums else 0)


@operator("quantize_swiglu_backward", fake=_empty_quantize_swiglu_backward)
def quantize_swiglu_backward(
    x: Tensor,
    dy: Tensor,
    column_amax: Tensor,
    fmt: str,
    key: Tensor | None,
    role: int,
    rows: bool,
    columns: bool,
    power_of_two: bool,
    fmt_y: str,
    key_y: Tensor | None,
    role_y: int,
    power_of_two_y: bool,
    group_of_block: Tensor | None = None,
    groups: int = 1,
    router_dots: bool = False,
    sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantize_dual` of dx, rowwise: codes, scale, codes_t, scale_t; `quantize_transposed` of y: codes_t, scale_t;
    dots; and with `sums` the `column_sums` of dx.

    column_amax: y's, as `quantize_swiglu_rowwise` gave it. key, role, rows, columns: the `Rounding` of dx; key_y,
    role_y: of y's transposed codes. group_of_block, groups: as for `quantize_transposed`.
    """
    x, dy, rounding = x.contiguous(), dy.contiguous(), Rounding(key, role, rows, columns)
    column_groups = block_groups(x.shape[0], group_of_block, groups, "rowwise")
    if not (_kernel_takes(x, dy, fmt, "rowwise") and supports_swiglu_rowwise(fmt_y, "rowwise")):
        grouped = {"group_of_block": group_of_block, "groups": groups}
        dx, dots = activation_dots(x, dy, router_dots)
        dual = quantize_dual(dx, fmt, "rowwise", "rowwise", *rounding, power_of_two, **grouped)
        # Its own absmax is column_amax: computed again here.
        y_columns = quantize_transposed(swiglu(x), fmt_y, "rowwise", key_y, role_y, power_of_two_y, **grouped)
        return *dual, *y_columns, dots, column_sums_if(sums, dx)
    dots = empty_router_dots(x, router_dots)
    # One read of x and dy: dx in bf16, its absmaxes, and y's column codes. Then one read of dx for its codes.
    codes_t, scale_t, dx, dx_amax = launch_quantize_swiglu_backward(
        x, dy, column_amax, fmt_y, Rounding(key_y, role_y), power_of_two_y, column_groups, dots if router_dots else None
    )
    dual = launch_dual_bf16x2(dx, fmt, "rowwise", rounding, power_of_two, row_column_amax=dx_amax, groups=column_groups)
    return *dual, codes_t, scale_t, dots, column_sums_if(sums, dx)
