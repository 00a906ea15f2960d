"""Which part of a parameter a tensor rank holds: ranges of its rows or columns, side by side in the rank's own tensor.

Several projections fused in one parameter are one range each: a rank holds its heads of q, of k and of v.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """ranges: of dimension `dim`, whose length is `whole`, that this rank holds. held: whether it does; else its
    tensor, of the whole length, stays zero: a term that one rank adds for all."""

    dim: int
    whole: int
    ranges: tuple[tuple[int, int], ...]
    held: bool = True

    @classmethod
    def evenly(cls, dim: int, parts: Sequence[int], ranks: int, rank: int) -> "Split":
        """The rank's share of each of `parts`, which lie one after the other and divide by the ranks."""
        ranges, start = [], 0
        for length in parts:
            own = length // ranks
            ranges.append((start + rank * own, start + (rank + 1) * own))
            start += length
        return cls(dim, start, tuple(ranges))

    @property
    def length(self) -> int:
        """Of the rank's tensor along `dim`."""
        return sum(stop - start for start, stop in self.ranges) if self.held else self.whole

    def whole_shape(self, own: Sequence[int]) -> torch.Size:
        """Shape of the whole tensor, given that of the rank's."""
        return torch.Size([*own[: self.dim], self.whole, *own[self.dim + 1 :]])

    def take(self, whole: Tensor) -> Tensor:
        """The rank's part of a whole tensor."""
        if not self.held:
            return torch.zeros_like(whole)
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def put(self, whole: Tensor, own: Tensor) -> None:
        """The inverse: write the rank's part into a whole tensor."""
        for start, at, length in self.pieces():
            whole.narrow(self.dim, start, length).copy_(own.narrow(self.dim, at, length))

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(start in the whole, start in the rank's tensor, length) along `dim`."""
        at = 0
        for start, stop in self.ranges if self.held else ():
            if stop > start:
                yield start, at, stop - start
            at += stop - start
