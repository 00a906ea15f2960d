"""Matrix product of 8-bit codes, scales in the epilogue: out = (A · Bᵀ) * scale_a * scale_b (+ bias).

A [M, K] and B [N, K] are INT8 or FP8 codes; a scale is one for all (tensorwise, [1]) or one a row of its operand
(rowwise, [M] or [N]), so it leaves the sum and is applied once, in fp32. INT8 sums are exact in int32. FP8 sums run, by
default, in the tensor cores' own accumulator, which keeps fewer bits than fp32 (fast accumulation, as cuBLAS calls it);
without, each BLOCK_K products are added to an fp32 total.

A weight's gradient is a long sum into a small output, whose last wave of tiles may be nearly empty: `split_k.py`.

8-bit tensor cores read both operands along K. An operand that is stored the other way (its strides tell) is transposed
by a kernel first: A·B and Aᵀ·B cost one and two passes over 8-bit operands more than A·Bᵀ.
"""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import triton
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K, int8_mm_ref
from qtrain.kernels.gemm.persistent import launch_persistent_mm
from qtrain.kernels.gemm.split_k import launch_split_tiles, split_of
from qtrain.kernels.gemm.tiling import Tiling, sm_count
from qtrain.kernels.gemm.transpose import k_major

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# ---- definition ------------------------------------------------------------------------------------------------------


def scaled_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """A [M, K], B [N, K], both int8 or both fp8; scale_a fp32 [M] or [1], scale_b fp32 [N] or [1]; bias [N]."""
    k = a.shape[1]
    if a.dtype != torch.int8:
        total = a.float() @ b.float().t()
    elif k <= LONGEST_EXACT_K:
        total = int8_mm_ref(a, b).float()
    else:
        spans = range(0, k, LONGEST_EXACT_K)
        total = sum(int8_mm_ref(a[:, i : i + LONGEST_EXACT_K], b[:, i : i + LONGEST_EXACT_K]).float() for i in spans)
    total = total * scale_a[:, None] * scale_b[None, :]
    return (total if bias is None else total + bias.float()).to(out_dtype)


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
    add: bool = False,
) -> Tensor:
    """The kernel for `scaled_mm_ref` into `out` [M, N]; `add`: to what is there.

    K in multiples of 16, rows of `out` in multiples of 16 bytes, K at most LONGEST_EXACT_K for INT8; all contiguous.
    """
    (m, k), n, t = a.shape, b.shape[0], tiling
    split = split_of(t, m, n, k, t.per_sm * sm_count(a.device)) if t.split else None
    if split is None or split.whole:
        tiles = split.whole if split else None
        launch_persistent_mm(a, b, out, t, (scale_a, scale_b), bias=bias, fast_accum=fast_accum, add=add, tiles=tiles)
    if split:
        launch_split_tiles(a, b, scale_a, scale_b, out, t, split, bias=bias, fast_accum=fast_accum, add=add)
    return out


# ---- dispatch --------------------------------------------------------------------------------------------------------

# INT8 wants two programs a multiprocessor: one multiplies while the other turns its int32 totals into the output. FP8,
# whose epilogue is shorter, mostly wants the large tile. Small outputs want smaller tiles, so that all are at work.
_TWO, _TWO_WIDE = Tiling(128, 128, 128, 4, 3, per_sm=2), Tiling(128, 128, 128, 4, 3, subtiles=4, per_sm=2)
_GROUPED = [replace(_TWO, group_m=rows) for rows in (4, 64)]  # other walks through L2: up to 7% where n or k is small
_LARGE = [Tiling(128, 256, 128, 8, 4), Tiling(256, 128, 128, 8, 4)]
_SMALL = [Tiling(128, 128, 128, 8, 4, subtiles=1), Tiling(64, 128, 128, 4, 4, subtiles=1, per_sm=2)]
_SPLIT = {tiling: replace(tiling, split=True) for tiling in (_TWO, _TWO_WIDE, *_LARGE)}
TILINGS = {tiling.name: tiling for tiling in (_TWO, _TWO_WIDE, *_LARGE, *_SMALL, *_GROUPED, *_SPLIT.values())}
IDLE = 0.3
"""Share of all waves' programs without a tile from which on a split last wave is the better guess."""


