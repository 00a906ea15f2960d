"""INT4 codes two per byte and ternary codes four per byte, along the last dimension, the first code in the lowest bits.

A row whose length is not a multiple of the packing is padded with codes of zero. Codes are two's complement, INT4 in
-7..7, ternary in -1..1: unpacking is a left shift and an arithmetic right shift.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.numerics.formats import FORMATS


def _pack_ref(codes: Tensor, per_byte: int) -> Tensor:
    bits = 8 // per_byte
    fields = F.pad(codes, (0, -codes.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte)).view(torch.uint8)
    packed = fields[..., 0] & (2**bits - 1)
    for i in range(1, per_byte):
        packed = packed | ((fields[..., i] & (2**bits - 1)) << (bits * i))
    return packed


def _unpack_ref(packed: Tensor, columns: int, per_byte: int) -> Tensor:
    bits = 8 // per_byte
    fields = torch.stack([packed << (8 - bits * (i + 1)) for i in range(per_byte)], dim=-1)
    return (fields.view(torch.int8) >> (8 - bits)).flatten(-2)[..., :columns].contiguous()


def pack(codes: Tensor, fmt: str) -> Tensor:
    """Codes int8 or fp8 [..., K] -> as the format stores them."""
    return codes if FORMATS[fmt].packing == 1 else _pack_ref(codes, FORMATS[fmt].packing)


def unpack(stored: Tensor, fmt: str, columns: int) -> Tensor:
    """Stored codes -> one code per element [..., K], int8 or fp8; the fp32 values where codes index a table."""
    if FORMATS[fmt].packing == 1:
        return stored
    codes = _unpack_ref(stored, columns, FORMATS[fmt].packing)
    if FORMATS[fmt].values is None:
        return codes
    # Filled on the device: a copy of the table from the host would synchronize.
    values = torch.cat([torch.full((1,), value, device=codes.device) for value in FORMATS[fmt].values])
    return values[codes.int() & 15]
