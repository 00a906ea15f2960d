"""GEMM of packed INT4 codes through the INT8 tensor cores: out = A · Bᵀ, codes -8..7, two per byte along K.

Hopper and Blackwell have no INT4 tensor cores, so nibbles become bytes first. The order of K is free as long as both
operands agree: low nibbles multiply low nibbles, high ones high ones, and nothing is interleaved. Nor is a sign
extended: a nibble in the high half of a byte is 16 times its code, so a mask and a shift unpack a register of four
bytes, and the sum, 256 times too large, is shifted back at the end. That is exact while 256 * 64 * K < 2**31.

The implementation is chosen by measurement (`autotune.choose`): the fused kernel unpacks tiles in registers, and loads
half the bytes; `unpack` writes both operands as int8, the low nibbles of a row first, then its high ones, and runs the
INT8 GEMM, which keeps the tensor cores busier. With both the gain over INT8 is memory, not arithmetic. Ampere and Ada
can multiply packed codes as they are (`int4_cores.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_int4, has_ptx, sm_count
from qtrain.kernels.autotune import choose, forced
from qtrain.kernels.compiler import TensorDescriptor, operator, tl, triton
from qtrain.kernels.gemm.int4_cores import CORES, launch_int4_cores_mm
from qtrain.kernels.gemm.int8_mm import int8_mm, int8_mm_ref
from qtrain.kernels.gemm.persistent import Tiling, by_name, scale_and_store, scales_rows, tile_of
from qtrain.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_ref
from qtrain.kernels.numerics.formats import unpack

LONGEST_FUSED_K = (2**31 - 1) // (256 * 64)


# ---- definitions -----------------------------------------------------------------------------------------------------


def unpack_halves_ref(packed: Tensor) -> Tensor:
    """packed uint8 [R, C], low nibble first -> int8 [R, 2C]: the codes of the low nibbles, then of the high ones."""
    bits = packed.view(torch.int8)  # signed, so that shifts are arithmetic
    return torch.cat([(bits << 4) >> 4, bits >> 4], dim=1)  # arithmetic shifts extend the sign


def int4_mm_ref(a: Tensor, b: Tensor, k: int) -> Tensor:
    """A uint8 [M, ceil(K/2)], B uint8 [N, ceil(K/2)], as `pack` leaves INT4 codes -> int32 [M, N], exact."""
    _check(a, b, k)
    return int8_mm_ref(unpack(a, "int4", k), unpack(b, "int4", k))


def scaled_int4_mm_ref(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, k: int, out_dtype: torch.dtype
) -> Tensor:
    """The same with scale_a fp32 [M] or [1] and scale_b fp32 [N] or [1] -> [M, N] in out_dtype."""
    _check(a, b, k)
    return scaled_mm_ref(unpack(a, "int4", k), unpack(b, "int4", k), scale_a, scale_b, out_dtype)


def _check(a: Tensor, b: Tensor, k: int) -> None:
    width = (k + 1) // 2
    assert a.shape[1] == b.shape[1] == width, f"K = {k} is {width} packed bytes, not {a.shape[1]} and {b.shape[1]}"


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _unpack_halves_kernel(packed_ptr, out_ptr, width, BLOCK: tl.constexpr):
    # packed uint8 [R, width], out int8 [R, 2 * width]. Arithmetic shifts extend the sign.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    packed = tl.load(packed_ptr + row * width + columns, inside)
    low, high = (packed << 4).to(tl.int8, bitcast=True) >> 4, packed.to(tl.int8, bitcast=True) >> 4
    tl.store(out_ptr + row * 2 * width + columns, low, inside)
    tl.store(out_ptr + row * 2 * width + width + columns, high, inside)


@triton.jit
def _times_16(packed, PTX: tl.constexpr):
    """packed uint8 -> 16 times its low codes, 16 times its high codes, int8. PTX shifts four bytes at once in a 32-bit
    register; the GPU has no byte shifts."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            "{ and.b32 $1, $2, 0xf0f0f0f0; shl.b32 $0, $2, 4; and.b32 $0, $0, 0xf0f0f0f0; }",
            "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = (packed << 4).to(tl.int8, bitcast=True)
        high = (packed & 0xF0).to(tl.int8, bitcast=True)
    return low, high