def scaled_mm_names(a: Tensor, b: Tensor, out_dtype: torch.dtype, fast_accum: bool, add: bool = False) -> list[str]:
    """The implementations that can take these operands, K-major on a GPU, the best in general first."""
    (m, k), n = a.shape, b.shape[0]
    int8 = a.dtype == torch.int8
    names = []
    aligned = k % 16 == 0 and n * out_dtype.itemsize % 16 == 0  # what TMA descriptors ask of strides
    if aligned and (not int8 or k <= LONGEST_EXACT_K):
        # fp32 tiles, and those that are read as well, leave no room for large ones in shared memory
        names += _tiling_names(m, n, k, sm_count(a.device), int8, out_dtype.itemsize > 2 or add)
    if add:
        return names
    if int8 and m > 16 and k % 8 == 0 and n % 8 == 0 and k <= LONGEST_EXACT_K:
        names.append("cublas")
    if not int8 and k % 16 == 0 and n % 16 == 0 and out_dtype == torch.bfloat16:
        names.append("cublas")
    return names


@functools.cache  # asked at each call
def _tiling_names(m: int, n: int, k: int, processors: int, int8: bool, wide: bool) -> tuple[str, ...]:
    two, large = (_TWO_WIDE, []) if wide else (_TWO, _LARGE)
    small = triton.cdiv(m, 128) * triton.cdiv(n, 256) < 96
    order = [two, *large] if int8 or small else [*large, two]
    grouped = _GROUPED if int8 and not (wide or small) else []
    plain = [*([two] if small else order), *grouped, *_SMALL]
    split = [_SPLIT[t] for t in order if split_of(t, m, n, k, t.per_sm * processors)]
    first = plain[0]
    waves = triton.cdiv(m, first.block_m) * triton.cdiv(n, first.block_n) / (first.per_sm * processors)
    ahead = _SPLIT[first] in split and waves < (1 - IDLE) * math.ceil(waves)
    return tuple(t.name for t in ([*split, *plain] if ahead else [first, *split, *plain[1:]]))


def _scaled_mm_cublas(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, fast: bool
) -> Tensor:
    if a.dtype == torch.int8:
        return scaled_mm_ref(a, b, scale_a, scale_b, out_dtype, bias)
    (m, _), n = a.shape, b.shape[0]
    if scale_a.numel() > 1 or scale_b.numel() > 1:  # both one a row, or both one for all
        scale_a, scale_b = scale_a.expand(m).contiguous()[:, None], scale_b.expand(n).contiguous()[None, :]
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)


def _run(
    name: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
) -> Tensor:
    if name == "cublas":
        return _scaled_mm_cublas(a, b, scale_a, scale_b, out_dtype, bias, fast)
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    return launch_scaled_mm(a, b, scale_a, scale_b, out, TILINGS[name], bias=bias, fast_accum=fast)


@torch.library.custom_op("qtrain::scaled_mm", mutates_args=())
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    """(A · Bᵀ) * scale_a * scale_b + bias: A [M, K], B [N, K] int8 or fp8, scales fp32 a row or [1] -> [M, N]."""
    a, b = k_major(a), k_major(b)
    m, n = a.shape[0], b.shape[0]
    names = scaled_mm_names(a, b, out_dtype, fast_accum) if a.is_cuda and a.numel() and n else []
    if not names or forced() == "ref":
        return scaled_mm_ref(a, b, scale_a, scale_b, out_dtype, bias)
    key = (m, n, a.shape[1], a.dtype, b.dtype, out_dtype, scale_a.numel() > 1, scale_b.numel() > 1, fast_accum)
    arguments = (a, b, scale_a, scale_b, out_dtype, bias, fast_accum)
    return _run(choose("scaled_mm", key, names, lambda name: _run(name, *arguments)), *arguments)


@scaled_mm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = True,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@torch.library.custom_op("qtrain::scaled_mm_add_", mutates_args=("out",))
def scaled_mm_add_(
    out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool = True
) -> None:
    """out += (A · Bᵀ) * scale_a * scale_b: a weight's gradient [N, K] over micro-batches, without a copy between."""
    a, b = k_major(a), k_major(b)
    names = scaled_mm_names(a, b, out.dtype, fast_accum, add=True) if a.is_cuda and a.numel() and b.shape[0] else []
    if not names or forced() in ("ref", "cublas") or not out.is_contiguous():
        out.add_(scaled_mm_ref(a, b, scale_a, scale_b, torch.float32))
        return
    key = (*out.shape, a.shape[1], a.dtype, b.dtype, out.dtype, scale_a.numel() > 1, scale_b.numel() > 1, fast_accum)

    def run(name: str, to: Tensor) -> Tensor:
        return launch_scaled_mm(a, b, scale_a, scale_b, to, TILINGS[name], fast_accum=fast_accum, add=True)

    run(choose("scaled_mm_add", key, names, lambda name: run(name, torch.empty_like(out))), out)
