"""NF4: 4-bit codes of a weight that is about normally distributed (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

Sixteen values in [-1, 1] at quantiles of the normal distribution, 0 among them. A block of 64 along a row has an fp32
scale, its absmax; value = table[code] * absmax. Two codes a byte, the low nibble first; a row's last block may be
shorter. 4.5 bits an element. There is nothing to multiply in this format: it is dequantized where it is read.

Plain PyTorch: inside a compiled layer it is one kernel that reads half a byte and writes two.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of the codes 0 to 15, as bitsandbytes has them."""


def nf4_table(device: torch.device | str) -> Tensor:
    """TABLE as fp32 [16]."""
    return torch.tensor(TABLE, dtype=torch.float32, device=device)


def quantize_nf4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] -> codes uint8 [N, ceil(K / 2)], scale fp32 [N, ceil(K / 64)]; to the nearest value."""
    columns = x.shape[1]
    blocks = F.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(dim=2)
    table = nf4_table(x.device)
    unit = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    codes = (
        torch.bucketize(unit.contiguous(), (table[1:] + table[:-1]) / 2)
        .to(torch.uint8)
        .flatten(1)[:, : columns + columns % 2]
    )
    return codes[:, ::2] | codes[:, 1::2] << 4, scale


def dequantize_nf4(codes: Tensor, scale: Tensor, table: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The values [N, columns] in `dtype`; table * scale is computed in fp32 and rounded once."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)[:, :columns]
    values = table[pairs.int()]
    if columns % BLOCK == 0:
        return (values.unflatten(1, (-1, BLOCK)) * scale.unsqueeze(2)).flatten(1).to(dtype)
    return (values * scale.repeat_interleave(BLOCK, dim=1)[:, :columns]).to(dtype)