@triton.jit  # one binary for all shapes: descriptors do the addressing
def _int4_mm_kernel(
    # TMA descriptors of A [m, width] and B [n, width], uint8, two codes a byte; and of the output [m, n].
    a_desc, b_desc, c_desc,
    # As for `_persistent_mm_kernel`, without a bias; block_k counts packed bytes.
    epilogue_ptrs, PROGRAMS: tl.constexpr, TILING: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A persistent kernel as `_persistent_mm_kernel`, with two products per step: of low nibbles, and of high ones."""
    m, n, width = a_desc.shape[0], b_desc.shape[0], a_desc.shape[1]
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, TILING.group_m)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in range(0, width, TILING.block_k):
            a_low, a_high = _times_16(a_desc.load([row, start]), PTX)
            b_low, b_high = _times_16(b_desc.load([column, start]), PTX)
            total = tl.dot(a_low, b_low.T, total, out_dtype=tl.int32)  # int32 [BLOCK_M, BLOCK_N], 256 times the sum
            total = tl.dot(a_high, b_high.T, total, out_dtype=tl.int32)
        total = total >> 8  # both operands were 16 times their codes; exact, the low eight bits are zero
        scale_and_store(c_desc, total, row, column, epilogue_ptrs, (m, n), ROWS, TILING.subtiles)


def launch_unpack_halves(packed: Tensor) -> Tensor:
    """The kernel for `unpack_halves_ref`; packed contiguous."""
    (rows, width), block = packed.shape, 4096
    out = torch.empty(rows, 2 * width, dtype=torch.int8, device=packed.device)
    if packed.numel():
        _unpack_halves_kernel[(rows, triton.cdiv(width, block))](packed, out, width, block)
    return out


def launch_int4_mm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None, out_dtype: torch.dtype, tiling: Tiling
) -> Tensor:
    """The fused kernel for `int4_mm_ref` (scales None, out_dtype int32) and `scaled_int4_mm_ref`.

    Packed widths in multiples of 16 bytes, rows of the output too; both operands contiguous; K at most LONGEST_FUSED_K.
    """
    m, n, t = a.shape[0], b.shape[0], tiling
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    # Where two CTAs fit on an SM, one unpacks while the other multiplies.
    per_sm = 2 if t.warps == 4 else 1
    programs = min(per_sm * sm_count(a.device), triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n))
    _int4_mm_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
        TensorDescriptor.from_tensor(b, [t.block_n, t.block_k]),
        TensorDescriptor.from_tensor(out, [t.block_m, t.block_n // t.subtiles]),
        (*(scales or (None, None)), None), PROGRAMS=programs,
        TILING=t, ROWS=scales_rows(scales), PTX=has_ptx(a.device), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out


# ---- dispatch --------------------------------------------------------------------------------------------------------

# BLOCK_K counts packed bytes. An operand's unpacked tile is in shared memory beside the packed one.
FUSED = by_name(
    Tiling(128, 256, 64, 8, 3, subtiles=4),
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 128, 128, 8, 3),
    Tiling(64, 128, 64, 4, 4),
    Tiling(128, 64, 64, 4, 4),
)


def _names(a: Tensor, b: Tensor, k: int, out_dtype: torch.dtype) -> list[str]:
    """The implementations that can take these operands, the best in general first."""
    aligned = a.shape[1] % 16 == 0 and b.shape[0] * out_dtype.itemsize % 16 == 0  # of TMA descriptors
    # Those on INT4 cores come last: without timing they are not chosen.
    return [
        "triton unpack",
        *(FUSED if aligned and k <= LONGEST_FUSED_K else ()),
        *(CORES if has_int4(a.device) else ()),
    ]


def _dispatch(
    op: str,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    k: int,
    out_dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Run the fastest implementation; `multiply` is the product of operands unpacked to int8."""
    a, b = a.contiguous(), b.contiguous()

    def run(name: str) -> Tensor:
        if name == "triton unpack":
            return multiply(launch_unpack_halves(a), launch_unpack_halves(b))
        if name in CORES:
            return launch_int4_cores_mm(a, b, scales, out_dtype, CORES[name])
        return launch_int4_mm(a, b, scales, out_dtype, FUSED[name])

    return run(choose(op, (a.shape[0], b.shape[0], k, out_dtype), _names(a, b, k, out_dtype), run))


def _on_gpu(a: Tensor, b: Tensor) -> bool:
    return a.is_cuda and bool(a.numel() and b.numel()) and forced() != "ref"


@operator("int4_mm", fake=lambda a, b: a.new_empty(a.shape[0], b.shape[0], dtype=torch.int32))
def int4_mm(a: Tensor, b: Tensor, k: int) -> Tensor:
    """A · Bᵀ of packed codes: A uint8 [M, ceil(K/2)], B uint8 [N, ceil(K/2)] -> int32 [M, N], exact."""
    if not _on_gpu(a, b):
        return int4_mm_ref(a, b, k)
    _check(a, b, k)
    return _dispatch("int4_mm", a, b, None, k, torch.int32, int8_mm)


@operator("scaled_int4_mm", fake=lambda a, b, out_dtype: a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype))
def scaled_int4_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, k: int, out_dtype: torch.dtype) -> Tensor:
    """(A · Bᵀ) * scale_a * scale_b of packed codes; scales fp32, one a row or [1] -> [M, N] in out_dtype."""
    if not _on_gpu(a, b):
        return scaled_int4_mm_ref(a, b, scale_a, scale_b, k, out_dtype)
    _check(a, b, k)
    return _dispatch(
        "scaled_int4_mm", a, b, (scale_a, scale_b), k, out_dtype,
        lambda x, y: scaled_mm(x, y, scale_a, scale_b, out_dtype),
    )  # fmt: skip
