"""Compiles every kernel for GPUs that need not be there: python -m tests.kernels.compile_kernels [ARCH...]

Runs every launcher on CPU tensors with the compute capability of the target. A launch is not executed: Triton
specializes the kernel on its arguments, as a launch does, and compiles it to a cubin with the ptxas that it ships.
Prints one line per kernel that does not compile, or that needs more shared memory than the target has, and a summary
as JSON. Must run without TRITON_INTERPRET.

Without ARCH a sample is compiled: a fifth of the cases once for sm_90, and every sixth of the sampled cases for one
of the other targets, in turn.
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import count, product

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from qtrain.core.hardware import capabilities
from qtrain.kernels.attention.backward import KEYS_TILINGS, launch_keys, launch_queries
from qtrain.kernels.attention.blocks import VisibleKeys, padded
from qtrain.kernels.attention.forward import launch_forward
from qtrain.kernels.column_sums import launch_column_sums
from qtrain.kernels.conv import gather_mm, grad_weight
from qtrain.kernels.conv.geometry import ConvShape
from qtrain.kernels.cross_entropy import launch_cross_entropy, launch_cross_entropy_statistics
from qtrain.kernels.decode.cached_attention import Heads, launch_cached_attention
from qtrain.kernels.decode.gemv import GEMV
from qtrain.kernels.decode.operands import Fused, Weight
from qtrain.kernels.decode.quantize_normed import launch_normed, launch_quantize_normed
from qtrain.kernels.decode.row_tiles import TILES
from qtrain.kernels.decode.weight_only_mm import launch_weight_only_mm
from qtrain.kernels.distillation import launch_distilled_cross_entropy
from qtrain.kernels.elementwise import launch_add_in_order
from qtrain.kernels.gemm import (
    add_scaled_mm,
    blockwise_mm,
    float_mm,
    int4_cores,
    int4_mm,
    int8_mm,
    low_rank_mm,
    scaled_mm,
)
from qtrain.kernels.gemm.blockwise_wgmma import WGMMA_TILINGS, WgmmaGroups, launch_blockwise_wgmma
from qtrain.kernels.gemm.codes_mm import launch_codes_grad_mm, launch_codes_mm
from qtrain.kernels.gemm.persistent import Tiling, launch_persistent_mm, launch_transpose_8bit
from qtrain.kernels.gemm.scaled_wgmma import LOW_RANK_TILINGS, SCALED_TILINGS, launch_scaled_wgmma
from qtrain.kernels.grouped import grouped_mm, grouped_plain_mm
from qtrain.kernels.grouped.grouped_blockwise_mm import launch_grouped_rows_blockwise, launch_grouped_sums_blockwise
from qtrain.kernels.grouped.grouped_int4_mm import launch_unpack_int4
from qtrain.kernels.grouped.per_group import launch_zero_empty, launch_zero_tail, matrices
from qtrain.kernels.grouped.permute import launch_combine_rows, launch_route_weight_grad
from qtrain.kernels.grouped.persistent import launch_k_grouped, launch_long_sums, launch_m_grouped
from qtrain.kernels.grouped.token_permutation import launch_group_rows
from qtrain.kernels.grouped.topk import launch_topk
from qtrain.kernels.norm.qk_norm_rope import launch_qk_norm_rope, launch_qk_norm_rope_backward
from qtrain.kernels.norm.qkv_rope import launch_qkv_rope, launch_qkv_rope_backward
from qtrain.kernels.norm.residual_norm import launch_residual_norm_backward
from qtrain.kernels.numerics.encode import encoding
from qtrain.kernels.numerics.formats import empty_codes
from qtrain.kernels.numerics.philox import NEAREST, Rounding
from qtrain.kernels.optim.fused_update import SIGNED_STATES, FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import BLOCKS, state_format, zero_state
from qtrain.kernels.optim.sum_of_squares import SumOfSquares
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.kernels.quantize.absmax import launch_absmax
from qtrain.kernels.quantize.column_groups import BlockGroups
from qtrain.kernels.quantize.delayed_scale import launch_delayed_scale, launch_record_amax, launch_swiglu_delayed_scale
from qtrain.kernels.quantize.dual_bf16x2 import BLOCK_PAIRS, GRADIENT_PAIRS, PAIRS, launch_dual_bf16x2
from qtrain.kernels.quantize.gather_rows import RowIndex, launch_gather_dual, launch_gather_rows
from qtrain.kernels.quantize.keep_8bit import launch_restore_8bit
from qtrain.kernels.quantize.logit_rows import LogitRows
from qtrain.kernels.quantize.mx import launch_quantize_mx
from qtrain.kernels.quantize.nf4 import launch_dequantize_nf4, nf4_table
from qtrain.kernels.quantize.nf4_to_8bit import launch_nf4_to_8bit
from qtrain.kernels.quantize.nvfp4 import launch_quantize_nvfp4
from qtrain.kernels.quantize.other_layout import launch_transpose_rowwise
from qtrain.kernels.quantize.rowwise import launch_rowwise, launch_rowwise_bf16x2
from qtrain.kernels.quantize.softmax_grad import launch_quantize_softmax_grad, launch_softmax_grad_scale
from qtrain.kernels.quantize.tiled import launch_tiled
from qtrain.kernels.swiglu.backward import launch_quantize_swiglu_backward
from qtrain.kernels.swiglu.gradient_rows import launch_swiglu_gradient_rows
from qtrain.kernels.swiglu.rowwise import launch_quantize_swiglu_rowwise
from qtrain.kernels.swiglu.swiglu import launch_swiglu, launch_swiglu_backward
from qtrain.tensors.stored_weight import StoredWeight

ARCHITECTURES = {
    arch: capabilities.SHARED_MEMORY.get(divmod(arch, 10), capabilities.LEAST_SHARED_MEMORY)
    for arch in (80, 86, 89, 90, 100, 120)
}
"""Targets, and the bytes of shared memory that a CTA can have there."""
QUICK = 90
"""The target whose sample has the most kernels: it compiles a GEMM in a fifth of the time that sm_80 takes."""
QUICK_SHARE, SHARE = 5, 6
"""Of so many sampled cases, one is compiled for it, and one for another target."""

FORMATS = ("e4m3", "int8", "e5m2")  # FP8 first: of each kernel, the sample takes the first case
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STOCHASTIC = Rounding(torch.tensor([1, 2, 3]), 2)
ROUNDINGS = (NEAREST, STOCHASTIC._replace(columns=False), STOCHASTIC._replace(rows=False), STOCHASTIC)
SINGLE = (NEAREST, STOCHASTIC)

Case = tuple[bool, Callable[[], object]]
"""Whether it is in the sample, and the launcher's call."""


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# ---- the launchers ---------------------------------------------------------------------------------------------------
# Generators yield calls with arguments of all kinds; variables are bound as defaults, because calls run later.


