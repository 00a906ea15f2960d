"""The rows of the matmul table: every way to multiply A [M, K] by B [N, K]ᵀ. Importing registers them.

Each row declares its problem's layouts, makes codes and scales (not timed), and returns the call to time with the check
of its result. The tolerance follows from the accumulation: fp32 sums, sums of bf16 partial sums, or FP8 tensor cores.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtrain.bench.case import Case, Row, UnavailableError, check_product
from qtrain.bench.matmuls import (
    BF16,
    BF16_SUM,
    FP8_SUM,
    FP32_SUM,
    K_MAJOR_ONLY,
    ROWS,
    Problem,
    coded_pair,
    encoded,
    need_blackwell,
    need_capability,
    need_family,
    need_gpu,
    row,
)
from qtrain.core.hardware.capabilities import FP8_CAPABILITY
from qtrain.kernels.gemm.bf16_mm import bf16_mm
from qtrain.kernels.gemm.blockwise_mm import blockwise_mm, blockwise_mm_names
from qtrain.kernels.gemm.float_mm import STEP_K, fp16_mm
from qtrain.kernels.gemm.int4_mm import int4_mm, scaled_int4_mm
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K, int8_mm
from qtrain.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_names
from qtrain.kernels.numerics.formats import E2M1_VALUES, dequantize_mx
from qtrain.kernels.quantize.mx import mx_mm, quantize_mx, tiled_scale
from qtrain.kernels.quantize.operators import quantize

FAMILIES = {"cuBLAS": "cublas", "Triton": "triton", "qtrain": None}
"""Name in the table -> family of implementations; None: the dispatch, which takes the fastest."""

# ---- other libraries: Inductor's and torchao's Triton kernels --------------------------------------------------------


def _compiled(function: Callable[..., Tensor], p: Problem) -> Callable[..., Tensor]:
    """The function compiled with Inductor's own Triton GEMM, the best of its configurations."""
    if p.device.type != "cuda":
        raise UnavailableError("Inductor has Triton kernels on a GPU only")
    torch.compiler.reset()  # every shape is compiled for itself, and their number is limited
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@row("FP8 Inductor, rowwise", "fp8")
def fp8_inductor(p: Problem) -> Case:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        scales = scale_a[:, None], scale_b[None, :]
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16, use_fast_accum=True)

    p.only_k_major("Inductor takes FP8 operands K-major only")
    run = _compiled(product, p)
    return coded_pair(p, "e4m3", "rowwise", "rowwise").case(run, FP8_SUM)


@row("INT8 Inductor, rowwise", "int8")
def int8_inductor(p: Problem) -> Case:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return (torch._int_mm(a, b.t()) * scale_a[:, None] * scale_b[None, :]).to(BF16)

    run = _compiled(product, p)
    return coded_pair(p, "int8", "rowwise", "rowwise").case(run, FP32_SUM)


def _torchao(module: str, p: Problem) -> Any:
    """A module of torchao's prototypes."""
    try:
        found = importlib.import_module(f"torchao.prototype.{module}")
    except ImportError:
        raise UnavailableError("torchao is not installed: pip install torchao") from None
    need_gpu(p, "torchao's Triton kernels")
    return found


@row("INT8 torchao Triton, rowwise", "int8")
def int8_torchao(p: Problem) -> Case:
    scaled_int8_mm = _torchao("quantized_training.int8_mm", p).scaled_int8_mm
    operands = coded_pair(p, "int8", "rowwise", "rowwise")
    return operands.case(lambda a, b, s, t: scaled_int8_mm(a, b.t(), s, t), BF16_SUM)


def _torchao_blockwise(quantize_b: str, product: str, transposed: bool) -> Callable[[Problem], Case]:
    def prepare(p: Problem) -> Case:
        kernels = _torchao("blockwise_fp8_training.kernels", p)
        p.only_k_major("torchao's blockwise kernels have one layout for each product")
        x, w = p.normal()
        if transposed:  # its grad_weight takes dy [K, M] and x [K, N], and transposes dy
            a, scale_a = kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x.t().contiguous(), 128)
            b, scale_b = getattr(kernels, quantize_b)(w.t().contiguous(), 128)
        else:
            a, scale_a = kernels.triton_fp8_blockwise_act_quant_lhs(x, 128)
            b, scale_b = getattr(kernels, quantize_b)(w, 128)
        multiply = getattr(kernels, product)
        # Its scales have their own layouts, so it is checked against the unquantized product, with a wider tolerance.
        check = check_product(x.double, w.double, 2.0**-6)
        return Case((a, b, scale_a, scale_b), lambda a, b, s, t: multiply(a, b, s, t), check)

    return prepare


