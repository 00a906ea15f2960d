"""Philox4x32-7, the counter-based random generator behind every stochastic rounding, and what draws from it.

Random bits are a pure function of (seed, step, tensor, element): there is no state, a resumed run draws the same bits,
and so does a run that is sharded differently. The counter's four words are (element // 8 low, element // 8 high,
tensor, step), the key's two words are the seed. One draw of four words serves eight elements with 16 bits each, low
half first: rounding to 8 bits needs no more, and the generator is most of what stochastic rounding costs. Seven rounds
are the fewest that pass BigCrush.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
ROUNDS = 7

ROUNDED_TENSORS = ("x", "dy", "w", "update")
"""The tensors of one linear that are rounded, each with its own draws. "update": a low-bit weight's new value.

A tensor that is rounded along its rows and along its columns draws once for both: they never meet in one product.
"""
_TENSORS = tl.constexpr(len(ROUNDED_TENSORS))


def philox_ref(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> list[Tensor]:
    """Four 32-bit random words per counter. All tensors are int64 with unsigned 32-bit values, broadcastable."""
    c0, c1, c2, c3 = (word.clone() for word in torch.broadcast_tensors(*counter, *key)[:4])
    k0, k1 = key
    high = torch.empty_like(c0)
    for _ in range(rounds):  # in place: on a CPU, allocation would take longer than the arithmetic
        c0 *= MULTIPLIER_0  # may overflow into the sign; all 64 bits are right
        c2 *= MULTIPLIER_1
        c1 ^= torch.bitwise_right_shift(c2, 32, out=high)
        c1 ^= k0
        c3 ^= torch.bitwise_right_shift(c0, 32, out=high)
        c3 ^= k1
        c1 &= WORD
        c3 &= WORD
        c0, c1, c2, c3 = c1, c2, c3, c0  # c1, c3: the products' low words; their high halves are masked a round later
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    c1 &= WORD
    c3 &= WORD
    return [c0, c1, c2, c3]


def random_bits_ref(shape: torch.Size | tuple[int, ...], key: Tensor, role: int) -> Tensor:
    """16 random bits per element in row-major order, as int32.

    key: int64 [3] on the target device: seed (64 bits), step (its low 32 bits count), number of the linear; a tensor,
    so that neither a new step nor another linear recompiles anything. role: index into ROUNDED_TENSORS.
    """
    elements = torch.Size(shape).numel()
    seed, step, linear = key[0:1], key[1:2], key[2:3]
    block = torch.arange((elements + 7) // 8, device=key.device)  # one draw for eight elements
    tensor = (linear * len(ROUNDED_TENSORS) + role) & WORD  # a number of its own for each tensor of each linear
    w0, w1, w2, w3 = philox_ref((block & WORD, block >> 32, tensor, step & WORD), (seed & WORD, (seed >> 32) & WORD))
    # Little-endian: a view as int16 has the low half of each word first. [blocks, 2] int64 -> [8 * blocks].
    halves = torch.stack([w0 | (w1 << 32), w2 | (w3 << 32)], dim=1).view(torch.int16).flatten()
    return halves[:elements].int().bitwise_and_(0xFFFF).view(shape)


@triton.jit
def _wide_multiply(a, FACTOR: tl.constexpr, PTX: tl.constexpr):
    """Low and high words of a * FACTOR, uint32 each, by one 64-bit multiplication."""
    if PTX:  # Triton's compiler does not emit mul.wide here
        return tl.inline_asm_elementwise(
            "{ .reg .b64 both; mul.wide.u32 both, $2, $3; mov.b64 {$0, $1}, both; }",
            "=r,=r,r,r", [a, FACTOR], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = a.to(tl.uint64) * FACTOR
        return product.to(tl.uint32), (product >> 32).to(tl.uint32)


@triton.jit
def philox(block, seed, step, tensor, PTX: tl.constexpr, runtime_one=1):
    """block int64: indices of groups of 8 elements -> four random words uint32, as `philox_ref`; the rest int64.

    runtime_one: 1 as a runtime value keeps the draws in a loop: their instructions are not interleaved with others, and
    fewer registers are live.
    """
    c0, c1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + tensor.to(tl.uint32), tl.zeros_like(c0) + step.to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)  # scalars: the round keys cost no registers per element
    for _ in range(runtime_one):
        for _ in tl.static_range(7):
            low0, high0 = _wide_multiply(c0, 0xD2511F53, PTX)
            low1, high1 = _wide_multiply(c2, 0xCD9E8D57, PTX)
            # A round swaps the halves: high words are mixed with the neighbors and the key, low words move on.
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0 += 0x9E3779B9
            k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def philox_words(block, seed, step, tensor, PTX: tl.constexpr, runtime_one=1):
    """block int64 [R, C], as for `philox` -> words uint32 [R, C, 4]; each serves two neighbors, the first in the low
    half."""
    w0, w1, w2, w3 = philox(block, seed, step, tensor, PTX, runtime_one)
    # join appends an axis: [R, C, 2, 2] in the order of the words.
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (block.shape[0], block.shape[1], 4))


@triton.jit
def philox_key(key_ptr, role):
    """seed, step and tensor, as `philox` takes them, from a key and a role as in `random_bits_ref`."""
    return tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2) * _TENSORS + role


@triton.jit
def philox_bits(block, key_ptr, role, PTX: tl.constexpr):
    """block int64 [R, C]: indices of groups of 8 elements -> 16 random bits uint32 [R, 8 * C], as `random_bits_ref`.

    A row's blocks are consecutive, so its elements come out in order.
    """
    seed, step, tensor = philox_key(key_ptr, role)
    words = philox_words(block, seed, step, tensor, PTX)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (block.shape[0], block.shape[1] * 8))


class Rounding(NamedTuple):
    """How the codes of one tensor [M, K] are rounded. Custom ops take it unpacked: `quantize_dual(..., *rounding)`.

    key: int64 [3] on the tensor's device: seed, step, tensor number; None: both layouts to nearest even.
    role: index into `philox.ROUNDED_TENSORS`.
    rows, columns: whether the row codes, the transposed (column) codes are rounded stochastically, given a key.
    """

    key: Tensor | None
    role: int
    rows: bool = True
    columns: bool = True

    @property
    def row_key(self) -> Tensor | None:
        """Key of the row codes; None: nearest even."""
        return self.key if self.rows else None

    @property
    def column_key(self) -> Tensor | None:
        """Key of the transposed codes; None: nearest even."""
        return self.key if self.columns else None

    @property
    def same(self) -> bool:
        """Whether both layouts are rounded the same way."""
        return self.key is None or self.rows == self.columns

    def bits(self, shape: torch.Size | tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
        """16 random bits per element, int32 [M, K] = shape, for row codes and for column codes; None: nearest even."""
        if self.key is None or not (self.rows or self.columns):
            return None, None
        bits = random_bits_ref(shape, self.key, self.role)
        return (bits if self.rows else None), (bits if self.columns else None)


NEAREST = Rounding(None, 0)
"""Both layouts to nearest even."""


SALT = 0x6E6F726D << 32
"""XORed into the seed, so that no number here shares its bits with a stochastic rounding."""


def normal(keys: Tensor, count: int) -> Tensor:
    """keys int64 [B, 3] (seed, step, number) -> fp32 [B, count], standard normal.

    The Box-Muller transform: two numbers from two words of 32 random bits.
    """
    seed, step, number = (keys[:, i : i + 1] for i in range(3))
    seed = seed ^ SALT  # [B, 1]
    block = torch.arange((count + 3) // 4, device=keys.device)[None]
    words = philox_ref((block, torch.zeros_like(block), number & WORD, step & WORD), (seed & WORD, (seed >> 32) & WORD))
    uniform = [(word.double() + 0.5) * 2.0**-32 for word in words]  # [B, blocks] each
    numbers = []
    for first, second in (uniform[:2], uniform[2:]):
        # 0.5 was added above: first is never 0, and its logarithm finite.
        radius, angle = torch.sqrt(-2 * torch.log(first)), 2 * math.pi * second
        numbers += [radius * torch.cos(angle), radius * torch.sin(angle)]
    return torch.stack(numbers, dim=2).flatten(1)[:, :count].float()  # four numbers of a block are neighbors
