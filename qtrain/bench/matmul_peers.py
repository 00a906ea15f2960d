"""Rows of the matmul table for other libraries: Inductor's and torchao's Triton kernels. Importing registers them."""

from collections.abc import Callable

import torch
from torch import Tensor

from qtrain.bench.case import Case, UnavailableError, check_product
from qtrain.bench.matmul_operands import BF16_SUM, FP8_SUM, FP32_SUM, need_gpu, quantized
from qtrain.bench.matmuls import BF16, Problem, row


def _compiled(function: Callable[..., Tensor], p: Problem) -> Callable[..., Tensor]:
    """The function compiled with Inductor's own Triton GEMM, the best of its configurations."""
    if p.device.type != "cuda":
        raise UnavailableError("Inductor has Triton kernels on a GPU only")
    torch.compiler.reset()  # every shape is compiled for itself, and their number is limited
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@row("FP8 Inductor, rowwise", "fp8")
def fp8_inductor(p: Problem) -> Case:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        scales = scale_a[:, None], scale_b[None, :]
        return torch._scaled_mm(a, b.t(), *scales, out_dtype=BF16, use_fast_accum=True)

    p.only_k_major("Inductor takes FP8 operands K-major only")
    run = _compiled(product, p)
    return quantized(p, "e4m3", "rowwise", "rowwise").case(run, FP8_SUM)


@row("INT8 Inductor, rowwise", "int8")
def int8_inductor(p: Problem) -> Case:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return (torch._int_mm(a, b.t()) * scale_a[:, None] * scale_b[None, :]).to(BF16)

    run = _compiled(product, p)
    return quantized(p, "int8", "rowwise", "rowwise").case(run, FP32_SUM)


@row("INT8 torchao Triton, rowwise", "int8")
def int8_torchao(p: Problem) -> Case:
    try:
        from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm
    except ImportError:
        raise UnavailableError("torchao is not installed: pip install torchao") from None
    need_gpu(p, "torchao's Triton kernels")
    operands = quantized(p, "int8", "rowwise", "rowwise")
    return operands.case(lambda a, b, s, t: scaled_int8_mm(a, b.t(), s, t), BF16_SUM)


def _torchao_blockwise(quantize_b: str, product: str, transposed: bool) -> Callable[[Problem], Case]:
    def prepare(p: Problem) -> Case:
        try:
            from torchao.prototype.blockwise_fp8_training import kernels
        except ImportError:
            raise UnavailableError("torchao is not installed: pip install torchao") from None
        need_gpu(p, "torchao's Triton kernels")
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
