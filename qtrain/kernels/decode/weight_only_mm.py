"""Products of a few rows with a weight's codes, for generation: y = x · (codes * scale)ᵀ, x in the model's dtype.

A step of generation multiplies one row a sequence with every weight, so it reads each weight once for a few FLOPs a
byte: its time is that of the weight's bytes, and codes of 8, 4 or 2 bits take a half, a quarter or an eighth of bf16's.
One row is not quantized: that would save nothing, and codes of 8 bits are exact in fp32. From two rows on x is
quantized as in training where tensor cores multiply such codes: to convert every code of the weight would take longer
than to read it. Values are summed in fp32, or in int32.

What stands between two weights is fused, because a launch of its own takes as long as a small weight does: the RMSNorm
of x before (its factor 1 / rms is the row's, so the sum over x² is taken on the way and applied to the result), a bias,
SwiGLU, and the residual stream that the result is added to.

    one row         a CTA takes a few rows of the weight; each thread multiplies and adds its part of K, and the threads
                    add their parts at the end (`gemv.py`)
    2 to 64 rows    tensor cores, on tiles of BLOCK_N rows of the weight; a small weight's K is split among CTAs, of
                    which the last adds the parts (`row_tiles.py`)

More rows (a prompt) compute for longer than they read: the weight is dequantized, and cuBLAS multiplies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.decode.gemv import GEMV, launch_gemv
from qtrain.kernels.decode.operands import Fused, Weight, kernel_spec
from qtrain.kernels.decode.row_tiles import TILES, launch_tiles

MOST_ROWS = 64
"""Of x, that the kernels take."""
PLAIN = Fused()


def weight_only_mm_ref(x: Tensor, weight: Weight, fused: Fused = PLAIN) -> Tensor:
    """x [M, K] · weight [N, K]ᵀ with what is fused, in x's dtype; computed in fp32, rounded once."""
    value = x.float()
    if fused.norm is not None:
        value = F.rms_norm(value, value.shape[-1:], fused.norm.float(), fused.eps)
    y = F.linear(value, weight.values(torch.float32), None if fused.bias is None else fused.bias.float())
    if fused.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return (y if fused.residual is None else y + fused.residual.float()).to(x.dtype)


def weight_only_mm(x: Tensor, weight: Weight, fused: Fused = PLAIN) -> Tensor:
    """`weight_only_mm_ref` of contiguous operands by the fastest kernel."""
    if not x.is_cuda or forced() == "ref":
        return weight_only_mm_ref(x, weight, fused)
    if len(x) > MOST_ROWS:
        return _long(x, weight, fused)
    spec = kernel_spec(x, weight, fused)
    names = list(GEMV if len(x) == 1 else (name for name, tile in TILES.items() if not (tile.per_sm and spec.swiglu)))
    n = len(weight.codes)
    key = (1 if len(x) == 1 else spec.block_m, n, x.shape[1], x.dtype, *spec.about)
    name = choose("weight_only_mm", key, names, lambda name: launch_weight_only_mm(x, weight, fused, name))
    return launch_weight_only_mm(x, weight, fused, name)


def _long(x: Tensor, weight: Weight, fused: Fused) -> Tensor:
    if fused.norm is not None:
        x = F.rms_norm(x, x.shape[-1:], fused.norm, fused.eps)
    y = F.linear(x, weight.values(x.dtype), fused.bias)
    if fused.swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if fused.residual is None else fused.residual + y


def launch_weight_only_mm(x: Tensor, weight: Weight, fused: Fused, name: str) -> Tensor:
    """`weight_only_mm` by the kernel of this name, in `GEMV` for one row, else in `TILES`."""
    return (launch_gemv if len(x) == 1 else launch_tiles)(x, weight, fused, name)
