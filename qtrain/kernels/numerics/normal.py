"""Normally distributed numbers from Philox, for random projections: many vectors at once."""

import math

import torch
from torch import Tensor

from qtrain.kernels.numerics.philox import WORD, philox_ref

SALT = 0x6E6F726D << 32
"""XORed into the seed, so that no number here shares its bits with a stochastic rounding."""


def normal(keys: Tensor, count: int) -> Tensor:
    """keys int64 [B, 3] (seed, step, number) -> fp32 [B, count], standard normal.

    The Box-Muller transform: two numbers from two words of 32 random bits.
    """
    seed, step, number = (keys[:, i : i + 1] for i in range(3))
    seed = seed ^ SALT
    block = torch.arange((count + 3) // 4, device=keys.device)[None]
    words = philox_ref((block, torch.zeros_like(block), number & WORD, step & WORD), (seed & WORD, (seed >> 32) & WORD))
    uniform = [(word.double() + 0.5) * 2.0**-32 for word in words]  # [B, blocks] each
    numbers = []
    for first, second in (uniform[:2], uniform[2:]):
        radius, angle = torch.sqrt(-2 * torch.log(first)), 2 * math.pi * second
        numbers += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(numbers, dim=2).flatten(1)[:, :count].float()
