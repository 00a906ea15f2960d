"""Routings and operands that the tests of grouped operations share."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from qtrain.kernels.grouped.token_permutation import TokenPermutation, group_rows
from tests.kernels.gemm.test_scaled_mm import codes

ROUTINGS = ("random", "one_group", "one_row", "some_empty")


def routed(routing: str, groups: int = 4, tokens: int = 150, device: str = "cpu") -> TokenPermutation:
    """Rows of two routes a token; "one_row": of one route in all."""
    generator = torch.Generator().manual_seed(len(routing))
    if routing == "one_row":
        experts = torch.tensor([[groups - 1]])
    elif routing == "one_group":
        experts = torch.full((tokens, 2), 1)
    else:
        within = groups if routing == "random" else groups // 2
        experts = torch.rand(tokens, within, generator=generator).topk(2).indices * (groups // within)
    return group_rows(experts.to(device), groups)


def spans(g: TokenPermutation) -> list[tuple[int, int, int]]:
    """(group, its first row, its last row + 1)."""
    return [(group, *span) for group, span in enumerate(itertools.pairwise(g.starts.tolist()))]


def rows_operands(g: TokenPermutation, n: int, k: int, dtypes, role: str, seed: int = 0, tensorwise: bool = False):
    """A [R, K], B of the role, scale_a, scale_b."""
    device = g.starts.device.type
    shape = (g.count * n, k) if role == "output" else (n, g.count * k)
    a, b = codes(g.rows, k, dtypes[0], seed, device), codes(*shape, dtypes[1], seed + 1, device)
    return a, b, *scales(seed, device, *((1, 1) if tensorwise else (g.rows, g.count * n)))


def sums_operands(g: TokenPermutation, n: int, k: int, dtypes, seed: int = 0, tensorwise: bool = False):
    """A [N, R], B [K, R], scale_a, scale_b."""
    device = g.starts.device.type
    a, b = codes(n, g.rows, dtypes[0], seed, device), codes(k, g.rows, dtypes[1], seed + 1, device)
    return a, b, *scales(seed, device, *((1, 1) if tensorwise else (g.count * n, g.count * k)))


def scales(seed: int, device: str, *sizes: int) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.rand(size, generator=generator, device=device) * 1e-2 + 1e-3 for size in sizes]


def expected_and_size(definition: Callable[..., Tensor], a: Tensor, b: Tensor, *rest: Tensor | str) -> list[Tensor]:
    """The definition's result and its sums of magnitudes, fp32 on a's device: computed on the CPU."""
    a_cpu, b_cpu = a.cpu(), b.cpu()
    magnitudes = [t.float().abs().to(t.dtype) for t in (a_cpu, b_cpu)]
    rest = tuple(t.cpu() if isinstance(t, Tensor) else t for t in rest)
    return [definition(*pair, *rest, torch.float32).to(a.device) for pair in ((a_cpu, b_cpu), magnitudes)]


def matrix_of(b: Tensor, group: int, k: int, groups: int) -> Tensor:
    """A group's [N, K] of a stacked operand: by rows where its rows have K columns, else by columns."""
    if b.shape[1] == k:
        return b[group * (len(b) // groups) : (group + 1) * (len(b) // groups)]
    return b[:, group * k : (group + 1) * k].contiguous()
