"""GEMM of 8-bit codes that is added to what is in memory: total += (A · Bᵀ) * scale_a * scale_b.

So the gradient of a weight, the sum over a step's micro-batches, is written once for each: total is read and written in
the epilogue, 4 bytes an element in bf16. A product of its own is written, then read with the sum, which is written: 8.
For a weight of 3584 x 18944 that is 0.14 ms of 0.95 on an H200, where a micro-batch has 8192 tokens; the fewer it has,
the larger the share. The sum is rounded once, not the product and the sum.
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_fp8
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import operator
from qtrain.kernels.gemm.cublas_lt import ALGORITHMS, algorithm_names, fp8_mm
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K
from qtrain.kernels.gemm.persistent import Tiling, by_name, k_major, launch_persistent_mm, padded_k, scales_rows
from qtrain.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_ref
from qtrain.kernels.gemm.scaled_wgmma import SCALED_TILINGS, launch_scaled_wgmma, supports_scaled_wgmma

# A slice of the total is in shared memory beside one of the result: four slices, for room for the large tiles' stages.
_LARGE = [Tiling(128, 256, 128, 8, 4, subtiles=4), Tiling(256, 128, 128, 8, 4, subtiles=4)]
_TWO = Tiling(128, 128, 128, 4, 3, subtiles=4, per_sm=2)
_SMALL = Tiling(64, 128, 128, 4, 4, subtiles=2, per_sm=2)
TILINGS = by_name(*_LARGE, _TWO, _SMALL)
TWO_PASSES = "two passes"


def add_scaled_mm_ref(total: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The new total [M, N] in its dtype, of operands as in `scaled_mm_ref`; added in fp32."""
    return (scaled_mm_ref(a, b, scale_a, scale_b, torch.float32) + total.float()).to(total.dtype)


def add_scaled_mm_names(total: Tensor, a: Tensor, b: Tensor, fast_accum: bool) -> list[str]:
    """The implementations that can take these operands, K-major on a GPU, the best in general first."""
    supported = a.shape[1] <= LONGEST_EXACT_K if a.dtype == torch.int8 else has_fp8(a.device)
    # Rows are addressed by TMA descriptors.
    if not (supported and total.dtype == torch.bfloat16 and a.shape[1] % 16 == total.shape[1] % 8 == 0):
        return [TWO_PASSES]
    cublas = algorithm_names() if a.dtype != torch.int8 and len(b) % 16 == 0 else []
    own = [*SCALED_TILINGS] if supports_scaled_wgmma(a, b, total.dtype, fast_accum) else []
    return [*own, *TILINGS, *cublas, TWO_PASSES]  # the first must run: cuBLASLt lacks scales of rows on some GPUs


@operator("add_scaled_mm", fake=lambda: None, mutates_args={"total"})
def add_scaled_mm(
    total: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast_accum: bool = True
) -> None:
    """total [M, N] += (A · Bᵀ) * scale_a * scale_b: bf16 or fp32, contiguous; A, B and scales as for `scaled_mm`."""
    a, b = k_major(a), k_major(b)
    if not (a.is_cuda and a.numel() and len(b)) or forced() == "ref":
        total.copy_(add_scaled_mm_ref(total, a, b, scale_a, scale_b))
        return
    a, b = padded_k(a), padded_k(b)

    def run(name: str, out: Tensor) -> None:
        if name == TWO_PASSES:
            out += scaled_mm(a, b, scale_a, scale_b, out.dtype, None, fast_accum)
        elif name in ALGORITHMS:
            fp8_mm(a, b, scale_a, scale_b, out, algorithm=ALGORITHMS[name], fast_accum=fast_accum, add=True)
        elif name in SCALED_TILINGS:
            launch_scaled_wgmma(a, b, scale_a, scale_b, out, SCALED_TILINGS[name], add=True)
        else:
            launch_persistent_mm(a, b, out, TILINGS[name], (scale_a, scale_b), fast_accum=fast_accum, add=True)

    rows = scales_rows((scale_a, scale_b))
    key = (len(a), len(b), a.shape[1], a.dtype, b.dtype, total.dtype, *rows, fast_accum)
    names = add_scaled_mm_names(total, a, b, fast_accum)
    # What is timed adds to memory of its own.
    run(choose("add_scaled_mm", key, names, lambda name: run(name, torch.empty_like(total))), total)
