"""Computed shuffles: a seeded bijection on 0..n-1 in constant memory, and a counter-based hash.

A Feistel network permutes the integers below the smallest power of two that is at least n. A value outside 0..n-1 goes
through it again until it is inside ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002);
the domain is less than twice n, so that takes less than two passes on average. Any place of an epoch can be looked up
directly, which is why a stream's position is a few integers.
"""

from typing import Any

import numpy as np

MASK = (1 << 64) - 1
ROUNDS = 8

Word = Any
"""A Python integer or a uint64 array."""


def _mix(x: Word) -> Word:
    """The 64-bit finalizer of SplitMix64 (Steele, Lea, Flood 2014); Python integers and uint64 arrays alike."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK  # MASK: Python integers do not overflow, uint64 arrays do
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def hash64(*parts: int) -> int:
    """A 64-bit hash of integers; the same on every machine and in every run."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = _mix((state + 0x9E3779B97F4A7C15 & MASK) ^ _mix(part & MASK))
    return state


def uniform(*parts: int) -> float:
    """A uniform number in [0, 1) that depends on `parts` alone."""
    return (hash64(*parts) >> 11) * 2.0**-53  # 53 bits: every value is exact in fp64


class Permutation:
    """A bijection on range(n), n >= 1, keyed by the integers `key`."""

    def __init__(self, n: int, *key: int):
        assert n >= 1
        self.n = n
        bits = max((n - 1).bit_length(), 2)  # at least one bit in each half
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2
        self._keys = [hash64(*key, n, r) for r in range(ROUNDS)]  # one round key each

    def _network(self, x: Word) -> Word:
        low_mask, high_mask = (1 << self._low_bits) - 1, (1 << self._high_bits) - 1
        # Halves of unequal width where `bits` is odd: each is masked to its own.
        low, high = x & low_mask, x >> self._low_bits
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            low = low ^ (_mix(high ^ even) & low_mask)
            high = high ^ (_mix(low ^ odd) & high_mask)
        return high << self._low_bits | low

    def __call__(self, index: int) -> int:
        """The item at place `index` of the shuffled order."""
        assert 0 <= index < self.n
        index = self._network(index)
        # cycle walking; ends, since the network is a bijection
        while index >= self.n:
            index = self._network(index)
        return index

    def all(self) -> np.ndarray:
        """The whole permutation, int64 [n]: the values of all indices, vectorized."""
        values = self._network(np.arange(self.n, dtype=np.uint64))
        while len(outside := np.flatnonzero(values >= self.n)):
            values[outside] = self._network(values[outside])  # expected: under half of them are outside
        return values.astype(np.int64)
