"""Philox4x32-10, the counter-based random generator behind every stochastic rounding.

Random bits are a pure function of (seed, step, tensor, element): nothing is stored, a resumed run draws the same bits,
and so does a run that is sharded differently. The counter's four words are (element // 8 low, element // 8 high,
tensor, step), the key's two words are the seed. One draw of four words serves eight elements with 16 bits each, low
half first: rounding to 8 bits needs no more, and the arithmetic of the draw is what stochastic rounding costs.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton

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


ROLES = ("x rows", "x columns", "dy rows", "dy columns", "w rows", "w columns")
"""The tensors of one linear that are rounded: each draws under its own number."""


def uniform_ref(shape: torch.Size | tuple[int, ...], key: Tensor, role: int) -> Tensor:
    """Uniform fp32 numbers in (0, 1), one per element in row-major order.

    key: int64 [3] on the target device: seed (64 bits), step (the lower 32 count), number of the linear; a tensor, so
    that neither a new step nor another linear recompiles anything. role: index into ROLES. 16 random bits each, centred
    in their interval, so that no number is 0 or 1 and their mean is exactly one half.
    """
    elements = torch.Size(shape).numel()
    seed, step, linear = key[0:1], key[1:2], key[2:3]
    block = torch.arange((elements + 7) // 8, device=key.device)
    tensor = (linear * len(ROLES) + role) & WORD
    words = philox_ref((block & WORD, block >> 32, tensor, step & WORD), (seed & WORD, (seed >> 32) & WORD))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack(halves, dim=1).flatten()[:elements]
    return ((bits.float() + 0.5) * 2.0**-16).view(shape)


@triton.jit
def philox_uniform(block, key_ptr, role, N_ROLES: tl.constexpr):
    """block int64 [R, C]: numbers of 8 elements each -> uniform fp32 [R, 8 * C], the same as `uniform_ref`'s.

    A row's blocks are consecutive, so its elements come out in their order.
    """
    seed, step, linear = tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2)
    tensor = (linear * N_ROLES + role).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block.to(tl.uint32), (block >> 32).to(tl.uint32), tensor, step.to(tl.uint32), 10)
    # join makes a new last axis: the words, then the halves, in the order of elements.
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [R, C, 2, 2]
    bits = tl.join(pairs & 0xFFFF, pairs >> 16)  # [R, C, 2, 2, 2]
    bits = tl.reshape(bits, (block.shape[0], block.shape[1] * 8))
    return (bits.to(tl.float32) + 0.5) * (1.0 / 65536.0)
