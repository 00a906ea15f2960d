"""The table of quantizers, and of what else moves memory between products: TB/s over the minimal bytes of each, against
the device's copy bandwidth.

The minimal bytes are the input read once and every output written once. A quantizer that needs the absmax of a row or
of the tensor before it writes a code may read its input twice, which lowers its rate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qtrain.bench.between_products import (
    column_sums_case,
    delayed_swiglu_case,
    norm_case,
    qk_norm_rope_backward_case,
    qk_norm_rope_case,
    rope_backward_case,
    rope_case,
    rowwise_swiglu_case,
)
from qtrain.bench.case import Bench, Case, Check, UnavailableError, WrongResultError, largest_share, random_bf16, within
from qtrain.bench.loss_codes import OF_ROUNDING, delayed_loss_case, rowwise_loss_case
from qtrain.bench.tables import Cell, Table
from qtrain.bench.timing import copy_bandwidth
from qtrain.kernels.gemm.persistent import transpose_8bit
from qtrain.kernels.numerics.formats import FORMATS, dequantize, expand_scale
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS
from qtrain.kernels.quantize.operators import quantize, quantize_dual
from qtrain.train.log.status import three_digits

GROUPS = 8
SEVERAL_READS = (
    "What reads its input more often has at most: 67% with scales of rows and of columns, 60% with one of the tensor; "
    "the loss 67% with e4m3 from logits, 50% with int8, 40% and 33% with a gradient in bf16; int8 of SwiGLU's gradient "
    "58%."
)
"""The share of the copy bandwidth that is left."""
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Quantizer:
    """A quantizer. granularity_t: of transposed codes from the same read, None without them; given: with a given scale;
    grouped: columns have scales of each of GROUPS groups of rows."""

    fmt: str
    granularity: str
    granularity_t: str | None = None
    given: bool = False
    grouped: bool = False
    stochastic: bool = False

    @property
    def name(self) -> str:
        transposed = {None: [], self.granularity: ["both layouts"]}
        words = [
            f"{self.fmt} {'scale given' if self.given else self.granularity}",
            *transposed.get(self.granularity_t, [f"transposed {self.granularity_t}"]),
            *([f"{GROUPS} groups"] if self.grouped else []),
            *(["SR"] if self.stochastic else []),
        ]
        return ", ".join(words)


_FORMS: list[tuple[Any, ...]] = [
    *(("int8", granularity) for granularity in ("rowwise", "1x128", "32x32")),
    *(("e4m3", granularity) for granularity in ("tensorwise", "rowwise", "1x128", "128x128")),
    ("int4", "rowwise"),
    *(("int8", granularity, granularity) for granularity in ("rowwise", "128x128", "32x32")),
    *(("e4m3", granularity, granularity) for granularity in ("rowwise", "1x128", "128x128")),
    ("e4m3", "1x128", "128x128"),
    ("e4m3", "tensorwise", "tensorwise", True),
    *((fmt, "rowwise", "rowwise", False, True) for fmt in ("int8", "e4m3")),
]
QUANTIZERS = [Quantizer(*form, stochastic=stochastic) for form in _FORMS for stochastic in (False, True)]


def quantizer_case(q: Quantizer, shape: tuple[int, int], device: torch.device) -> Case:
    """The quantizer on random bf16 values of shape [M, K]."""
    x = random_bf16(shape, device)
    key = torch.tensor([1, 2, 3], device=device) if q.stochastic else None  # Philox key: seed, step, tensor
    scale = (x.abs().amax().float() / FORMATS[q.fmt].max).view(1) if q.given else None
    groups = group_of_block(shape[0], device) if q.grouped else None

    def run(x: Tensor) -> Outputs:
        if q.granularity_t:
            grouped = {"group_of_block": groups, "groups": GROUPS if q.grouped else 1}
            return quantize_dual(x, q.fmt, q.granularity, q.granularity_t, key, scale=scale, **grouped)
        return quantize(x, q.fmt, q.granularity, key, scale=scale)

    return Case((x,), run, check_quantized(x, q))


def group_of_block(rows: int, device: torch.device) -> Tensor:
    """Groups of about equal size; some have no rows where there are fewer blocks than groups."""
    if rows % BLOCK_ROWS:
        raise UnavailableError(f"rows of a group are multiples of {BLOCK_ROWS}")
    blocks = rows // BLOCK_ROWS
    return (torch.arange(blocks, device=device) * GROUPS // blocks).int()


def check_quantized(x: Tensor, q: Quantizer) -> Check:
    """Each value is at most half a step from its code, with stochastic rounding at most one, saturation aside."""

    def check(out: Any) -> float:
        codes, scale, *transposed = out
        granularity_t = q.granularity_t or q.granularity
        share = _error(x, codes, scale, q, q.granularity)
        if q.grouped:
            codes_t, scale_t = transposed  # [K, M] and [GROUPS * K]: a scale per (group, column)
            group_of_row = group_of_block(x.shape[0], x.device).repeat_interleave(BLOCK_ROWS)
            for group, own in enumerate(scale_t.view(GROUPS, -1)):
                own_rows = group_of_row == group
                if own_rows.any():
                    share = max(share, _error(x[own_rows].t(), codes_t[:, own_rows], own, q, granularity_t))
        elif transposed:
            share = max(share, _error(x.t(), transposed[0], transposed[1], q, granularity_t))
        return within(share, OF_ROUNDING)

    return check


def _error(x: Tensor, codes: Tensor, scale: Tensor, q: Quantizer, granularity: str) -> float:
    """The largest error, relative to that of rounding."""
    fmt, shape, x = FORMATS[q.fmt], (x.shape[0], x.shape[1]), x.float()
    value = dequantize(codes, scale, q.fmt, granularity, shape)  # fp32 [rows, columns]
    # Integers: a step is the scale. Floats: it grows with the power of two of the value.
    unit = step = expand_scale(scale, granularity, shape)
    if fmt.is_float:  # for 2**e <= |x| < 2**(e + 1) a step is 2**(e - mantissa bits); all subnormals have the same
        power = (x / unit).abs().log2().floor().exp2().clamp(min=2.0 ** (1 - fmt.exponent_bias))
        step = power * 2.0**-fmt.mantissa_bits * unit
    # 1%: the reciprocal of a scale is rounded. Beyond the largest code the whole excess is lost.
    allowed = step * ((1.0 if q.stochastic else 0.5) * 1.01) + (x.abs() - fmt.max * unit).clamp(min=0)
    return largest_share(value - x, allowed)


def transpose_case(shape: tuple[int, int], device: torch.device) -> Case:
    x = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)

    def check(out: Any) -> float:
        if not torch.equal(out[0], x.t()):
            raise WrongResultError("not the transpose")
        return 0.0

    return Case((x,), lambda x: (transpose_8bit(x),), check)


@dataclass(frozen=True)
class QuantizerRow:
    """A line of the table. prepare: takes the input's shape."""

    name: str
    prepare: Callable[[tuple[int, int], torch.device], Case]