def elementwise() -> Iterator[Case]:
    for dtype in (BF16, FP32):
        yield dtype is BF16, lambda d=dtype: launch_column_sums(zeros(4096, 896, dtype=d))
        for start in ("out", "zero"):
            yield (
                dtype is BF16,
                lambda d=dtype, s=start: launch_add_in_order(zeros(512, dtype=FP32), zeros(2, 512, dtype=d), s),
            )
        yield dtype is BF16, lambda d=dtype: launch_add_in_order(zeros(512, dtype=d), zeros(2, 512, dtype=d), "term")
        for first in (dtype, FP32):  # scaled
            yield (
                dtype is BF16,
                lambda d=dtype, f=first: launch_add_in_order(
                    zeros(512, dtype=BF16), [zeros(512, dtype=f), zeros(512, dtype=d)], "term", zeros(1, dtype=FP32)
                ),
            )
        yield dtype is BF16, lambda d=dtype: SumOfSquares().launch([zeros(512, dtype=d)])


def quantizers() -> Iterator[Case]:
    for fmt in (*FORMATS, "int4"):
        for r in SINGLE:
            some = (fmt, r) in (("int8", STOCHASTIC), ("e4m3", NEAREST))
            for g in ("rowwise", "1x128", "1x32"):
                dtype = FP32 if g == "1x32" else BF16
                yield (
                    some and g == "1x32",
                    lambda f=fmt, g=g, r=r, d=dtype: launch_rowwise(zeros(64, 4096, dtype=d), f, g, r),
                )
            yield some, lambda f=fmt, r=r: launch_rowwise(zeros(4, 32768), f, "rowwise", r, True)
            pairs = [("rowwise", "rowwise"), ("1x128", "1x128"), ("128x128", "128x128"), ("32x32", "32x32")]
            for g, t in [*pairs, ("tensorwise", "tensorwise"), ("1x32", "rowwise"), (None, "1x128"), ("128x128", None)]:
                first = g == "1x32"
                yield some and first, lambda f=fmt, g=g, t=t, r=r: launch_tiled(zeros(256, 512, dtype=FP32), f, g, t, r)
            yield False, lambda f=fmt, r=r: launch_tiled(
                zeros(256, 512), f, "tensorwise", "tensorwise", r, scale=zeros(1, dtype=FP32),
                scale_t=zeros(1, dtype=FP32), amax=zeros(1, dtype=torch.int32),
            )  # fmt: skip
    for fmt in (*FORMATS, "int4"):
        for r in SINGLE:
            some = (fmt, r) in (("int8", NEAREST), ("e4m3", NEAREST), ("e5m2", STOCHASTIC), ("int4", STOCHASTIC))
            for k, g in ((4096, "rowwise"), (4864, "rowwise"), (4096, "1x128")):
                yield some and k == 4864, lambda f=fmt, k=k, g=g, r=r: launch_rowwise_bf16x2(zeros(64, k), f, g, r)
    for tensor, rows, columns in ((True, False, False), (False, True, False), (False, True, True), (True, True, True)):
        for dtype in (BF16, FP32):
            yield (
                (rows and dtype is BF16),
                lambda t=tensor, r=rows, c=columns, d=dtype: launch_absmax(zeros(256, 512, dtype=d), t, r, c),
            )
    for dtype in (BF16, FP32):
        for elem in ("e4m3", "e5m2"):
            yield dtype is BF16, lambda e=elem, d=dtype: launch_quantize_mx(zeros(64, 512, dtype=d), e)
        for r, transposed in product(SINGLE, (False, True)):
            yield (
                dtype is BF16 and transposed and r is STOCHASTIC,
                lambda r=r, t=transposed, d=dtype: launch_quantize_nvfp4(
                    zeros(64, 512, dtype=d), r.row_key, r.role, t, hadamard=t
                ),
            )
        for k in (512, 500):
            codes = zeros(64, k // 2, dtype=torch.uint8)
            yield (
                k == 500,
                lambda c=codes, k=k, d=dtype: launch_dequantize_nf4(
                    c, zeros(64, 8, dtype=FP32), nf4_table(torch.device("cpu")), k, d
                ),
            )
        yield (
            dtype is BF16,
            lambda d=dtype: launch_delayed_scale(zeros(64, 512, dtype=d), zeros(1, dtype=FP32), "e4m3", True),
        )
    yield True, lambda: launch_record_amax(*(zeros(1, dtype=FP32) for _ in range(3)))


def dual_quantizers() -> Iterator[Case]:
    for fmt in FORMATS:
        for number, r in enumerate(ROUNDINGS):
            for g, t in PAIRS:
                sampled = (("int8", "rowwise", 0), ("e4m3", "1x128", 0), ("e5m2", "128x128", 3))
                shape = (144, 272) if g == "rowwise" else (256, 512)
                yield (
                    (fmt, g, number) in sampled,
                    lambda f=fmt, g=g, t=t, r=r, s=shape: launch_dual_bf16x2(zeros(*s), f, g, r, granularity_t=t),
                )
            for dy in (None, zeros(256, 256)):
                for g, t in BLOCK_PAIRS:
                    some = (fmt, g, number) == ("int8", "128x128", 2)
                    yield (
                        some,
                        lambda f=fmt, g=g, t=t, r=r, dy=dy: launch_dual_bf16x2(
                            zeros(256, 512), f, g, r, granularity_t=t, swiglu=True, dy=dy
                        ),
                    )
                if fmt != "int8":
                    yield fmt == "e4m3" and number == 0, lambda f=fmt, r=r, dy=dy: launch_dual_bf16x2(
                        zeros(256, 512), f, "tensorwise", r, False, zeros(1, dtype=FP32), zeros(1, dtype=torch.int32),
                        swiglu=True, dy=dy, router_dots=None if dy is None else zeros(256, 2, dtype=FP32),
                    )  # fmt: skip
                    yield fmt == "e4m3" and number == 0, lambda f=fmt, r=r, dy=dy: launch_dual_bf16x2(
                        zeros(256, 512), f, "tensorwise", r, False, zeros(1, dtype=FP32), zeros(1, dtype=torch.int32),
                        swiglu=True, dy=dy, column_sums=zeros(256 if dy is None else 512, dtype=FP32),
                    )  # fmt: skip
            if fmt != "int8":
                yield (
                    False,
                    lambda f=fmt, r=r: launch_dual_bf16x2(
                        zeros(144, 272),
                        f,
                        "tensorwise",
                        r,
                        False,
                        zeros(1, dtype=FP32),
                        zeros(1, dtype=torch.int32),
                        column_sums=zeros(272, dtype=FP32),
                    ),
                )
        index = RowIndex(zeros(256, dtype=torch.int32))
        yield (
            False,
            lambda f=fmt, i=index: launch_dual_bf16x2(zeros(40, 512), f, "1x128", granularity_t="128x128", index=i),
        )


def gathered_rows() -> Iterator[Case]:
    """Of rows of 40 tokens, with and without weights."""
    x, scale, amax = zeros(40, 512), zeros(1, dtype=FP32), zeros(1, dtype=torch.int32)
    tokens = zeros(256, dtype=torch.int32)
    for i in (RowIndex(tokens, zeros(256, dtype=FP32)), RowIndex(tokens)):
        weighted = i.weight_of_row is not None
        for fmt in ("e4m3", "int8"):
            for number, r in enumerate(SINGLE):
                for g in ("128x128", "1x128", "rowwise", "tensorwise"):
                    some = (fmt, g, number, weighted) in (("int8", "rowwise", 1, True), ("e4m3", "1x128", 0, False))
                    yield some, lambda f=fmt, g=g, r=r, i=i: launch_dual_bf16x2(x, f, g, r, index=i)
                if fmt != "int8":
                    some = (fmt, number, weighted) == ("e4m3", 0, True)
                    yield (
                        some,
                        lambda f=fmt, r=r, i=i: launch_dual_bf16x2(x, f, "tensorwise", r, False, scale, amax, index=i),
                    )
        odd = RowIndex(*(None if t is None else t[:144] for t in i))
        yield weighted, lambda i=odd: launch_dual_bf16x2(zeros(40, 272), "int8", "rowwise", STOCHASTIC, index=i)
        for dtype in (BF16, FP32):
            yield (
                weighted and dtype is BF16,
                lambda d=dtype, i=i: launch_delayed_scale(zeros(40, 512, dtype=d), scale, "e4m3", True, i),
            )


def swiglus() -> Iterator[Case]:
    for dtype in (BF16, FP32):
        yield dtype is BF16, lambda d=dtype: launch_swiglu(zeros(64, 512, dtype=d))
        codes, scale = empty_codes(zeros(64, 512), "e4m3", "1x128")
        yield dtype is BF16, lambda d=dtype, c=codes, s=scale: launch_restore_8bit(c, s, d)
        yield dtype is BF16, lambda d=dtype: launch_swiglu_backward(zeros(64, 256, dtype=d), zeros(64, 512, dtype=d))
    for dy in (None, zeros(64, 256)):
        yield True, lambda dy=dy: launch_swiglu_delayed_scale(zeros(64, 512), dy, zeros(1, dtype=FP32), "e4m3", False)
    for fmt in FORMATS:
        for r in SINGLE:
            for width in (336, 4864, 8192):
                some = width == 336 and (fmt, r) in (("int8", STOCHASTIC), ("e4m3", NEAREST))
                yield some, lambda f=fmt, r=r, w=width: launch_quantize_swiglu_rowwise(zeros(64, 2 * w), f, r)
                yield (
                    some,
                    lambda f=fmt, r=r, w=width: launch_quantize_swiglu_backward(
                        zeros(64, 2 * w), zeros(64, w), zeros(w, dtype=torch.int32), f, r
                    ),
                )


def norms() -> Iterator[Case]:
    for dtype in (BF16, FP32):
        for width in (896, 3584, 16384):
            x, weight = zeros(64, width, dtype=dtype), zeros(width, dtype=dtype)
            for centered in (False, True):
                yield (
                    dtype is BF16 and width == 896,
                    lambda x=x, w=weight, c=centered: launch_residual_norm_backward(x, x, x, w, 1e-6, c),
                )
        for heads, kv_heads, head_dim in ((32, 4, 128), (6, 3, 96)):
            qkv, weight = zeros(2, 64, (heads + 2 * kv_heads) * head_dim, dtype=dtype), zeros(head_dim, dtype=dtype)
            table = zeros(64, 1, head_dim // 2, dtype=FP32)
            shared = (qkv, weight, weight, table, table)
            dq, dk, dv = (zeros(2, 64, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
            some = dtype is BF16 and heads == 32
            yield some, lambda s=shared, h=heads: launch_qk_norm_rope(*s, h, 1e-6)
            yield some, lambda s=shared, g=(dq, dk, dv): launch_qk_norm_rope_backward(*g, *s, 1e-6)
            yield some, lambda x=qkv, t=table, h=heads, d=head_dim: launch_qkv_rope(x, t, t, h, d)
            yield some, lambda t=table, g=(dq, dk, dv): launch_qkv_rope_backward(*g, t, t)


def gemms() -> Iterator[Case]:
    has_fp8 = capabilities.has_fp8(torch.device("cpu"))
    dtypes = [(INT8, INT8), *([(E4M3, E4M3), (E5M2, E4M3)] if has_fp8 else [])]  # as in `scaled_mm_names`
    names = list(scaled_mm.TILINGS)
    for number, (name, a, b) in enumerate((name, *pair) for name in names for pair in dtypes):
        t = scaled_mm.TILINGS[name]
        m, n, k = (1152, 896, 16384) if t.split else (512, 512, 512)
        scale, out = zeros(m if number % 2 else 1, dtype=FP32), zeros(m, n, dtype=FP32 if number % 3 == 0 else BF16)
        some = name == names[0] or (t.split and t.subtiles == 4 and a is not E5M2)
        yield some, lambda t=t, a=a, b=b, n=n, k=k, s=scale, out=out, i=number: scaled_mm.launch_scaled_mm(
            zeros(len(out), k, dtype=a), zeros(n, k, dtype=b), s, zeros(n, dtype=FP32), out, t,
            bias=zeros(n) if i % 2 else None, fast_accum=i % 2 == 0,
        )  # fmt: skip
    for number, t in enumerate(low_rank_mm.TILINGS.values()):
        (a, b), rank = dtypes[number % len(dtypes)], 16 if t.stages == 4 else 48
        x, y, scale = zeros(512, 512, dtype=a), zeros(512, 512, dtype=b), zeros(512, dtype=FP32)
        yield (
            False,
            lambda t=t, x=x, y=y, s=scale, r=rank: launch_persistent_mm(
                x, y, zeros(512, 512), t, (s, s), low_rank=(zeros(512, r), zeros(512, r))
            ),
        )
    for number, t in enumerate(add_scaled_mm.TILINGS.values()):
        a, b = dtypes[number % len(dtypes)]
        x, y, scale = zeros(512, 512, dtype=a), zeros(512, 512, dtype=b), zeros(512 if number % 2 else 1, dtype=FP32)
        yield (
            number == 0,
            lambda t=t, x=x, y=y, s=scale: launch_persistent_mm(x, y, zeros(512, 512), t, (s, s), add=True),
        )
    for number, t in enumerate(int8_mm.TILINGS.values()):
        x = zeros(512, 512, dtype=INT8)
        yield number == 0, lambda t=t, x=x: int8_mm.launch_int8_mm(x, x, t)
    for number, t in enumerate(float_mm.TILINGS.values()):
        x = zeros(512, 512, dtype=torch.float16)
        yield number == 0, lambda t=t, x=x: float_mm.launch_fp16_mm(x, x, t)
    for number, t in enumerate(int4_mm.FUSED.values()):
        x, scale = zeros(512, 512, dtype=torch.uint8), zeros(512, dtype=FP32)
        yield number == 1, lambda t=t, x=x: int4_mm.launch_int4_mm(x, x, None, torch.int32, t)
        yield False, lambda t=t, x=x, s=scale: int4_mm.launch_int4_mm(x, x, (s, s), BF16, t)
    yield True, lambda: int4_mm.launch_unpack_halves(zeros(64, 512, dtype=torch.uint8))
    # Small tiles are multiplied by `mma` everywhere; larger ones where there are INT4 cores.
    cores = list(int4_cores.CORES.values()) if capabilities.has_int4(torch.device("cpu")) else []
    x, scale = zeros(640, 512, dtype=torch.uint8), zeros(640, dtype=FP32)
    for t in (Tiling(32, 64, 64, 2, 3), *cores):
        yield False, lambda t=t, x=x: int4_cores.launch_int4_cores_mm(x, x, None, torch.int32, t)
        yield False, lambda t=t, x=x, s=scale: int4_cores.launch_int4_cores_mm(x, x, (s, s), BF16, t)
    for number, t in enumerate(blockwise_mm.TILINGS.values()):
        for a, b in dtypes:
            for blocks in [("1x128", "128x128"), ("1x128", "1x128"), *([("32x32", "32x32")] if a is INT8 else [])]:
                x, y = zeros(512, 512, dtype=a), zeros(512, 512, dtype=b)
                scales = [zeros(512 // rows, 512 // k, dtype=FP32) for rows, k in map(blockwise_mm.BLOCKS.get, blocks)]
                yield (
                    number == 0 and blocks[1] != "1x128",
                    lambda t=t, x=x, y=y, s=scales, blocks=blocks: (
                        blockwise_mm.launch_blockwise_mm(x, y, *s, *blocks, zeros(512, 512), t, zeros(512))
                    ),
                )
    if capabilities.has_wgmma(torch.device("cuda")):
        yield from wgmmas()
        yield from scaled_wgmmas()
    yield True, lambda: launch_transpose_8bit(zeros(256, 512, dtype=INT8))


def wgmmas() -> Iterator[Case]:
    for tiling in WGMMA_TILINGS.values():
        for dtype in (E4M3, E5M2):
            for grouped in ("", "rows", "sums"):
                for vector_b in {"": (True, False), "rows": (False,), "sums": (True, False)}[grouped]:
                    a, b, scale = zeros(512, 512, dtype=dtype), zeros(512, 512, dtype=E4M3), zeros(4, 512, dtype=FP32)
                    pointers = (STARTS, STARTS) if grouped else (None, None)
                    sizes = (512, 512, 512, 3)
                    yield (
                        dtype is E4M3 and vector_b,
                        lambda t=tiling, a=a, b=b, s=scale, z=sizes, v=vector_b, g=grouped, p=pointers: (
                            launch_blockwise_wgmma(
                                a, b, s.t(), s.t(), zeros(3 * 512, 512), t, z, v, grouped=WgmmaGroups(g, *p),
                                bias=None if g else zeros(512),
                            )
                        ),
                    )  # fmt: skip


GROUPED = BlockGroups(zeros(4, dtype=torch.int32), 3)
STARTS = zeros(4, dtype=torch.int32)


def scaled_wgmmas() -> Iterator[Case]:
    for dtypes, rank, rows in product(((E4M3, E4M3), (E5M2, E4M3), (INT8, INT8)), (0, 16, 48), (True, False)):
        a, b = (zeros(256, 512, dtype=dtype) for dtype in dtypes)
        scale, t = zeros(256 if rows else 1, dtype=FP32), list((LOW_RANK_TILINGS if rank else SCALED_TILINGS).values())
        factors, bias = (zeros(256, rank), zeros(256, rank)) if rank else None, zeros(256) if rows else None
        yield (
            dtypes[0] is E4M3 and rows,
            lambda a=a, b=b, s=scale, t=t[-1], f=factors, bias=bias: launch_scaled_wgmma(
                a, b, s, s, zeros(256, 256), t, bias=bias, low_rank=f
            ),
        )
        if not rank:
            yield (
                dtypes[0] is E4M3 and not rows,
                lambda a=a, b=b, s=scale, t=t[0]: launch_scaled_wgmma(a, b, s, s, zeros(256, 256), t, add=True),
            )


def grouped() -> Iterator[Case]:
    """Rows in three groups, 512 in all."""
    for fmt in FORMATS:
        for number, r in enumerate(SINGLE):
            some = (fmt, number) in (("e4m3", 0), ("int8", 1))
            x = zeros(512, 144)
            yield some, lambda f=fmt, r=r, x=x: launch_dual_bf16x2(x, f, "rowwise", r, groups=GROUPED)
            yield False, lambda f=fmt, r=r, x=x: launch_tiled(x, f, "rowwise", "rowwise", r, groups=GROUPED)
            yield (
                some and fmt == "int8",
                lambda f=fmt, r=r: launch_quantize_swiglu_rowwise(zeros(512, 2 * 336), f, r, groups=GROUPED),
            )
            amax = zeros(3 * 336, dtype=torch.int32)
            yield (
                some and fmt == "e4m3",
                lambda f=fmt, r=r, a=amax: launch_quantize_swiglu_backward(
                    zeros(512, 2 * 336), zeros(512, 336), a, f, r, False, GROUPED, zeros(512, 3, dtype=FP32)
                ),
            )
    yield True, lambda: launch_absmax(zeros(512, 144, dtype=FP32), columns=True, groups=GROUPED)

    has_fp8 = capabilities.has_fp8(torch.device("cpu"))
    dtypes = [INT8, *([E4M3] if has_fp8 else []), BF16]
    for dtype in dtypes:
        module = grouped_plain_mm if dtype is BF16 else grouped_mm
        for number, t in enumerate(module.ROWS_TILINGS.values()):
            x, scales = zeros(512, 512, dtype=dtype), (zeros(512, dtype=FP32), zeros(3 * 512, dtype=FP32))
            for b in (zeros(3 * 512, 512, dtype=dtype), zeros(512, 3 * 512, dtype=dtype)):
                b = matrices(b.view(512, -1).t() if dtype is BF16 and len(b) == 512 else b, 512, 3)
                yield (
                    number == 0,
                    lambda t=t, x=x, b=b, s=None if dtype is BF16 else scales: launch_m_grouped(
                        x, b, zeros(512, 512), t, GROUPED.group_of_block, STARTS, s
                    ),
                )
        for number, t in enumerate(module.SUMS_TILINGS.values()):
            scale = zeros(3 * 512, dtype=FP32)
            out = zeros(3, 512, 512, dtype=FP32 if t.subtiles == 4 else BF16)
            yield (
                number == 0,
                lambda t=t, x=x, o=out, s=None if dtype is BF16 else (scale, scale): launch_k_grouped(
                    x.t() if s is None else x, x, o, t, STARTS, s
                ),
            )
    x, scale = zeros(512, 512, dtype=INT8), zeros(1, dtype=FP32)
    yield True, lambda: launch_long_sums(x, x, zeros(3, 512, 512), STARTS, (scale, scale))
    for number, t in enumerate(blockwise_mm.TILINGS.values()):
        for dtype in dtypes[:-1]:
            x, w = zeros(512, 512, dtype=dtype), zeros(3, 512, 512, dtype=dtype)
            for blocks in [("1x128", "128x128"), ("1x128", "1x128"), *([("32x32", "32x32")] if dtype is INT8 else [])]:
                shapes = [(512 // rows, 512 // k) for rows, k in map(blockwise_mm.BLOCKS.get, blocks)]
                scales = [zeros(*shape, dtype=FP32) for shape in shapes]
                some = number == 0 and blocks[1] != "1x128"
                yield (
                    some,
                    lambda t=t, x=x, w=w, s=scales, blocks=blocks: launch_grouped_rows_blockwise(
                        x, w, s[0], s[1].expand(3, -1, -1), *blocks, zeros(512, 512), t, GROUPED.group_of_block, STARTS
                    ),
                )
                some = number == 0 and blocks[1] == "1x128"
                yield (
                    some,
                    lambda t=t, x=x, s=scales, blocks=blocks: launch_grouped_sums_blockwise(
                        x, x, *s, *blocks, zeros(3, 512, 512), t, STARTS
                    ),
                )
    yield True, lambda: launch_unpack_int4(zeros(64, 512, dtype=torch.uint8))
    yield True, lambda: launch_zero_tail(zeros(512, 512), GROUPED.group_of_block)
    yield True, lambda: launch_zero_empty(zeros(3, 512, 512), STARTS)

    for groups in (8, 128, 256):
        yield groups == 128, lambda n=groups: launch_group_rows(zeros(64, 4, dtype=torch.int64), n)
    for experts, best in ((8, 2), (128, 8), (160, 6), (256, 8)):
        yield experts == 128, lambda n=experts, k=best: launch_topk(zeros(64, n, dtype=FP32), k)
    rows, weights = zeros(64, 4, dtype=torch.int32), zeros(64, 4, dtype=FP32)
    for dtype in (BF16, FP32):
        y = zeros(512, 768, dtype=dtype)
        for w in (weights, None):
            some = dtype is BF16 and w is not None
            of_row = None if w is None else zeros(512, dtype=FP32)
            tokens = zeros(512, dtype=torch.int32)
            yield some, lambda y=y, t=tokens, w=of_row: launch_gather_rows(y, t, w)
            yield some, lambda y=y, w=w: launch_combine_rows(y, w, rows)
    yield True, lambda: launch_route_weight_grad(zeros(512, 6, dtype=FP32), weights, rows)
    yield False, lambda: launch_swiglu_backward(zeros(512, 768), zeros(512, 2 * 768), zeros(512, 6, dtype=FP32))
    codes, scales = zeros(512, 768, dtype=torch.int8), zeros(512, 1, dtype=FP32)
    tokens = zeros(512, dtype=torch.int32)
    yield True, lambda: launch_gather_rows(codes, tokens)  # tokens that travel as codes
    yield False, lambda: launch_gather_rows(scales, tokens)
    yield True, lambda: launch_gather_dual(codes, tokens, GROUPED.group_of_block)
    scale, amax, gate_up = zeros(1, dtype=FP32), zeros(1, dtype=torch.int32), zeros(512, 2 * 768)
    for dy in (None, zeros(512, 768)):  # blocks of no group are left out
        yield dy is None, lambda dy=dy: launch_dual_bf16x2(
            gate_up, "e4m3", "tensorwise", NEAREST, False, scale, amax, swiglu=True, dy=dy,
            held=GROUPED.group_of_block,
        )  # fmt: skip


def convolutions() -> Iterator[Case]:
    """3x3 with padding and a stride of 2; both of an input's passes have more than one tap."""
    shape = ConvShape(32, 128, 64, 14, 7, 3, 2, 1, 1, 14, 7, 3, 2, 1, 1)
    passes = (shape.height.forward(), shape.width.forward())
    dtypes = [(INT8, INT8), *([(E4M3, E4M3), (E5M2, E4M3)] if capabilities.has_fp8(torch.device("cpu")) else [])]
    for number, (t, (a, b)) in enumerate((t, pair) for t in gather_mm.TILINGS.values() for pair in dtypes):
        scale = zeros(32 if number % 2 else 1, dtype=FP32)
        yield number < 2, lambda t=t, a=a, b=b, s=scale, i=number: gather_mm.launch_gather_mm(
            zeros(32, 14, 14, 128, dtype=a), zeros(64, 3, 3, 128, dtype=b), s, zeros(64, dtype=FP32),
            zeros(32, 7, 7, 64), passes, t, bias=zeros(64) if i % 2 else None, fast_accum=i % 2 == 0,
        )  # fmt: skip
    one = zeros(1, dtype=FP32)
    for number, (t, (a, b)) in enumerate((t, pair) for t in grad_weight.TILINGS.values() for pair in dtypes):
        yield (
            number == 1,
            lambda t=t, a=a, b=b: grad_weight.launch_conv_grad_weight(
                zeros(7 * 7 * 64, 32, dtype=a), zeros(14 * 14 * 128, 32, dtype=b), one, one, list(shape), BF16, t
            ),
        )


def updates() -> Iterator[Case]:
    def step(rule: str, formats: tuple[str, ...], weight: str, shape: tuple[int, int], amax: bool = False) -> None:
        value, states = zeros(*shape, dtype=FP32 if weight == "fp32" else BF16), []
        for signed, name in zip(SIGNED_STATES[rule], formats, strict=True):
            fitted = state_format(name, signed=signed, block=128 if name in BLOCKS else None).fitted(value.shape)
            states.append((fitted, zero_state(fitted, value.shape, value.device)))
        stored = StoredWeight.from_value(value, weight) if weight in ("int8", "int4") else value
        master = value.float() if weight == "master" else None
        slot = Slot(stored, tuple(states), master=master, amax=WeightAmax([value], value.device) if amax else None)
        FusedUpdate(rule, [slot], kernel=True).step([value], torch.ones(()))

    states = [("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("int4", "int4")]
    rules = [("adamw", pair) for pair in [*states, ("bf16", "int8")]]
    rules += [("lion", (name,)) for name in ("fp32", "fp8", "int8", "int4")]
    rules += [("sgd", ("bf16",)), ("sgd_nesterov", ("fp8",)), ("apply", ())]
    for rule, formats in rules:
        for weight in ("fp32", "bf16", "master", "int8", "int4") if rule == "adamw" else ("bf16",):
            for shape in ((64, 512), (5, 33)):
                chosen = [("adamw", "fp8", "bf16", 64), ("adamw", "fp8", "int4", 5), ("adamw", "int4", "int8", 64),
                          ("sgd_nesterov", "fp8", "bf16", 5), ("lion", "int8", "bf16", 64)]  # fmt: skip
                some = (rule, (*formats, "")[0], weight, shape[0]) in chosen
                yield some, lambda r=rule, f=formats, w=weight, s=shape: step(r, f, w, s)
                if weight in ("bf16", "master"):
                    some = (formats, weight, shape[0]) == (("int8", "int8"), "bf16", 64)
                    yield some, lambda r=rule, f=formats, w=weight, s=shape: step(r, f, w, s, amax=True)
    for dtype in (BF16, FP32):
        labels = zeros(16, dtype=torch.int64)
        yield dtype is BF16, lambda d=dtype, y=labels: launch_cross_entropy(zeros(16, 1000, dtype=d), y, 0.0, True)
        yield False, lambda d=dtype, y=labels: launch_cross_entropy(zeros(16, 151936, dtype=d), y, 1e-4, False)
        for width in (151936, 61):
            yield (
                dtype is BF16 and width == 61,
                lambda d=dtype, y=labels, w=width: launch_cross_entropy_statistics(zeros(16, w, dtype=d), y, 1e-4),
            )
        for width, grad in ((1000, True), (151936, False)):
            yield (
                dtype is BF16 and grad,
                lambda d=dtype, y=labels, w=width, g=grad: launch_distilled_cross_entropy(
                    zeros(16, w, dtype=d), zeros(16, w, dtype=d), y, 1e-4, 0.5, 2.0, g
                ),
            )


def softmax_grads() -> Iterator[Case]:
    for fmt in ("e4m3", "e5m2"):
        for m, k in ((256, 512), (48, 1008)):
            source = logits_of(m, k)
            scale, amax = zeros(1, dtype=FP32), zeros(1, dtype=torch.int32)
            yield fmt == "e4m3", lambda x=source, f=fmt, s=scale: launch_softmax_grad_scale(*x, s, f, False)
            for columns in (True, False):
                yield (
                    fmt == "e4m3" and columns,
                    lambda x=source, f=fmt, s=scale, a=amax, c=columns: launch_quantize_softmax_grad(*x, f, s, a, c),
                )
    stochastic = Rounding(zeros(3, dtype=torch.int64), 1)
    # Under scales of rows and of blocks.
    for pair in GRADIENT_PAIRS:
        for fmt, rounding, m, k in (("int8", stochastic, 256, 512), ("e4m3", NEAREST, 48, 1008)):
            source = logits_of(m, k)
            yield (
                (fmt, pair[0]) == ("int8", "rowwise"),
                lambda x=source, f=fmt, p=pair, r=rounding: launch_dual_bf16x2(
                    x[0], f, p[0], r, granularity_t=p[1], logit_rows=LogitRows(*x[1:])
                ),
            )


def logits_of(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """With the sums of their rows, labels and a z-loss."""
    return zeros(m, k), zeros(m, dtype=FP32), zeros(m, dtype=torch.int64), 1e-4


def frozen_weights() -> Iterator[Case]:
    for transposed in (False, True):
        for fmt in ("e4m3", "int8"):
            yield (
                fmt == "e4m3",
                lambda f=fmt, t=transposed: launch_nf4_to_8bit(
                    zeros(64, 250, dtype=torch.uint8), zeros(64, 8, dtype=FP32), 500, f, t
                ),
            )


def decode() -> Iterator[Case]:
    weights = [Weight(zeros(512, 1024)), *(
        Weight(*empty_codes(zeros(512, 1024), fmt, granularity), fmt, granularity)
        for fmt, granularity in (
            ("int8", "rowwise"), ("e4m3", "128x128"), ("e4m3", "1x32"), ("int4", "1x32"), ("ternary", "tensorwise")
        )
        if fmt != "e4m3" or capabilities.has_fp8(torch.device("cpu"))
    )]  # fmt: skip
    for weight in weights:
        for swiglu in (False, True):
            for m, names in ((1, GEMV), (2, TILES), (64, TILES)):
                width = 256 if swiglu else 512
                fused = Fused(zeros(1024), 1e-6, zeros(512), swiglu, zeros(m, width))
                for number, name in enumerate(names):
                    if m > 1 and swiglu and TILES[name].per_sm:
                        continue
                    some = number == 0 and m < 64 and swiglu and weight.fmt in ("int4", "int8")
                    yield some, lambda m=m, w=weight, f=fused, n=name: launch_weight_only_mm(zeros(m, 1024), w, f, n)
    for fmt, granularity in product(FORMATS, ("rowwise", "1x128")):
        yield False, lambda f=fmt, g=granularity: launch_quantize_normed(zeros(2, 1024), zeros(1024), 1e-6, f, g)
    yield False, lambda: launch_normed(zeros(2, 1024), zeros(1024), 1e-6)
    for kv_heads, group, d, norm in ((4, 7, 128, False), (2, 1, 64, True)):
        cache, tables = zeros(2, kv_heads, 512, d), (zeros(512, d // 2, dtype=FP32),) * 2
        heads = Heads(0.1, 0, *((zeros(d),) * 2 if norm else (None, None)), 1e-6)
        yield (
            norm,
            lambda c=cache, t=tables, h=heads, width=(group + 2) * kv_heads * d: launch_cached_attention(
                zeros(2, width), c, c, zeros(2, dtype=torch.int64), *t, h
            ),
        )


def adapters() -> Iterator[Case]:
    for dtype in (INT8, *((E4M3, E5M2) if capabilities.has_fp8(torch.device("cpu")) else ())):
        for rank, scale in ((16, zeros(512, dtype=FP32)), (80, zeros(1, dtype=FP32))):
            codes, left, right = zeros(512, 2048, dtype=dtype), zeros(512, rank), zeros(rank, 2048).t()
            some = rank == 16 and dtype is INT8
            yield some, lambda c=codes, s=scale, r=right: launch_codes_mm(c, s, r)
            yield some, lambda c=codes, s=scale, t=left: launch_codes_grad_mm(c, s, t)
    for fmt in FORMATS:
        codes, scale = empty_codes(zeros(640, 512), fmt, "rowwise")
        yield fmt == "e4m3", lambda c=codes, s=scale, f=fmt: launch_transpose_rowwise(c, s, f)
    for fmt, r, width in product(FORMATS, SINGLE, (336, 4864, 18944)):
        some = width == 336 and (fmt, r) in (("int8", STOCHASTIC), ("e4m3", NEAREST))
        yield some, lambda f=fmt, r=r, w=width: launch_swiglu_gradient_rows(zeros(64, 2 * w), zeros(64, w), f, r)


def attention() -> Iterator[Case]:
    """Either pass, which `has_wgmma` asks for; of all keys, and of documents."""
    if not capabilities.has_wgmma(torch.device("cuda")):
        return
    documents = VisibleKeys(zeros(1, 128, dtype=torch.int32), zeros(1, 128, dtype=torch.int32))
    for dim, visible in product(KEYS_TILINGS, (None, documents)):
        q, k, lse = zeros(1, 128, 4, dim), zeros(1, 128, 2, dim), zeros(1, 4, 128, dtype=FP32)
        yield True, lambda q=q, k=k, s=visible: launch_forward(q, k, k, 0.1, s)
        yield True, lambda q=q, k=k, x=lse, s=visible: launch_queries(q, q, k, k, q, x, 0.1, s)
        yield True, lambda q=q, k=k, x=lse, s=visible: launch_keys(q, q, k, k, x, x, 0.1, s)
    for dim in KEYS_TILINGS:
        q, k, v = zeros(2, 257, 3, 4, dim).unbind(2)
        lse = zeros(2, 4, padded(257), dtype=FP32)
        yield True, lambda q=q, k=k, v=v: launch_forward(q, k, v, 0.1, causal=False)
        yield True, lambda q=q, k=k, v=v, x=lse: launch_queries(q, q, k, v, q, x, 0.1, causal=False, out=q)
        yield True, lambda q=q, k=k, v=v, x=lse: launch_keys(q, q, k, v, x, x, 0.1, causal=False, out=(k, v))


GROUPS = (
    elementwise, decode, quantizers, dual_quantizers, gathered_rows, softmax_grads, swiglus, norms, gemms, grouped,
    convolutions, updates, frozen_weights, adapters, attention,
)  # fmt: skip
TUNED = {
    "_gemv_kernel",
    "_tile_kernel",
    "_persistent_mm_kernel",
    "_scaled_wgmma_kernel",
    "_slice_kernel",
    "_sum_slices_kernel",
    "_int4_mm_kernel",
    "_int4_cores_kernel",
    "_blockwise_mm_kernel",
    "_m_grouped_kernel",
    "_k_grouped_kernel",
    "_m_grouped_blockwise_kernel",
    "_k_grouped_blockwise_kernel",
    "_conv_gather_kernel",
    "_conv_grad_weight_kernel",
}
"""Kernels whose configurations are timed, where one without enough shared memory loses: one that fits is enough."""


# ---- the compiler ----------------------------------------------------------------------------------------------------


class _Driver:
    """Stands for the driver of a GPU: all that a launch asks before it compiles."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # kernels are cached per device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def compile_for(arch: int, chosen: Callable[[int | None], bool] | None, *, once: bool = False) -> dict[str, object]:
    """chosen: of a case's number in the sample, None outside it; None: every case. once: compiles each kernel for one
    case only.

    Returns {"kernels": names, "compiled": count, "failures": lines}.
    """
    shared: dict[str, list[int]] = {}
    failures: list[str] = []

    def compile_instead(kernel: JITFunction, grid: object) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            if once and kernel.__name__ in shared:
                return
            sizes = shared.setdefault(kernel.__name__, [])
            try:
                sizes.append(kernel.run(*args, grid=grid, warmup=True, **options).metadata.shared)
            except Exception as error:
                failures.append(f"sm_{arch} {kernel.__name__}: {str(error).strip().splitlines()[-1]}")

        return launch

    driver.set_active(_Driver(arch))
    JITFunction.__getitem__ = compile_instead
    capabilities.compute_capability = lambda device: divmod(arch, 10)
    encoding.cache_clear()
    numbers = count()
    for sampled, call in (case for group in GROUPS for case in group()):
        if chosen is None or chosen(next(numbers) if sampled else None):
            call()
    for name, sizes in shared.items():
        if name in TUNED and chosen is not None:
            continue  # the tiling that fits may not be in the sample
        least = min(sizes, default=0) if name in TUNED else max(sizes, default=0)
        if least > ARCHITECTURES[arch]:
            failures.append(f"sm_{arch} {name}: {least} bytes of shared memory")
    return {"kernels": sorted(shared), "compiled": sum(map(len, shared.values())), "failures": failures}


def main(architectures: list[int]) -> dict[int, dict[str, object]]:
    if architectures:
        return {arch: compile_for(arch, None) for arch in architectures}
    others = [arch for arch in ARCHITECTURES if arch != QUICK]
    cycle = SHARE * len(others)
    found = {
        arch: compile_for(arch, lambda number, first=SHARE * turn: number is not None and number % cycle == first)
        for turn, arch in enumerate(others)
    }
    quick = compile_for(QUICK, lambda number: number is not None and number % QUICK_SHARE == 0, once=True)
    return {QUICK: quick, **found}


if __name__ == "__main__":
    results = main([int(arch) for arch in sys.argv[1:]])
    for result in results.values():
        print(*result["failures"], sep="\n", end="\n" if result["failures"] else "")
    print(json.dumps(results))
