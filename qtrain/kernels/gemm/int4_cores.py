"""GEMM of packed INT4 codes on INT4 tensor cores, which Ampere and Ada have: out = A · Bᵀ, codes -8..7.

Triton has no type of four bits. But `mma.m16n8k32` of INT8 and `mma.m16n8k64` of INT4 take their operands alike: each
register of a thread holds the same four bytes of a row, as four codes or as eight (PTX ISA, "Matrix fragments for
mma.m16n8k32" and "for mma.m16n8k64"), and the int32 sums are laid out alike too. So the kernel is one of INT8 products
of packed bytes, and the instruction is exchanged in its PTX, before it is assembled. Interpreted, it is that of INT8.

No GPU with such cores has run it here: the dispatch times it against the products on INT8 cores. Hopper and Blackwell
assemble the same instruction and run it on INT8 cores.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.gemm.persistent import Tiling, scale_tile, scales_rows, tile_of

INT8_MMA = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
INT4_MMA = "mma.sync.aligned.m16n8k64.row.col.satfinite.s32.s4.s4.s32"

# BLOCK_K counts bytes.
CORES = {
    f"{tiling.name} int4 cores": tiling
    for tiling in (
        Tiling(128, 128, 64, 4, 4),
        Tiling(128, 256, 64, 8, 3),
        Tiling(64, 128, 64, 4, 4),
        Tiling(64, 64, 128, 4, 3),
    )
}


@triton.jit
def _int4_cores_kernel(
    # A [m, width] and B [n, width], int8, contiguous: two codes a byte; out [m, n] of int32, or of a float dtype.
    a_ptr, b_ptr, out_ptr,
    # As for `scale_tile`, without a bias; scales None: stores the sums.
    epilogue_ptrs, m, n, width, TILING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILING.block_m
    BLOCK_N: tl.constexpr = TILING.block_n
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), TILING.group_m)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    rows, columns, place = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N), tl.arange(0, TILING.block_k)
    # Rows beyond the matrix repeat its last one, and are not stored.
    a_row_ptr = a_ptr + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * width
    b_row_ptr = b_ptr + tl.minimum(columns, n - 1).to(tl.int64)[:, None] * width
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in tl.range(0, width, TILING.block_k, num_stages=TILING.stages):
        within = (place < width - start)[None, :]
        a = tl.load(a_row_ptr + start + place[None, :], within, 0)
        b = tl.load(b_row_ptr + start + place[None, :], within, 0)
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    address = out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    if epilogue_ptrs[0] is not None:
        out = scale_tile(total, row, column, epilogue_ptrs, (m, n), ROWS)
        tl.store(address, out.to(out_ptr.dtype.element_ty), inside)
    else:
        tl.store(address, total, inside)


def with_int4_mma(ptx: str) -> str:
    """The PTX of a kernel of INT8 products with those of INT4. RuntimeError without any, as on tensor cores that read
    operands in shared memory (`wgmma`, `tcgen05`)."""
    if INT8_MMA not in ptx:
        raise RuntimeError(f"no {INT8_MMA} in the PTX that Triton {triton.__version__} makes of a product")
    return ptx.replace(INT8_MMA, INT4_MMA)


def _add_stage(*args: Any) -> tuple[str, str] | None:
    """Triton's hook for the stages of its compiler: of (backend, stages, options, language, capability); without
    arguments it asks for what tells kernels compiled so from others."""
    if not args:
        return "int4_mma", "int4_mma"
    stages = args[1]
    make_ptx: Callable[..., str] = stages["ptx"]
    stages["ptx"] = lambda source, metadata: _exchanged(make_ptx(source, metadata))
    return None


def _exchanged(ptx: str) -> str:
    # Another thread may compile while the hook is set.
    return with_int4_mma(ptx) if f".entry {_int4_cores_kernel.__name__}(" in ptx else ptx


@contextmanager
def _int4_products() -> Iterator[None]:
    runtime: Any = triton.knobs.runtime
    before, runtime.add_stages_inspection_hook = runtime.add_stages_inspection_hook, _add_stage
    try:
        yield
    finally:
        runtime.add_stages_inspection_hook = before


def launch_int4_cores_mm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None, out_dtype: torch.dtype, tiling: Tiling
) -> Tensor:
    """The kernel for `int4_mm_ref` (scales None, out_dtype int32) and `scaled_int4_mm_ref`; contiguous operands."""
    (m, width), n, t = a.shape, b.shape[0], tiling
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    with _int4_products():
        _int4_cores_kernel[(triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n),)](
            a.view(torch.int8), b.view(torch.int8), out, (*(scales or (None, None)), None), m, n, width,
            TILING=t, ROWS=scales_rows(scales), num_warps=t.warps,
        )  # fmt: skip
    return out
