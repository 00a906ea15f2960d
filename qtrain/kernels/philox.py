"""Philox4x32-10, the counter-based random generator behind every stochastic rounding.

Random bits are a pure function of (seed, step, tensor, element): nothing is stored, a resumed run draws the same bits,
and so does a run that is sharded differently. The counter's four words are (element // 4 low, element // 4 high,
tensor, step), the key's two words are the seed; the element takes word `element % 4` of the four that come out.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
ROUNDS = 10


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit words of a * b. The int64 product may wrap its sign, which leaves all 64 bits right."""
    product = a * b
    return (product >> 32) & WORD, product & WORD


def philox_ref(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Four 32-bit random words per counter. All tensors are int64 that hold unsigned 32-bit values, broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIER_0)
        high1, low1 = _multiply(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def uniform_ref(shape: torch.Size | tuple[int, ...], seed: Tensor, step: Tensor, tensor_id: int) -> Tensor:
    """Uniform fp32 numbers in (0, 1), one per element in row-major order.

    seed, step: int64 scalars on the target device (tensors, so that a new step recompiles nothing); seed uses 64 bits,
    step the lower 32. tensor_id: which tensor of the step this is. 24 random bits each, centred in their interval.
    """
    elements = torch.Size(shape).numel()
    block = torch.arange((elements + 3) // 4, device=seed.device)
    tensor_word = torch.full_like(block[:1], tensor_id) & WORD
    words = philox_ref((block & WORD, block >> 32, tensor_word, step & WORD), (seed & WORD, (seed >> 32) & WORD))
    bits = torch.stack(words, dim=1).flatten()[:elements] >> 8
    return ((bits.float() + 0.5) * 2.0**-24).view(shape)