def _error_under(quantizer: Quantizer) -> Callable[[Tensor, Tensor, Tensor], float]:
    return lambda x, codes, scale: _error(x, codes, scale, quantizer, quantizer.granularity)


_E4M3, _INT8 = _error_under(Quantizer("e4m3", "tensorwise", given=True)), _error_under(Quantizer("int8", "rowwise"))


ROWS_BETWEEN_PRODUCTS = [
    QuantizerRow("SwiGLU, e4m3, both layouts, scale given", delayed_swiglu_case(False, _E4M3)),
    QuantizerRow("gradient of SwiGLU, e4m3, both layouts, scale given", delayed_swiglu_case(True, _E4M3)),
    QuantizerRow("SwiGLU, int8 rowwise", rowwise_swiglu_case(False, _INT8)),
    QuantizerRow("gradient of SwiGLU, int8 rowwise, both layouts, and its columns", rowwise_swiglu_case(True, _INT8)),
    QuantizerRow("gradient of a norm and its residual", norm_case),
    QuantizerRow("rotary positions", rope_case),
    QuantizerRow("gradient of rotary positions", rope_backward_case),
    QuantizerRow("norms of heads, rotary positions", qk_norm_rope_case),
    QuantizerRow("gradient of norms of heads, rotary positions", qk_norm_rope_backward_case),
    QuantizerRow("sums of columns", column_sums_case),
]
QUANTIZER_ROWS = [
    *(QuantizerRow(q.name, partial(quantizer_case, q)) for q in QUANTIZERS),
    QuantizerRow("transpose of 8 bits", transpose_case),
    QuantizerRow("loss, its gradient in bf16, e4m3 of that", delayed_loss_case(False, _E4M3)),
    QuantizerRow("loss, e4m3 of its gradient from logits", delayed_loss_case(True, _E4M3)),
    QuantizerRow("loss, its gradient in bf16, int8 rowwise of that", rowwise_loss_case(False, _INT8)),
    QuantizerRow("loss, int8 rowwise of its gradient from logits", rowwise_loss_case(True, _INT8)),
    *ROWS_BETWEEN_PRODUCTS,
]


def quantizer_table(shapes: Sequence[tuple[int, int]], rows: Sequence[QuantizerRow], bench: Bench) -> Table:
    """TB/s of every row on every shape [M, K], and its percentage of the copy bandwidth."""
    copy, data = copy_bandwidth(bench.device), bench.hardware.peaks.get("bandwidth")
    columns = [f"{m}x{k}" for m, k in shapes]
    datasheet = f" (datasheet {three_digits(data)})" if data and not bench.hardware.measured else ""
    note = f"Copy bandwidth {three_digits(copy)} TB/s{datasheet}; bf16 in; bytes: inputs and outputs once."
    table = Table(
        "Quantizers and other kernels between products, M x K",
        "TB/s (share of the copy bandwidth)",
        columns,
        [note, SEVERAL_READS],
    )
    for row in rows:
        for shape, column in zip(shapes, columns, strict=True):
            bench.fill(table, row.name, column, partial(row.prepare, shape, bench.device), _show(copy))
    return table


def _show(copy: float) -> Callable[[Case, float], Cell]:
    def show(case: Case, ms: float) -> Cell:
        # The input read once and every output written once: the fewest bytes, whatever a kernel reads again.
        moved = sum(t.nbytes for t in (*case.inputs, *case.run(*case.inputs))) - case.unread
        rate = moved / ms / 1e9
        details = {"bytes": moved, "share_of_copy": rate / copy}
        return Cell(rate, text=f"{three_digits(rate)} ({100 * rate / copy:.0f}%)", details=details)

    return show
