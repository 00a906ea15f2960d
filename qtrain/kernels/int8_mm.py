"""INT8 matrix product with one scale a row of each operand: out = (A · Bᵀ) * scale_a[:, None] * scale_b[None, :].

Both operands are K-major: A [M, K], B [N, K]. The sum over K is exact in int32; the scales are applied in fp32 once,
at the end.

The kernel is persistent: one program a multiprocessor walks over the output's tiles, in groups of 8 rows of tiles so
that operands stay in L2, and the loads (TMA descriptors) of the next tile start under the epilogue of this one.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.compiler import tl, triton

# 127 * 127 * K must stay below 2**31: longer sums are split, and the parts are added in fp32.
LONGEST_EXACT_K = (2**31 - 1) // (127 * 127)


def int8_mm_ref(a: Tensor, b: Tensor) -> Tensor:
    """A [M, K] int8 · B [N, K]ᵀ int8 -> int32 [M, N], exact. K at most LONGEST_EXACT_K."""
    (m, k), n = a.shape, b.shape[0]
    if k == 1:  # torch._int_mm reads past operands of K = 1 on a CPU
        return a.int() * b.int().t()
    if a.device.type == "cuda":
        # cuBLAS takes M > 16 and K, N in multiples of 8; rows and columns of zeros change nothing.
        pad_m, pad_k, pad_n = max(32 - m, 0), -k % 8, -n % 8
        if pad_m or pad_k or pad_n:
            a, b = F.pad(a, (0, pad_k, 0, pad_m)), F.pad(b, (0, pad_k, 0, pad_n))
            return torch._int_mm(a, b.t())[:m, :n]
    return torch._int_mm(a, b.t())


def scaled_int8_mm_ref(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """A [M, K] int8, B [N, K] int8, scale_a fp32 [M], scale_b fp32 [N] -> [M, N] in out_dtype."""
    k = a.shape[1]
    if k <= LONGEST_EXACT_K:
        total = int8_mm_ref(a, b).float()
    else:
        spans = range(0, k, LONGEST_EXACT_K)
        total = sum(int8_mm_ref(a[:, i : i + LONGEST_EXACT_K], b[:, i : i + LONGEST_EXACT_K]).float() for i in spans)
    return (total * scale_a[:, None] * scale_b[None, :]).to(out_dtype)


@triton.jit
def _tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Number of a tile -> its row and column, walking down groups of GROUP_M rows."""
    group_size = GROUP_M * tiles_n
    first_m = tile // group_size * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_size % rows, tile % group_size // rows


@triton.jit
def _scaled_int8_mm_kernel(
    a_desc, b_desc, c_desc, scale_a_ptr, scale_b_ptr, m, n, k,
    PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = _tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in range(0, k, BLOCK_K):
            a = a_desc.load([row, start])
            b = b_desc.load([column, start])
            total = tl.dot(a, b.T, total, out_dtype=tl.int32)
        rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        scale_a = tl.load(scale_a_ptr + rows, rows < m, 0.0)
        scale_b = tl.load(scale_b_ptr + columns, columns < n, 0.0)
        out = total.to(tl.float32) * scale_a[:, None] * scale_b[None, :]
        # Stored in two halves: the whole tile in shared memory would cost a stage of the pipeline.
        left, right = tl.split(tl.permute(tl.reshape(out, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        c_desc.store([row, column], left.to(c_desc.dtype))
        c_desc.store([row, column + HALF], right.to(c_desc.dtype))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_scaled_int8_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The kernel for `scaled_int8_mm_ref`. K a multiple of 16, N of 16 bytes of output, K at most LONGEST_EXACT_K."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    # Small outputs take smaller tiles, so that all multiprocessors have one; and fp32 ones, to fit in shared memory.
    large = triton.cdiv(m, 128) * triton.cdiv(n, 256) >= 128 and out_dtype.itemsize <= 2
    block_m, block_n, block_k, warps, stages = (128, 256, 128, 8, 4) if large else (128, 128, 128, 8, 4)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    programs = min(_multiprocessors(a.device) if a.is_cuda else 2, tiles)
    _scaled_int8_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [block_m, block_k]),
        TensorDescriptor.from_tensor(b, [block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n // 2]),
        scale_a, scale_b, m, n, k, programs, 8, block_m, block_n, block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


@torch.library.custom_op("qtrain::scaled_int8_mm", mutates_args=())
def scaled_int8_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(A · Bᵀ) * scale_a[:, None] * scale_b[None, :]: A [M, K] int8, B [N, K] int8, scales fp32 -> [M, N] out_dtype."""
    (m, k), n = a.shape, b.shape[0]
    aligned = k % 16 == 0 and n * out_dtype.itemsize % 16 == 0  # what TMA descriptors ask of strides
    if a.is_cuda and aligned and 0 < k <= LONGEST_EXACT_K and m and n:
        return launch_scaled_int8_mm(a.contiguous(), b.contiguous(), scale_a, scale_b, out_dtype)
    return scaled_int8_mm_ref(a, b, scale_a, scale_b, out_dtype)


@scaled_int8_mm.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
