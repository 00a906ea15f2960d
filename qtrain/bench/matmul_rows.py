"""Every way there is to multiply A [M, K] by B [N, K]ᵀ, each a row of the matmul table; importing registers them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.bench.case import Case, UnavailableError, check_product
from qtrain.bench.matmuls import BF16, ROWS, Problem, row
from qtrain.hardware import FP8_CAPABILITY, MX_CAPABILITY
from qtrain.kernels.gemm.blockwise_mm import blockwise_mm, blockwise_mm_names
from qtrain.kernels.gemm.fp16_mm import STEP_K, fp16_mm
from qtrain.kernels.gemm.int4_mm import int4_mm, scaled_int4_mm
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K, int8_mm
from qtrain.kernels.gemm.mx_mm import mx_mm, tiled_scale
from qtrain.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_names
from qtrain.kernels.numerics.dequantize import dequantize, dequantize_mx
from qtrain.kernels.quantize.mx import quantize_mx
from qtrain.kernels.quantize.operators import quantize

FAMILIES = {"cuBLAS": "cublas", "Triton": "triton", "qtrain": None}
"""Who multiplies: one family of implementations, or the dispatch, which takes the fastest."""
FP32_SUM, BF16_SUM, FP8_SUM = 2.0**-20, 2.0**-12, 2.0**-10
"""Error of a sum over the sum of magnitudes: in fp32; with pieces of K added in bf16; in FP8 tensor cores, which keep
some 13 bits below the largest product."""


@dataclass(frozen=True)
class Quantized:
    """Both operands in codes, laid out as the problem says, with scales; and what they stand for."""

    a: Tensor
    scale_a: Tensor
    b: Tensor
    scale_b: Tensor
    values: tuple[Callable[[], Tensor], Callable[[], Tensor]]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.a, self.b, self.scale_a, self.scale_b


def quantized(p: Problem, fmt: str, granularity_a: str, granularity_b: str) -> Quantized:
    """Random operands in a format, each at its granularity."""
    if fmt == "e4m3":
        p.need_capability("FP8", FP8_CAPABILITY)
    pairs = []
    for x, granularity in zip(p.normal(), (granularity_a, granularity_b), strict=True):
        codes, scale = quantize(x, fmt, granularity)
        pairs.append((codes, scale, lambda c=codes, s=scale, g=granularity: values(c, s, fmt, g, p.k)))
    (a, scale_a, values_a), (b, scale_b, values_b) = pairs
    return Quantized(*_interleave(p.stored(a, b), (scale_a, scale_b)), (values_a, values_b))


def _interleave(codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return codes[0], scales[0], codes[1], scales[1]


def values(codes: Tensor, scale: Tensor, fmt: str, granularity: str, k: int) -> Tensor:
    """What codes and scale stand for, in fp64."""
    return dequantize(codes, scale, fmt, granularity, (codes.shape[0], k), torch.float64)


def _need(names: list[str], family: str | None, p: Problem) -> None:
    """Refuse a family that has nothing for these operands: a dispatch would take another without a word."""
    if p.device.type == "cuda" and family and not any(name.startswith(family) for name in names):
        raise UnavailableError(f"{family} does not take this shape: K and N need more powers of two")


# ---- 16 bits ---------------------------------------------------------------------------------------------------------


@row("BF16 cuBLAS", "bf16")
def bf16(p: Problem) -> Case:
    a, b = p.normal()
    check = check_product(a.double, b.double, BF16_SUM)
    return Case(p.stored(a, b), lambda a, b: a @ b.t(), check)


@row("FP16 Triton, FP16 accumulation", "bf16")
def fp16(p: Problem) -> Case:
    a, b = (x * p.k**-0.25 for x in p.normal(torch.float16))  # sums of size 1: FP16 ends at 65,504
    accumulation = 2.0**-11 * (1 + 2 * (p.k / STEP_K) ** 0.5)
    return Case(p.stored(a, b), fp16_mm, check_product(a.double, b.double, accumulation))


# ---- scales in the epilogue ------------------------------------------------------------------------------------------


def _scaled(who: str, fmt: str, granularity: str, accumulation: float) -> Callable[[Problem], Case]:
    family = FAMILIES[who]

    def prepare(p: Problem) -> Case:
        if family == "cublas":
            p.only_k_major("cuBLAS takes FP8 operands K-major only")
        q = quantized(p, fmt, granularity, granularity)
        _need(scaled_mm_names(q.a, q.b, BF16, True), family, p)
        check = check_product(*q.values, accumulation)
        return Case(q.inputs, lambda a, b, s, t: scaled_mm(a, b, s, t, BF16), check, family)

    return prepare


for _who in FAMILIES:
    for _granularity in ("tensorwise", "rowwise"):
        row(f"FP8 {_who}, {_granularity}", "fp8")(_scaled(_who, "e4m3", _granularity, FP8_SUM))


@row("FP8 Triton, plain", "fp8")
def fp8_plain(p: Problem) -> Case:
    """Products of the codes themselves: one scale of 1."""
    p.need_capability("FP8", FP8_CAPABILITY)
    a, b = (x.to(torch.float8_e4m3fn) for x in p.normal())
    one = torch.ones(1, device=p.device)
    _need(scaled_mm_names(a, b, BF16, True), "triton", p)
    check = check_product(a.double, b.double, FP8_SUM)
    return Case(p.stored(a, b), lambda a, b: scaled_mm(a, b, one, one, BF16), check, "triton")


def _compiled(function: Callable[..., Tensor], p: Problem) -> Callable[..., Tensor]:
    """The function with Inductor's own Triton kernel for its product, the best of its configurations."""
    if p.device.type != "cuda":
        raise UnavailableError("Inductor has Triton kernels on a GPU only")
    torch.compiler.reset()  # each shape is compiled by itself, and there is a limit to how many may be
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@row("FP8 Inductor, rowwise", "fp8")
def fp8_inductor(p: Problem) -> Case:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        scales = scale_a[:, None], scale_b[None, :]
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16, use_fast_accum=True)

    p.only_k_major("Inductor takes FP8 operands K-major only")
    run = _compiled(product, p)
    q = quantized(p, "e4m3", "rowwise", "rowwise")
    return Case(q.inputs, run, check_product(*q.values, FP8_SUM))


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