row("FP8 torchao Triton, 1x128 · 128x128", "fp8")(
    _torchao_blockwise("triton_fp8_blockwise_weight_quant_transposed_rhs", "triton_fp8_gemm_1x128_128x128", False)
)
row("FP8 torchao Triton, 1x128 · 128x1", "fp8")(
    _torchao_blockwise("triton_fp8_blockwise_act_quant_rhs", "triton_fp8_gemm_1x128_128x1", True)
)


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


def _bf16(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Problem], Case]:
    def prepare(p: Problem) -> Case:
        a, b = p.normal()
        return Case(p.stored(a, b), lambda a, b: multiply(a, b.t()), check_product(a.double, b.double, BF16_SUM))

    return prepare


row("BF16 cuBLAS", "bf16")(_bf16(torch.mm))
row("BF16 qtrain", "bf16")(_bf16(bf16_mm))


@row("FP16 Triton, FP16 accumulation", "bf16")
def fp16(p: Problem) -> Case:
    a, b = (x * p.k**-0.25 for x in p.normal(torch.float16))  # sums of order 1: FP16 overflows at 65,504
    # Rounding to fp16 after every STEP_K products: errors of a random walk, 2 standard deviations.
    accumulation = 2.0**-11 * (1 + 2 * (p.k / STEP_K) ** 0.5)
    return Case(p.stored(a, b), fp16_mm, check_product(a.double, b.double, accumulation))


# ---- scales in the epilogue ------------------------------------------------------------------------------------------


def _scaled(who: str, fmt: str, granularity: str, accumulation: float) -> Callable[[Problem], Case]:
    family = FAMILIES[who]

    def prepare(p: Problem) -> Case:
        if family == "cublas":
            p.only_k_major(K_MAJOR_ONLY)
        operands = coded_pair(p, fmt, granularity, granularity)
        need_family(scaled_mm_names(operands.a, operands.b, BF16), family, p)
        return operands.case(lambda a, b, s, t: scaled_mm(a, b, s, t, BF16), accumulation, family)

    return prepare


for _who in FAMILIES:
    for _granularity in ("tensorwise", "rowwise"):
        row(f"FP8 {_who}, {_granularity}", "fp8")(_scaled(_who, "e4m3", _granularity, FP8_SUM))
for _who in ("Triton", "qtrain"):
    row(f"INT8 {_who}, rowwise", "int8")(_scaled(_who, "int8", "rowwise", FP32_SUM))


@row("FP8 Triton, plain", "fp8")
def fp8_plain(p: Problem) -> Case:
    """Products of unscaled codes: one scale of 1."""
    need_capability("FP8", FP8_CAPABILITY, p.device)
    a, b = (x.to(torch.float8_e4m3fn) for x in p.normal())
    one = torch.ones(1, device=p.device)
    need_family(scaled_mm_names(a, b, BF16), "triton", p)
    check = check_product(a.double, b.double, FP8_SUM)
    return Case(p.stored(a, b), lambda a, b: scaled_mm(a, b, one, one, BF16), check, "triton")


@row("INT8 cuBLAS, plain", "int8")
def int8_cublas(p: Problem) -> Case:
    a, b = int8_codes(p)
    return Case(p.stored(a, b), lambda a, b: torch._int_mm(a, b.t()), check_product(a.double, b.double, 0.0))


@row("INT8 Triton, plain", "int8")
def int8_plain(p: Problem) -> Case:
    a, b = int8_codes(p)
    return Case(p.stored(a, b), int8_mm, check_product(a.double, b.double, 0.0), "triton")


def int8_codes(p: Problem) -> tuple[Tensor, Tensor]:
    if p.k > LONGEST_EXACT_K:
        raise UnavailableError(f"int32 holds sums of at most {LONGEST_EXACT_K:,} products")
    return tuple(quantize(x, "int8", "tensorwise")[0] for x in p.normal())


# ---- blockwise scales ------------------------------------------------------------------------------------------------


