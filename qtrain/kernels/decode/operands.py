"""The operands of a product of generation, and what its two kernels share: what is read before the kernel before it has
ended, codes as numbers, scales, and what is computed with the result (`weight_only_mm.py`)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_dependent_launch, has_fp8, has_ptx
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.decode.dependent_launch import prefetch_rows
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, dequantize

FORMATS_READ = ("int8", "e4m3", "e5m2", "int4", "ternary")
PREFETCHED = 256
"""Bytes of each row of a CTA's part of the weight that are loaded into L2 while the kernel before still runs: of all
resident CTAs some 8 MB, what is read in 2 us."""


class Weight(NamedTuple):
    """A weight [N, K]: its values, or codes of a format of `FORMATS_READ` in a granularity of `GRANULARITIES`."""

    codes: Tensor
    """[N, K / packing], contiguous; without a format the values themselves, in x's dtype."""
    scale: Tensor | None = None
    """fp32, shaped as `scale_shape`."""
    fmt: str | None = None
    granularity: str = "tensorwise"

    def values(self, dtype: torch.dtype) -> Tensor:
        """[N, K], dequantized in fp32 and rounded once."""
        if self.fmt is None or self.scale is None:
            return self.codes.to(dtype)
        shape = (len(self.codes), self.codes.shape[1] * FORMATS[self.fmt].packing)
        return dequantize(self.codes, self.scale, self.fmt, self.granularity, shape, dtype)


class Fused(NamedTuple):
    """What is computed with a product, in this order: norm of x, bias, SwiGLU, residual."""

    norm: Tensor | None = None
    """RMSNorm's weight [K]; None: x is not normed."""
    eps: float = 0.0
    bias: Tensor | None = None
    """[N]."""
    swiglu: bool = False
    """The weight's rows are those of gate, then of up: y is [M, N / 2]."""
    residual: Tensor | None = None
    """Added to the result, in its shape."""


# ---- what a kernel is compiled for -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """What both kernels are compiled for, as one constexpr."""

    packing: int
    """Codes of a unit: of an int32 word of packed codes, else 1."""
    group: int
    """Elements of K that share a scale; 0: all of them, or the weight has no scales."""
    group_rows: int
    coded: bool
    native: bool
    """x is codes too, whose products tensor cores add without converting either."""
    int8_ptx: bool
    """Codes are int8, and inline PTX is allowed."""
    prefetched: int
    """Units of each row of the weight, while the kernel before still runs; 0: the launch is not a dependent one."""
    norm: bool
    bias: bool
    swiglu: bool
    residual: bool
    block_m: int
    about: tuple[str, ...]
    """Names of format and granularity, and of what is fused."""


def kernel_spec(x: Tensor, weight: Weight, fused: Fused) -> Spec:
    packing, group, rows, about = 1, 0, 1, ["plain"]
    if weight.fmt is not None:
        sizes, fields = GRANULARITIES[weight.granularity], FORMATS[weight.fmt].packing
        packing, group, rows = 4 * fields if fields > 1 else 1, sizes[1] or 0, sizes[0] or 1
        about = [weight.fmt, weight.granularity]
    flags = {
        "norm": fused.norm is not None and len(x) == 1 and packing == 1,
        "bias": fused.bias is not None,
        "swiglu": fused.swiglu,
        "residual": fused.residual is not None,
    }
    about += [name for name, present in flags.items() if present]
    size = 4 if packing > 1 else weight.codes.element_size()
    return Spec(
        packing, group, rows, weight.fmt is not None, multiplies_codes(x, weight),
        int8_ptx=weight.fmt == "int8" and has_ptx(x.device),
        prefetched=PREFETCHED // size if has_dependent_launch(x.device) else 0, **flags,
        block_m=max(16, triton.next_power_of_2(len(x))), about=tuple(about),
    )  # fmt: skip


def multiplies_codes(x: Tensor, weight: Weight) -> bool:
    """Whether x is quantized too: where tensor cores multiply codes of the weight's format, and its scales are those of
    rows or of blocks of 128."""
    if len(x) == 1 or weight.granularity not in ("tensorwise", "rowwise", "128x128"):
        return False
    return weight.fmt == "int8" or (weight.fmt == "e4m3" and has_fp8(x.device))