for _who in ("Triton", "qtrain"):
    row(f"INT8 {_who}, rowwise", "int8")(_scaled(_who, "int8", "rowwise", FP32_SUM))


@row("INT8 Inductor, rowwise", "int8")
def int8_inductor(p: Problem) -> Case:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return (torch._int_mm(a, b.t()) * scale_a[:, None] * scale_b[None, :]).to(BF16)

    run = _compiled(product, p)
    q = quantized(p, "int8", "rowwise", "rowwise")
    return Case(q.inputs, run, check_product(*q.values, FP32_SUM))


@row("INT8 torchao Triton, rowwise", "int8")
def int8_torchao(p: Problem) -> Case:
    try:
        from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm
    except ImportError:
        raise UnavailableError("torchao is not installed: pip install torchao") from None
    _need_gpu(p, "torchao's Triton kernels")
    q = quantized(p, "int8", "rowwise", "rowwise")
    return Case(q.inputs, lambda a, b, s, t: scaled_int8_mm(a, b.t(), s, t), check_product(*q.values, BF16_SUM))


def _need_gpu(p: Problem, what: str) -> None:
    if p.device.type != "cuda":
        raise UnavailableError(f"{what} run on a GPU only")


# ---- scales of blocks ------------------------------------------------------------------------------------------------


def _blockwise(who: str, fmt: str, block_a: str, block_b: str) -> Callable[[Problem], Case]:
    family, accumulation = FAMILIES[who], FP32_SUM if fmt == "int8" else FP8_SUM

    def prepare(p: Problem) -> Case:
        if family == "cublas":
            p.only_k_major("cuBLAS takes FP8 operands K-major only")
            _need_gpu(p, "cuBLAS's blockwise products")
        q = quantized(p, fmt, block_a, block_b)
        _need(blockwise_mm_names(q.a, q.b, block_a, block_b, BF16), family, p)
        run = lambda a, b, s, t: blockwise_mm(a, b, s, t, block_a, block_b, BF16)  # noqa: E731
        return Case(q.inputs, run, check_product(*q.values, accumulation), family)

    return prepare


for _block_b in ("128x128", "1x128"):
    for _who in FAMILIES:
        row(f"FP8 {_who}, 1x128 · {_block_b}", "fp8")(_blockwise(_who, "e4m3", "1x128", _block_b))
for _block_a, _block_b in (("1x128", "128x128"), ("1x128", "1x128"), ("32x32", "32x32")):
    row(f"INT8 Triton, {_block_a} · {_block_b}", "int8")(_blockwise("Triton", "int8", _block_a, _block_b))