def _blockwise(who: str, fmt: str, block_a: str, block_b: str) -> Callable[[Problem], Case]:
    family, accumulation = FAMILIES[who], FP32_SUM if fmt == "int8" else FP8_SUM

    def prepare(p: Problem) -> Case:
        if family == "cublas":
            p.only_k_major(K_MAJOR_ONLY)
            # On a CPU the dispatch would run the reference under cuBLAS's name.
            need_gpu(p, "cuBLAS's blockwise products")
        operands = coded_pair(p, fmt, block_a, block_b)
        names = blockwise_mm_names(operands.a, operands.b, operands.scale_b, block_a, block_b, BF16)
        need_family(names, family, p)
        return operands.case(lambda a, b, s, t: blockwise_mm(a, b, s, t, block_a, block_b, BF16), accumulation, family)

    return prepare


for _block_b in ("128x128", "1x128"):
    for _who in FAMILIES:
        row(f"FP8 {_who}, 1x128 · {_block_b}", "fp8")(_blockwise(_who, "e4m3", "1x128", _block_b))
for _block_a, _block_b in (("1x128", "128x128"), ("1x128", "1x128"), ("32x32", "32x32")):
    row(f"INT8 Triton, {_block_a} · {_block_b}", "int8")(_blockwise("Triton", "int8", _block_a, _block_b))


# ---- 4 bits, and formats native to newer GPUs ------------------------------------------------------------------------

PACKED = "INT4 is packed along K: there is one layout"


@row("INT4 Triton, packed, plain", "int8")
def int4_plain(p: Problem) -> Case:
    p.only_k_major(PACKED)
    operands, one = coded_pair(p, "int4", "tensorwise", "tensorwise"), torch.ones(1, device=p.device)
    codes = operands.a, operands.b  # uint8 [M, K / 2], [N, K / 2]: two codes per byte
    a, b = ((lambda c=c: encoded(c, one, "int4", "tensorwise", p.k)) for c in codes)
    check = check_product(a, b, 0.0)
    return Case(codes, lambda a, b: int4_mm(a, b, p.k), check, "triton")


@row("INT4 Triton, packed, rowwise", "int8")
def int4_scaled(p: Problem) -> Case:
    p.only_k_major(PACKED)
    operands = coded_pair(p, "int4", "rowwise", "rowwise")
    return operands.case(lambda a, b, s, t: scaled_int4_mm(a, b, s, t, p.k, BF16), FP32_SUM, "triton")


@row("MXFP8 cuBLAS, 1x32", "mxfp8")
def mxfp8(p: Problem) -> Case:
    need_blackwell(p, "MXFP8")
    x, w = p.normal()
    (a, scale_a), (b, scale_b) = quantize_mx(x), quantize_mx(w)
    check = check_product(
        lambda: dequantize_mx(a, scale_a, torch.float64), lambda: dequantize_mx(b, scale_b, torch.float64), BF16_SUM
    )
    return Case((a, b, scale_a, scale_b), lambda a, b, s, t: mx_mm(a, b, s, t, BF16), check)


@row("NVFP4 cuBLAS, 1x16", "fp4")
def nvfp4(p: Problem) -> Case:
    """Random codes, two per byte, with an e4m3 scale per 16."""
    need_blackwell(p, "NVFP4")
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    generator = torch.Generator(p.device).manual_seed(0)
    table = torch.tensor(E2M1_VALUES, device=p.device)
    codes, scales, truth = [], [], []
    for rows in (p.m, p.n):
        # uint8 [rows, K / 2], low nibble first; scale e4m3 [rows, K / 16]
        packed = torch.randint(0, 256, (rows, p.k // 2), dtype=torch.uint8, device=p.device, generator=generator)
        scale = torch.rand(rows, p.k // 16, device=p.device, generator=generator).add(0.5).to(torch.float8_e4m3fn)
        # fp32 [rows, K]
        value = table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()]
        codes.append(packed)
        scales.append(tiled_scale(scale))  # in the 128 x 4 tiles that the tensor cores read
        truth.append(value * scale.float().repeat_interleave(16, 1))
    recipe, swizzle = ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4

    def run(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2).t()
        return scaled_mm(a, b, s, recipe, t, recipe, swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=BF16)

    return Case((*codes, *scales), run, check_product(truth[0].double, truth[1].double, BF16_SUM))


_FORMATS = ("BF16", "FP16", "FP8", "INT8", "INT4", "MXFP8", "NVFP4")
_SCALES = ("tensorwise", "rowwise", "plain")


def _place(r: Row[Problem]) -> tuple[int, int]:
    """Rows of one format are together, and of these the ones with the same scales."""
    scales = r.name.rpartition(", ")[2]
    return _FORMATS.index(r.name.split()[0]), _SCALES.index(scales) if scales in _SCALES else len(_SCALES)


# Stable: rows of one place stay in the order in which they were registered.
ROWS.sort(key=_place)
