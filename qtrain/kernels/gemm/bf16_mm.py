"""bf16 products without scales, by the fastest of cuBLASLt's algorithms for a shape.

PyTorch runs the one that the library's heuristic puts first. Others are up to 13% faster (H200, products of 0.5B to 7B
models), so they are timed as those of FP8 products are.
"""

import torch
from torch import Tensor

from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compile_together import launches_are_left_out
from qtrain.kernels.compiler import operator
from qtrain.kernels.gemm.cublas_lt import ALGORITHMS, algorithm_names, plain_mm, takes_plain_mm

LEAST_PRODUCTS = 2**32
"""m * n * k from which algorithms are timed: 11 us on an H200. Below, the call itself takes as long."""


def bf16_mm_ref(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A [M, K] · B [K, N] + bias [N] -> [M, N] in A's dtype."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


@operator("bf16_mm", fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
def bf16_mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """A [M, K] · B [K, N] + bias [N] -> [M, N]; operands of one dtype, of any strides."""
    if not _is_timed(a, b):
        return bf16_mm_ref(a, b, bias)
    out = a.new_empty(a.shape[0], b.shape[1])
    if launches_are_left_out():
        return out
    names = ["cublas", *(algorithm_names() if takes_plain_mm(a, b.t(), out) else [])]

    def run(name: str) -> Tensor:
        if name != "cublas":
            return plain_mm(a, b.t(), out, algorithm=ALGORITHMS[name], bias=bias)
        # Into the same memory: logits are gigabytes.
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)

    return run(choose("bf16_mm", _key(a, b, out, bias is not None), names, run))


def bf16_mm_into_ref(out: Tensor, a: Tensor, b: Tensor, keep: bool = False) -> None:
    """out [M, N] = A [M, K] · B [K, N], or with `keep` += it. A and B of one dtype, out of theirs or fp32."""
    kept = 1 if keep else 0  # with 0 out is not read
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=kept)
    elif out.is_cuda:  # a GEMM with fp32 output
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=kept, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=kept)


@operator("bf16_mm_into", fake=lambda: None, mutates_args={"out"})
def bf16_mm_into(out: Tensor, a: Tensor, b: Tensor, keep: bool = False) -> None:
    """`bf16_mm_into_ref`; out by rows."""
    if launches_are_left_out():
        return
    if not (_is_timed(a, b) and takes_plain_mm(a, b.t(), out)):
        bf16_mm_into_ref(out, a, b, keep)
        return

    def run(name: str, into: Tensor) -> None:
        if name == "cublas":
            bf16_mm_into_ref(into, a, b, keep)
        else:
            plain_mm(a, b.t(), into, algorithm=ALGORITHMS[name], add=keep)

    names = ["cublas", *algorithm_names()]
    # What is timed adds to memory of its own.
    run(choose("bf16_mm_into", _key(a, b, out, keep), names, lambda name: run(name, torch.empty_like(out))), out)


def is_large_bf16(a: Tensor, b: Tensor) -> bool:
    """Whether a product A [M, K] · B [K, N] on a GPU is worth a choice of algorithms."""
    large = a.shape[0] * a.shape[1] * b.shape[1] >= LEAST_PRODUCTS
    return large and a.is_cuda and a.dtype == torch.bfloat16


def _is_timed(a: Tensor, b: Tensor) -> bool:
    return is_large_bf16(a, b) and forced() != "ref"


def _key(a: Tensor, b: Tensor, out: Tensor, more: bool) -> tuple[object, ...]:
    """What a choice depends on: sizes, layouts, the output's dtype, and whether there is something to add."""
    return (a.shape[0], b.shape[1], a.shape[1], a.stride(1) == 1, b.stride(1) == 1, out.dtype, more)
