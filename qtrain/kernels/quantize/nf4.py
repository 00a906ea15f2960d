"""NF4: 4-bit codes of an approximately normally distributed weight (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

Sixteen values in [-1, 1] at quantiles of the normal distribution, 0 among them. A block of 64 along a row has an fp32
scale, its absmax; value = table[code] * absmax. Two codes per byte, the low nibble first; a row's last block may be
shorter. 4.5 bits per element. No GEMM reads this format: it is dequantized where it is read.

The kernel is memory-bound, 2.56 bytes per element in bf16. A thread loads 4 bytes of codes and stores 8 values (16
bytes). Values come from the table in memory, which stays in the L1 cache: one load per element, all within one cache
line, where a tree of comparisons would be fifteen instructions.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.compiler import cached_per_device, operator, tl, triton
from qtrain.kernels.numerics.formats import NF4_VALUES

BLOCK = 64
WARPS = 4
GROUPS = 4 * WARPS
"""Blocks of 64 per tile: 8 threads, with 4 bytes of codes each, to a block."""
TILES = 4
"""Tiles per CTA, which share the address arithmetic."""
_TILES = tl.constexpr(TILES)
AT_ONCE = 1 << 24
"""Elements that are quantized at once."""


@cached_per_device
def nf4_table(device: torch.device) -> Tensor:
    """NF4_VALUES as fp32 [16]; one copy per device: a CUDA graph cannot capture the transfer."""
    return torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)


def quantize_nf4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] -> codes uint8 [N, ceil(K / 2)], scale fp32 [N, ceil(K / 64)]; to the nearest value.

    Plain PyTorch on every device: a weight is quantized once, when it is loaded. A few rows at a time, for this takes
    16 bytes per element, more than the weight itself.
    """
    # Blocks never cross rows, so the parts' codes are those of the whole.
    rows = x.split(max(1, AT_ONCE // max(1, x.shape[1])))
    codes, scales = zip(*(_quantize_rows(part) for part in rows), strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    columns = x.shape[1]
    blocks = F.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=2)  # fp32 [N, blocks]
    table = nf4_table(x.device)
    # A block of zeros: 0 / tiny is 0, whose code is that of 0.
    unit = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    codes = (
        # The nearest value: boundaries half way between neighbors of the sorted table.
        torch.bucketize(unit.contiguous(), (table[1:] + table[:-1]) / 2, out_int32=True)
        .to(torch.uint8)
        .flatten(1)[:, : columns + columns % 2]
    )
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def dequantize_nf4_ref(codes: Tensor, scale: Tensor, table: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """codes uint8 [N, ceil(K / 2)], scale fp32 [N, ceil(K / 64)], table fp32 [16] -> [N, K = columns] in `dtype`;
    table * scale is computed in fp32 and rounded once."""
    nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, :columns]  # uint8 [N, K]
    values = table[nibbles.int()]
    if columns % BLOCK == 0:
        return (values.unflatten(1, (-1, BLOCK)) * scale.unsqueeze(2)).flatten(1).to(dtype)
    return (values * scale.repeat_interleave(BLOCK, dim=1)[:, :columns]).to(dtype)


@triton.jit
def _dequantize_nf4_kernel(
    # uint8 [N, width], fp32 [N, groups], fp32 [16]; fp32 or bf16 [N, columns].
    codes_ptr, scale_ptr, table_ptr, out_ptr,
    # Of a row: elements, bytes of codes, scales, CTAs.
    columns, width, groups, programs, ONE_ROW: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    program, row = tl.program_id(0), 0
    if not ONE_ROW:
        row, program = (program // programs).to(tl.int64), program % programs
    for tile in tl.static_range(_TILES):
        group = (program.to(tl.int64) * _TILES + tile) * GROUPS + tl.arange(0, GROUPS)
        byte = group[:, None] * 32 + tl.arange(0, 32)[None, :]  # [groups, 32]
        codes = tl.load(codes_ptr + row * width + byte, byte < width, 0).to(tl.int32)
        scale = tl.load(scale_ptr + row * groups + group, group < groups, 0.0)[:, None]
        # fp32 products, rounded once to the output's dtype as they are stored.
        low = tl.load(table_ptr + (codes & 15)) * scale
        high = tl.load(table_ptr + (codes >> 4)) * scale
        column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
        values = tl.interleave(low, high).to(out_ptr.dtype.element_ty)  # [groups, 64]
        tl.store(out_ptr + row * columns + column, values, column < columns)


def launch_dequantize_nf4(codes: Tensor, scale: Tensor, table: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The kernel for `dequantize_nf4_ref`; codes and scale contiguous."""
    rows = codes.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    if columns % BLOCK == 0:  # rows are contiguous: one long row
        rows, columns = 1, rows * columns
    groups = triton.cdiv(columns, BLOCK)
    programs = triton.cdiv(groups, GROUPS * TILES)
    if out.numel():
        _dequantize_nf4_kernel[(rows * programs,)](
            codes, scale, table, out, columns, triton.cdiv(columns, 2), groups, programs,
            ONE_ROW=rows == 1, GROUPS=GROUPS, num_warps=WARPS,
        )  # fmt: skip
    return out


@operator("dequantize_nf4", fake=lambda codes, columns, dtype: codes.new_empty(codes.shape[0], columns, dtype=dtype))
def dequantize_nf4(codes: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """codes uint8 [N, ceil(K / 2)], scale fp32 [N, ceil(K / 64)] -> values
    [N, columns] in `dtype`, fp32 or bf16."""
    if not codes.is_cuda:
        return dequantize_nf4_ref(codes, scale, nf4_table(codes.device), columns, dtype)
    return launch_dequantize_nf4(codes.contiguous(), scale.contiguous(), nf4_table(codes.device), columns, dtype)
