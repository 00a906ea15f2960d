"""GEMM of 8-bit codes with scales in the epilogue: out = (A · Bᵀ) * scale_a * scale_b (+ bias).

A [M, K] and B [N, K] are INT8 or FP8 codes; a scale is one for all (tensorwise, [1]) or one per row of its operand
(rowwise, [M] or [N]), so it is a factor of the whole sum and is applied once, in fp32. INT8 sums are exact in int32; a
K beyond what fits is cut into spans, whose sums are added in fp32. FP8 sums use, by default, the tensor cores' own
accumulator, which has fewer bits than fp32 (fast accumulation); otherwise each BLOCK_K products are added to an fp32
total.

A weight's gradient is a long sum into a small output, whose last wave of tiles may be nearly empty: `split_k.py`.

8-bit tensor cores read both operands K-major. An operand that is stored the other way, as its strides tell, is
transposed by a kernel first: A·B and Aᵀ·B cost one and two passes over 8-bit operands more than A·Bᵀ.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_fp8, sm_count
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator, triton
from qtrain.kernels.gemm.cublas_lt import ALGORITHMS, algorithm_names, fp8_mm
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K, aligned_rows, int8_mm, int8_mm_ref
from qtrain.kernels.gemm.persistent import Tiling, by_name, k_major, launch_persistent_mm, padded_k
from qtrain.kernels.gemm.scaled_wgmma import SCALED_TILINGS, launch_scaled_wgmma, supports_scaled_wgmma
from qtrain.kernels.gemm.split_k import choose_split, launch_split_tiles

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SUMS_BYTES = 2**26
"""int32 sums of cuBLAS's INT8 product that are scaled at a time: those of all logits are four times their codes."""
SPAN = LONGEST_EXACT_K // 128 * 128
"""K of an exact INT8 sum where the whole K is too long: a multiple of BLOCK_K and of the 16 bytes of TMA."""


# ---- definition ------------------------------------------------------------------------------------------------------


def scaled_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """A [M, K], B [N, K], both int8 or both fp8; scale_a fp32 [M] or [1], scale_b fp32 [N] or [1]; bias [N]."""
    _check(a, b)
    total = sum_over_spans(a, b, int8_mm_ref) if a.dtype == torch.int8 else fp8_mm_ref(a, b)
    return _scale_total(total, scale_a, scale_b, out_dtype, bias)


def fp8_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] · B [N, K]ᵀ of FP8 -> fp32 [M, N]. Under --deterministic without regard to M: libraries choose the order
    of fp32 additions by the shape, and fp64 holds the sum of e4m3's products exactly, in any order."""
    exact = torch.float64 if torch.are_deterministic_algorithms_enabled() else torch.float32
    return (a.to(exact) @ b.to(exact).t()).float()


