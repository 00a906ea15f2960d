"""Formats of optimizer states: full precision, or 8 or 4 bits per element with one fp32 scale per block.

    format   block   a signed state (a momentum)       an unsigned one (a second moment)         bytes per element (*)
    fp32     -       the value                          the value                                 4
    bf16     -       the value                          the value                                 2
    fp8      128     e4m3 of 448·x/s                    e4m3 of 448·(x/s)^k, k 1 or 2, not 0       1.03
    int8     256     127·|x/s|^(1/2), with x's sign     256·(x/s)^(1/4), from 1 to 256             1.016
    int4     128     7·|x/s|^(1/2), with x's sign       16·(x/s)^(1/2), from 1 to 16               0.53

s is the block's absmax, which is stored as its scale. (*) with the scales.

The integer codes are powers of the value (companding), where bitsandbytes' dynamic map (Dettmers et al. 2022,
arXiv:2110.02861) and the 4-bit paper's (Li et al. 2023, arXiv:2309.01507) are tables. A power takes a square root and a
rounding instead of a search in a table, for which a memory-bound kernel has no time, and it is more accurate: the
dynamic map's steps jump tenfold in relative size within every decade, and half of its codes lie below 1% of the absmax.
An unsigned state is never zero in a block that is not ("without a zero point", Li et al.), because AdamW divides by its
root. fp8 expands the range as COAT does (Xi et al. 2024, arXiv:2410.19313), with one of two powers: where all of a
block lies above 1/256 of its absmax, squares fill the range of e4m3 and halve the error of the root; the scale of such
a block is stored negated.

Blocks never cross rows (dimension 0), so a state sharded by rows has the blocks of the whole; a row's last block may be
shorter. Codes are laid out like the elements; two 4-bit codes share a byte along the row, the first one in the low
bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.numerics.formats import pack, unpack

FormatName = Literal["fp32", "bf16", "fp8", "int8", "int4"]
BLOCKS = {"fp8": 128, "int8": 256, "int4": 128}
"""Formats with scales, and how many elements share one."""
SMALLEST_BLOCK = 64
"""A block is halved, down to this, if that makes it divide the row."""
SMALLEST_ABSMAX = 1e-30
"""A block below it is stored as zeros: the reciprocal would overflow."""
FP8_MAX, FP8_TINY = 448.0, 2.0**-9

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}


@dataclass(frozen=True)
class StateFormat:
    """How one state of one parameter is stored. block: elements per scale; 0 without scales."""

    name: FormatName
    signed: bool
    block: int = 0

    @property
    def id(self) -> str:
        """The name in a checkpoint: fp32, bf16, or e.g. int8_256, ufp8_128 (u: unsigned)."""
        return f"{'' if self.signed else 'u'}{self.name}_{self.block}" if self.block else self.name

    def fitted(self, shape: torch.Size) -> "StateFormat":
        """This format with a block that divides a row, if halving gives one."""
        block, length = self.block, row_shape(shape)[1]
        while block > SMALLEST_BLOCK and length % block:
            block //= 2
        return self if not self.block or length % block else replace(self, block=block)

    def parts(self, shape: torch.Size) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The tensors of a state of a parameter of `shape`, by name: (shape, dtype)."""
        dtype = self.dtype
        if not self.block:
            return {"value": (tuple(shape), dtype)}
        rows, length = row_shape(shape)
        codes = (rows, (length + 1) // 2) if self.name == "int4" else tuple(shape)
        return {"codes": (codes, dtype), "scale": ((rows, -(-length // self.block)), torch.float32)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the values or codes. An unsigned int8 state is uint8."""
        return torch.uint8 if self.name == "int8" and not self.signed else _DTYPES[self.name]


def state_format(name: FormatName, *, signed: bool, block: int | None = None) -> StateFormat:
    """The format called `name`, with its default block or the given one (a power of two, at least 64)."""
    if name not in BLOCKS:
        return StateFormat(name, signed)
    block = block or BLOCKS[name]
    assert block >= SMALLEST_BLOCK and block & (block - 1) == 0, f"a block of {block}"
    return StateFormat(name, signed, block)


def parse_format(id: str) -> StateFormat:
    """The format whose `id` this is. ValueError if there is none."""
    if id in ("fp32", "bf16"):
        return StateFormat(id, True)  # these do not tell signed from unsigned
    name, _, block = id.removeprefix("u").partition("_")
    if name not in BLOCKS or not block.isdigit() or len(block) > 6:
        raise ValueError(f"{id!r} is no format of an optimizer state; formats are {', '.join(get_args(FormatName))}")
    format = StateFormat(name, not id.startswith("u"), int(block))
    if format.block < SMALLEST_BLOCK or format.block & (format.block - 1):
        raise ValueError(f"{id!r} has a block that is no power of two from {SMALLEST_BLOCK}")
    return format


def row_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """(rows, elements per row): a vector is one row, other tensors have rows along dimension 0."""
    elements = torch.Size(shape).numel()  # 1 for a scalar
    return (1, elements) if len(shape) < 2 else (shape[0], elements // max(shape[0], 1))


# ---- definition ------------------------------------------------------------------------------------------------------


def zero_state(format: StateFormat, shape: torch.Size, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a state that is zero everywhere."""
    return {n: torch.zeros(s, dtype=d, device=device) for n, (s, d) in format.parts(shape).items()}


def quantize_state(value: Tensor, format: StateFormat, random_bits: Tensor | None = None) -> dict[str, Tensor]:
    """value fp32 -> the state's tensors, rounded to nearest even.

    random_bits: 16 per element, as int32, for stochastic rounding (signed fp8 is rounded to nearest anyway). A second
    moment changes by 1 - beta2 of itself per step; if that is less than half a code, rounding to nearest freezes it.
    """
    if format.name == "fp32":
        return {"value": value.float()}
    if format.name == "bf16":
        return {"value": round_to_bf16(value, random_bits)}
    blocks = _blocks(value.float(), format)
    bits = None if random_bits is None else _blocks(random_bits, format)
    scale = blocks.abs().amax(2)  # [rows, blocks]; a NaN or an Inf in a block shows in it
    if format.name == "fp8" and not format.signed:
        scale = torch.where(blocks.amin(2) > scale * (1 / 256), -scale, scale)
    _, length = row_shape(value.shape)
    # [rows, length]: the padding of a row's last block is cut off.
    codes = _encode(blocks, scale[:, :, None], format, bits).flatten(1)[:, :length]
    codes = pack(codes, "int4") if format.name == "int4" else codes.reshape(value.shape)
    return {"codes": codes.contiguous(), "scale": scale}


def _blocks(x: Tensor, format: StateFormat) -> Tensor:
    """x as [rows, blocks, block], the last block of a row padded with zeros."""
    rows, length = row_shape(x.shape)
    return F.pad(x.reshape(rows, length), (0, -length % format.block)).unflatten(1, (-1, format.block))


def dequantize_state(tensors: Mapping[str, Tensor], format: StateFormat, shape: torch.Size) -> Tensor:
    """The state's tensors -> value fp32 of the parameter's `shape`."""
    if not format.block:
        return tensors["value"].float()
    rows, length = row_shape(shape)
    codes = tensors["codes"]
    codes = unpack(codes, "int4", length) if format.name == "int4" else codes.reshape(rows, length)
    scale = tensors["scale"].repeat_interleave(format.block, dim=1)[:, :length]
    return _decode(codes, scale, format).reshape(shape)


def round_to_bf16(value: Tensor, random_bits: Tensor | None = None) -> Tensor:
    """fp32 -> bf16, to nearest even, or stochastically with 16 random bits per element (int32), which are added to the
    bits that are then truncated. NaN is kept."""
    if random_bits is None:
        return value.bfloat16()
    bits = value.float().contiguous().view(torch.int32)
    # The sum carries into the bits that are kept with a probability equal to the fraction that is dropped.
    bits = torch.where(value.isnan(), bits | 0x400000, bits + random_bits) & ~0xFFFF
    return bits.view(torch.float32).bfloat16()


_LEVELS = {"int8": (127.0, 256.0), "int4": (7.0, 16.0)}  # the largest code of a signed, of an unsigned state


def _encode(x: Tensor, scale: Tensor, format: StateFormat, random_bits: Tensor | None) -> Tensor:
    """x fp32 and its block's stored scale, broadcastable -> codes."""
    if format.name == "fp8":
        return _encode_fp8(x, scale, format.signed, random_bits)
    power = 2 if format.signed or format.name == "int4" else 4
    largest = _LEVELS[format.name][0 if format.signed else 1]
    if format.signed:
        y = x.abs() * _ratio(largest**2, scale)  # z = largest² * |x| / s, whose root is the code
        if random_bits is not None:
            u = _uniform(random_bits)
            y = (y - u * (1 - u)).clamp(min=0)
        y = y.sqrt()
    elif power == 2:
        y = x.sqrt() * _ratio(largest, scale.sqrt(), scale)
    else:
        y = torch.sqrt(x.sqrt() * _ratio(largest**2, scale.sqrt(), scale))
    y = y.nan_to_num(nan=0.0).clamp(max=largest)  # NaN: of a block whose scale is NaN or Inf
    if random_bits is None:
        y = y.round()
    elif format.signed:
        # Unbiased as a value; unbiased as a root, the few wide codes would drift outwards by their curvature. With z
        # from n² to (n + 1)², sqrt(z - u(1 - u)) + u reaches n + 1 for the share (z - n²) / (2n + 1) of u in 0..1.
        y = (y.copysign(x) + u).floor()
        return y.clamp(-largest, largest).to(torch.int8)
    else:  # unbiased as a root
        y = (y + _uniform(random_bits)).floor()
    return y.copysign(x).to(torch.int8) if format.signed else (y.clamp(min=1) - 1).to(torch.uint8)


def _encode_fp8(x: Tensor, scale: Tensor, signed: bool, random_bits: Tensor | None) -> Tensor:
    y = x * _ratio(1.0, scale.abs())
    if signed:
        return (y * FP8_MAX).to(torch.float8_e4m3fn)
    y = (torch.where(scale < 0, y * y, y) * FP8_MAX).nan_to_num(nan=0.0).clamp(FP8_TINY, FP8_MAX)
    if random_bits is not None:  # noise below the three mantissa bits that are kept, minus half a unit of the last
        y = (y.view(torch.int32) + (random_bits << 4) - (1 << 19)).view(torch.float32).clamp(max=FP8_MAX)
    return y.to(torch.float8_e4m3fn)


def _uniform(random_bits: Tensor) -> Tensor:
    return (random_bits.float() + 0.5) * 2.0**-16


def _ratio(numerator: float, divisor: Tensor, scale: Tensor | None = None) -> Tensor:
    """numerator / divisor; 0 for a block whose absmax counts as zero, or is NaN."""
    return torch.where((divisor if scale is None else scale) > SMALLEST_ABSMAX, numerator / divisor, 0.0)


def _decode(codes: Tensor, scale: Tensor, format: StateFormat) -> Tensor:
    """Codes and their block's stored scale -> values fp32."""
    c = codes.float()
    if format.name == "fp8":
        c = c * (1 / FP8_MAX)  # in 0..1, or -1..1
        return c * scale if format.signed else torch.where(scale < 0, c.sqrt(), c) * scale.abs()
    if format.signed:
        return c * c.abs() * (scale * (1 / _LEVELS[format.name][0] ** 2))
    largest = _LEVELS[format.name][1]
    if format.name == "int4":
        return (c % 16 + 1).square() * (scale * (1 / largest**2))  # unpacked, a code is two's complement
    square = (c + 1).square()
    return square * square * (scale * (1 / largest**4))
