"""Which part of a parameter a process holds: ranges of its rows or columns, side by side in the process's own tensor.

Several projections fused in one parameter are one range each: a rank holds its heads of q, of k and of v.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """A part of a parameter."""

    dim: int
    """The dimension that is split."""
    full: int
    """Its length in the full parameter."""
    ranges: tuple[tuple[int, int], ...]
    """[start, stop) of what this process holds of it."""
    held: bool = True
    """Whether it holds anything; else its tensor, of the full length, stays zero: a term that one rank adds for all."""

    @classmethod
    def evenly(cls, dim: int, parts: Sequence[int], ranks: int, rank: int) -> "Partition":
        """The rank's share of each of `parts`, which lie one after the other; each is a multiple of the ranks."""
        ranges, start = [], 0
        for length in parts:
            own = length // ranks  # heads, experts or columns of a projection
            ranges.append((start + rank * own, start + (rank + 1) * own))
            start += length
        return cls(dim, start, tuple(ranges))

    @property
    def length(self) -> int:
        """Of the rank's tensor along `dim`."""
        return sum(stop - start for start, stop in self.ranges) if self.held else self.full

    def full_shape(self, own: Sequence[int]) -> torch.Size:
        """Shape of the full tensor, given that of the rank's."""
        return torch.Size([*own[: self.dim], self.full, *own[self.dim + 1 :]])

    def local_shape(self, full: Sequence[int]) -> torch.Size:
        """The inverse."""
        return torch.Size([*full[: self.dim], self.length, *full[self.dim + 1 :]])

    def take(self, full: Tensor) -> Tensor:
        """The rank's part of a full tensor."""
        if not self.held:
            return torch.zeros_like(full)
        # Q, k and v of this rank, side by side.
        return torch.cat([full.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def put(self, full: Tensor, own: Tensor) -> None:
        """The inverse: write the rank's part into a full tensor."""
        for start, at, length in self.pieces():
            full.narrow(self.dim, start, length).copy_(own.narrow(self.dim, at, length))

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(start in the full tensor, start in the rank's tensor, length) along `dim`."""
        at = 0
        for start, stop in self.ranges if self.held else ():
            if stop > start:
                yield start, at, stop - start
            at += stop - start


@dataclass(frozen=True)
class Placement:
    """Where a parameter of an optimizer lies: in which memory, and in the parameter that it is a part of. Rows of a
    DTensor are not part of it."""

    full_shape: torch.Size | None = None
    """Of the full parameter; None: this is all of it."""
    first_element: int = 0
    """Index of the first element in the full parameter, which numbers random bits."""
    rng_offset: int = 0
    """Added to the parameter's number in Philox keys: parts of one matrix must not be rounded with the same bits."""
    device: torch.device | None = None
    """Where it is updated, if it and its gradient are in host memory between; None: where it is."""


class Parts(Protocol):
    """How processes split the parameters of a model."""

    def partition(self, name: str) -> Partition | None:
        """The part of the parameter `name` that this process holds; None: all of it."""

    def with_adapters(self, rank: int) -> "Parts":
        """The same for a model whose experts have adapters of this rank."""

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each process computes a term of the gradient of a parameter that all have."""