def sum_over_spans(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A [M, K] · B [N, K]ᵀ of int8 -> fp32, by an exact product `multiply` of a K of at most LONGEST_EXACT_K."""
    k = a.shape[1]
    if k <= LONGEST_EXACT_K:
        return multiply(a, b).float()
    total: Any = sum(multiply(a[:, i : i + SPAN], b[:, i : i + SPAN]).float() for i in range(0, k, SPAN))
    return total


def _scale_total(
    total: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    total = total * scale_a[:, None] * scale_b[None, :]  # fp32 [M, N]; in the kernels' order, which rounds alike
    return (total if bias is None else total + bias.float()).to(out_dtype)


def _check(a: Tensor, b: Tensor) -> None:
    assert a.shape[1] == b.shape[1], f"operands have K = {a.shape[1]} and {b.shape[1]}"
    check_kinds(a, b)


def check_kinds(a: Tensor, b: Tensor) -> None:
    # e5m2 gradients meet e4m3 weights.
    same_kind = a.dtype == b.dtype == torch.int8 or (a.dtype in FP8 and b.dtype in FP8)
    assert same_kind, f"operands are both int8 or both FP8, not {a.dtype} and {b.dtype}"


# ---- launch ----------------------------------------------------------------------------------------------------------


def launch_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    tiling: Tiling,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """The kernel for `scaled_mm_ref` into `out` [M, N].

    K in multiples of 16, rows of `out` in multiples of 16 bytes, K at most LONGEST_EXACT_K for INT8; all contiguous.
    """
    (m, k), n, t = a.shape, b.shape[0], tiling
    # Whole waves by the persistent kernel, then the tiles of the last wave by slices of K.
    split = choose_split(t, m, n, k, t.per_sm * sm_count(a.device)) if t.split else None
    if split is None or split.whole:
        tiles = split.whole if split else None
        launch_persistent_mm(a, b, out, t, (scale_a, scale_b), bias=bias, fast_accum=fast_accum, tiles=tiles)
    if split:
        launch_split_tiles(a, b, scale_a, scale_b, out, t, split, bias=bias, fast_accum=fast_accum)
    return out


# ---- dispatch --------------------------------------------------------------------------------------------------------

# INT8 wants two CTAs per SM: one multiplies while the other converts its int32 accumulators. FP8, whose epilogue is
# shorter, mostly wants the large tile. Small outputs want smaller tiles, so that every SM has one.
_TWO, _TWO_WIDE = Tiling(128, 128, 128, 4, 3, per_sm=2), Tiling(128, 128, 128, 4, 3, subtiles=4, per_sm=2)
_GROUPED = [replace(_TWO, group_m=rows) for rows in (4, 64)]  # other orders of tiles: up to 7% where n or k is small
_LARGE = [Tiling(128, 256, 128, 8, 4), Tiling(256, 128, 128, 8, 4)]
_SMALL = [Tiling(128, 128, 128, 8, 4, subtiles=1), Tiling(64, 128, 128, 4, 4, subtiles=1, per_sm=2)]
_SPLIT = {tiling: replace(tiling, split=True) for tiling in (_TWO, _TWO_WIDE, *_LARGE)}
TILINGS = by_name(_TWO, _TWO_WIDE, *_LARGE, *_SMALL, *_GROUPED, *_SPLIT.values())
IDLE = 0.3
"""Share of idle CTAs over all waves from which a split last wave is the better guess."""


def scaled_mm_names(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> list[str]:
    """The implementations that can take these operands, K-major on a GPU, the best in general first."""
    (m, k), n = a.shape, b.shape[0]
    int8 = a.dtype == torch.int8
    supported = k <= LONGEST_EXACT_K if int8 else has_fp8(a.device) or not a.is_cuda
    if not supported:
        return []
    names = []
    if k % 16 == 0 and n * out_dtype.itemsize % 16 == 0:  # TMA descriptors take strides in multiples of 16 bytes
        names += _tiling_names(m, n, k, sm_count(a.device), int8, out_dtype.itemsize > 2)
    if int8 and m > 16 and k % 8 == 0 and n % 8 == 0:
        names.append("cublas")
    if not int8 and k % 16 == 0 and n % 16 == 0 and out_dtype == torch.bfloat16:
        names += ["cublas", *algorithm_names()[1:]]  # the first is what PyTorch runs
    return names


@functools.cache  # asked at each call
def _tiling_names(m: int, n: int, k: int, sms: int, int8: bool, wide: bool) -> tuple[str, ...]:
    """wide: of an fp32 output, whose tiles leave no room in shared memory for the large ones."""
    # The first name is what runs where nothing may be timed: a guess from the shape, INT8 and FP8 apart.
    two, large = (_TWO_WIDE, []) if wide else (_TWO, _LARGE)
    small = triton.cdiv(m, 128) * triton.cdiv(n, 256) < 96  # too few large tiles for a Hopper's 132 SMs
    order = [two, *large] if int8 or small else [*large, two]
    grouped = _GROUPED if int8 and not (wide or small) else []
    plain = [*([two] if small else order), *grouped, *_SMALL]
    split = [_SPLIT[t] for t in order if choose_split(t, m, n, k, t.per_sm * sms)]
    first = plain[0]
    # Tiles over the CTAs that run at once; what is missing to whole waves is idle.
    waves = triton.cdiv(m, first.block_m) * triton.cdiv(n, first.block_n) / (first.per_sm * sms)
    split_first = _SPLIT[first] in split and waves < (1 - IDLE) * math.ceil(waves)
    return tuple(t.name for t in ([*split, *plain] if split_first else [first, *split, *plain[1:]]))


def _exact_span(a: Tensor, b: Tensor) -> Tensor:
    """A span of a long INT8 sum, in int32 or fp32: the fastest of `int8_mm` and the tilings that split K, which help
    where there are few tiles, as of a 1x1 convolution's `grad_weight`, whose sum is over pixels. All have the same
    bits: slices are added as int32."""
    splits = [name for name in scaled_mm_names(a, b, torch.float32) if "split" in name]
    if not splits or forced() is not None:
        return int8_mm(a, b)

    def run(name: str) -> Tensor:
        return int8_mm(a, b) if name == "int8_mm" else _split_span(a, b, TILINGS[name])

    sizes = (a.shape[0], b.shape[0], a.shape[1])
    return run(choose("int8_span", sizes, ["int8_mm", *splits], run))


def _split_span(a: Tensor, b: Tensor, tiling: Tiling) -> Tensor:
    one, out = torch.ones(1, device=a.device), torch.empty(a.shape[0], b.shape[0], device=a.device)
    return launch_scaled_mm(aligned_rows(a), aligned_rows(b), one, one, out, tiling)


def _scaled_mm_cublas(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    (m, _), n = a.shape, b.shape[0]
    if a.dtype == torch.int8:
        # int32 sums, four times their codes, a block of rows at a time; cuBLAS needs more than 16 rows.
        rows = max(SUMS_BYTES // (4 * n), 32)  # 4 bytes a sum
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
        for i in range(0, m, rows):  # rows of out are independent
            part = slice(i, i + rows)
            scale = scale_a[part] if scale_a.numel() > 1 else scale_a
            out[part] = scaled_mm_ref(a[part], b, scale, scale_b, out_dtype, bias)
        return out
    bias = _bias_in(out_dtype, bias)
    # cuBLAS: [M, 1] and [1, N], or two scalars.
    if scale_a.numel() > 1 or scale_b.numel() > 1:  # both one a row, or both one for all
        scale_a, scale_b = scale_a.expand(m).contiguous()[:, None], scale_b.expand(n).contiguous()[None, :]
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)


def _bias_in(dtype: torch.dtype, bias: Tensor | None) -> Tensor | None:
    """cuBLAS adds one of the output's dtype."""
    return None if bias is None else bias.to(dtype)


@operator("scaled_mm", fake=lambda a, b, out_dtype: a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype))
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """(A · Bᵀ) * scale_a * scale_b + bias: A [M, K], B [N, K] int8 or fp8, fp32 scales per row or [1] -> [M, N]."""
    _check(a, b)
    a, b = k_major(a), k_major(b)
    m, n = a.shape[0], b.shape[0]
    if not (a.is_cuda and a.numel() and n) or forced() == "ref":
        return scaled_mm_ref(a, b, scale_a, scale_b, out_dtype, bias)
    a, b = padded_k(a), padded_k(b)
    if a.dtype == torch.int8 and a.shape[1] > LONGEST_EXACT_K:  # int32 would overflow
        return _scale_total(sum_over_spans(a, b, _exact_span), scale_a, scale_b, out_dtype, bias)
    names = scaled_mm_names(a, b, out_dtype)
    if not names:
        return scaled_mm_ref(a, b, scale_a, scale_b, out_dtype, bias)
    if supports_scaled_wgmma(a, b, out_dtype, fast_accum):
        names = [*names, *SCALED_TILINGS]

    def run(name: str) -> Tensor:
        if name == "cublas":
            return _scaled_mm_cublas(a, b, scale_a, scale_b, out_dtype, bias, fast_accum)
        out = torch.empty(m, n, dtype=out_dtype, device=a.device)
        if name in ALGORITHMS:
            added, algorithm = _bias_in(out_dtype, bias), ALGORITHMS[name]
            return fp8_mm(a, b, scale_a, scale_b, out, algorithm=algorithm, bias=added, fast_accum=fast_accum)
        if name in SCALED_TILINGS:
            return launch_scaled_wgmma(a, b, scale_a, scale_b, out, SCALED_TILINGS[name], bias=bias)
        return launch_scaled_mm(a, b, scale_a, scale_b, out, TILINGS[name], bias=bias, fast_accum=fast_accum)

    key = (m, n, a.shape[1], a.dtype, b.dtype, out_dtype, scale_a.numel() > 1, scale_b.numel() > 1, fast_accum)
    return run(choose("scaled_mm", key, names, run))