def units_of(count: int, codes: Tensor, spec: Spec) -> int:
    """Units of codes in `count` bytes, a whole group at least; just one where x's scales are those of groups too."""
    if spec.native and spec.group:
        return spec.group
    return max(count // codes.element_size(), spec.group // spec.packing, 16)


def in_words(x: Tensor, codes: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """x [M, K] and codes as a kernel reads them: packed codes as int32 words, and the elements of x apart that are
    multiplied with each field of a word, [packing, M, K / packing]."""
    if spec.packing == 1:
        return x, codes
    return x.view(len(x), -1, spec.packing).permute(2, 0, 1).contiguous(), codes.view(torch.int32)


def strides_of(scale: Tensor) -> tuple[int, int]:
    """0 along what has one scale."""
    return scale.stride(0) if scale.numel() > 1 else 0, scale.stride(1) if scale.ndim == 2 else 0


def scale_of(weight: Weight, like: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The weight's scales with their strides; `like`, which is not read, where it has none."""
    return (like, (0, 0)) if weight.scale is None else (weight.scale, strides_of(weight.scale))


def named(tiles: list) -> dict:
    """Settings of a kernel by the name that the autotuner keeps."""
    return {" ".join(["triton", *map(str, tile)]): tile for tile in tiles}


# ---- in a kernel -----------------------------------------------------------------------------------------------------


INT8_TO_FLOAT: tl.constexpr = tl.constexpr("""
{
    .reg .b32 biased;
    xor.b32 biased, $4, 0x80808080;
    prmt.b32 $0, biased, 0x4B000000, 0x7540;
    prmt.b32 $1, biased, 0x4B000000, 0x7541;
    prmt.b32 $2, biased, 0x4B000000, 0x7542;
    prmt.b32 $3, biased, 0x4B000000, 0x7543;
    add.f32 $0, $0, 0fCB000080;
    add.f32 $1, $1, 0fCB000080;
    add.f32 $2, $2, 0fCB000080;
    add.f32 $3, $3, 0fCB000080;
}
""")
"""Four codes of a word, with 128 added, as the low bits of 2^23, less 2^23 + 128: the compiler's conversion of bytes to
fp32 is an instruction of a slower pipe."""


@triton.jit
def field_values(units, FIELD: tl.constexpr, SPEC: tl.constexpr):
    """Code number FIELD of each unit, in fp32."""
    if SPEC.int8_ptx:
        return tl.inline_asm_elementwise(INT8_TO_FLOAT, "=r,=r,=r,=r,r", [units], tl.float32, is_pure=True, pack=4)
    if SPEC.packing > 1:
        BITS: tl.constexpr = 32 // SPEC.packing
        # To the top of the word, and back as a signed number, which extends its sign.
        units = (units << (32 - BITS * (FIELD + 1))) >> (32 - BITS)
    return units.to(tl.float32)


@triton.jit
def row_factors(scale_ptr, bias_ptr, row, scale_row, SPEC: tl.constexpr):
    """Scales and biases of rows of the weight."""
    scale = tl.full(row.shape, 1.0, tl.float32)
    bias = tl.zeros(row.shape, tl.float32)
    if SPEC.coded and SPEC.group == 0:
        scale = tl.load(scale_ptr + row * scale_row)
    if SPEC.bias:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    return scale, bias


@triton.jit
def read_early(codes_ptr, scale_ptr, bias_ptr, row, inside, n, start, end, width, scale_row, SPEC: tl.constexpr):
    """What no kernel of a step writes: the beginning of rows of the weight, from unit `start` on, into L2; scales and
    biases of `row`, and with SwiGLU of `up`. After the loop each of these loads would be waited for."""
    if SPEC.prefetched:
        row_ptr = codes_ptr + row.to(tl.int64) * width
        prefetch_rows(row_ptr, inside, start, end, SPEC.prefetched)
        if SPEC.swiglu:
            prefetch_rows(row_ptr + n.to(tl.int64) * width, inside, start, end, SPEC.prefetched)
    scale, bias = row_factors(scale_ptr, bias_ptr, row, scale_row, SPEC)
    up_scale, up_bias = scale, bias
    if SPEC.swiglu:
        up_scale, up_bias = row_factors(scale_ptr, bias_ptr, row + n, scale_row, SPEC)
    return scale, bias, up_scale, up_bias


@triton.jit
def finish(total, up, residual, y_ptr, offset, inside, SPEC: tl.constexpr):
    """SwiGLU, residual, and the store."""
    if SPEC.swiglu:
        total = total / (1.0 + tl.exp(-total)) * up
    if SPEC.residual:
        total += residual.to(tl.float32)
    tl.store(y_ptr + offset, total.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def group_scales(
    scale_ptr, row, start, groups_in_all, scale_row, scale_column, SPEC: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Scales [rows, GROUPS] of the groups from unit `start` on."""
    group = start * SPEC.packing // SPEC.group + tl.arange(0, GROUPS)
    address = scale_ptr + (row // SPEC.group_rows)[:, None] * scale_row + group[None] * scale_column
    return tl.load(address, (group < groups_in_all)[None], 0.0)