def _torchao_blockwise(quantize_b: str, product: str, transposed: bool) -> Callable[[Problem], Case]:
    def prepare(p: Problem) -> Case:
        try:
            from torchao.prototype.blockwise_fp8_training import kernels
        except ImportError:
            raise UnavailableError("torchao is not installed: pip install torchao") from None
        _need_gpu(p, "torchao's Triton kernels")
        p.only_k_major("torchao's blockwise kernels have one layout for each product")
        x, w = p.normal()
        if transposed:  # its grad_weight takes dy [K, M] and x [K, N] and turns the first
            a, scale_a = kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x.t().contiguous(), 128)
            b, scale_b = getattr(kernels, quantize_b)(w.t().contiguous(), 128)
        else:
            a, scale_a = kernels.triton_fp8_blockwise_act_quant_lhs(x, 128)
            b, scale_b = getattr(kernels, quantize_b)(w, 128)
        multiply = getattr(kernels, product)
        # Its scales have layouts of their own; a product of the unquantized values is close enough for a peer.
        check = check_product(x.double, w.double, 2.0**-6)
        return Case((a, b, scale_a, scale_b), lambda a, b, s, t: multiply(a, b, s, t), check)

    return prepare


row("FP8 torchao Triton, 1x128 · 128x128", "fp8")(
    _torchao_blockwise("triton_fp8_blockwise_weight_quant_transposed_rhs", "triton_fp8_gemm_1x128_128x128", False)
)
row("FP8 torchao Triton, 1x128 · 128x1", "fp8")(
    _torchao_blockwise("triton_fp8_blockwise_act_quant_rhs", "triton_fp8_gemm_1x128_128x1", True)
)


# ---- 4 bits, and formats that newer GPUs read themselves -------------------------------------------------------------

PACKED = "INT4 is packed along K: there is one layout"


@row("INT4 Triton, packed, plain", "int8")
def int4_plain(p: Problem) -> Case:
    p.only_k_major(PACKED)
    q = quantized(p, "int4", "tensorwise", "tensorwise")
    ones = torch.ones(1, device=p.device)
    codes = [lambda c=c: values(c, ones, "int4", "tensorwise", p.k) for c in (q.a, q.b)]
    return Case((q.a, q.b), lambda a, b: int4_mm(a, b, p.k), check_product(*codes, 0.0), "triton")


@row("INT4 Triton, packed, rowwise", "int8")
def int4_scaled(p: Problem) -> Case:
    p.only_k_major(PACKED)
    q = quantized(p, "int4", "rowwise", "rowwise")
    run = lambda a, b, s, t: scaled_int4_mm(a, b, s, t, p.k, BF16)  # noqa: E731
    return Case(q.inputs, run, check_product(*q.values, FP32_SUM), "triton")


def _need_blackwell(p: Problem, what: str) -> None:
    _need_gpu(p, f"{what} tensor cores")
    p.need_capability(what, MX_CAPABILITY)
    p.only_k_major(f"{what} operands are K-major")


@row("MXFP8 cuBLAS, 1x32", "mxfp8")
def mxfp8(p: Problem) -> Case:
    _need_blackwell(p, "MXFP8")
    x, w = p.normal()
    (a, scale_a), (b, scale_b) = quantize_mx(x), quantize_mx(w)
    check = check_product(
        lambda: dequantize_mx(a, scale_a, torch.float64), lambda: dequantize_mx(b, scale_b, torch.float64), BF16_SUM
    )
    return Case((a, b, scale_a, scale_b), lambda a, b, s, t: mx_mm(a, b, s, t, BF16), check)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of NVFP4's 4-bit floats, by code; bit 3 is the sign."""


@row("NVFP4 cuBLAS, 1x16", "fp4")
def nvfp4(p: Problem) -> Case:
    """Random codes, two a byte, each 16 with an e4m3 scale."""
    _need_blackwell(p, "NVFP4")
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    generator = torch.Generator(p.device).manual_seed(0)
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=p.device)
    codes, scales, truth = [], [], []
    for rows in (p.m, p.n):
        packed = torch.randint(0, 256, (rows, p.k // 2), dtype=torch.uint8, device=p.device, generator=generator)
        scale = torch.rand(rows, p.k // 16, device=p.device, generator=generator).add(0.5).to(torch.float8_e4m3fn)
        value = table[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()]
        codes.append(packed)
        scales.append(tiled_scale(scale))
        truth.append(value * scale.float().repeat_interleave(16, 1))
    recipe, swizzle = ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4

    def run(a: Tensor, b: Tensor, s: Tensor, t: Tensor) -> Tensor:
        a, b = a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2).t()
        return scaled_mm(a, b, s, recipe, t, recipe, swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=BF16)

    return Case((*codes, *scales), run, check_product(*(x.double for x in truth), BF16_SUM))


_ORDER = ("BF16", "FP16", "FP8", "INT8", "INT4", "MXFP8", "NVFP4")
ROWS.sort(key=lambda r: _ORDER.index(r.name.split()[0]))
