"""Codes of stacked matrices [E * N, K], the weights of a mixture's experts: scales of columns are those of each matrix.

Where N is a multiple of the rows that share a scale or a group (128), one call quantizes them all, in groups of equal
size. Otherwise each matrix is quantized alone, in a loop, and codes and scales are put together; the random bits of
stochastic rounding are then drawn with a tensor number of each matrix's own.
"""

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES
from qtrain.kernels.numerics.rounding import Rounding
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS, equal_groups
from qtrain.kernels.quantize.operators import quantize_dual, quantize_transposed

TENSORS_PER_MATRIX = 1 << 20
"""Distance of the tensor numbers of two matrices: more than a model has linears."""


def divides_evenly(rows: int, granularity: str, granularity_t: str) -> bool:
    """Whether blocks of `rows` rows of one matrix share no scale with the next matrix."""
    down, along = GRANULARITIES[granularity][0], GRANULARITIES[granularity_t][1]
    if granularity_t == "tensorwise":  # one scale for all matrices
        return True
    return rows % (down or 1) == 0 and rows % (along or BLOCK_ROWS) == 0


def quantize_stacked_transposed(
    w: Tensor, groups: int, fmt: str, granularity: str, rounding: Rounding, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """w [E * N, K] -> transposed codes [K, E * N] and their scale: rowwise [E * K], one per matrix and column."""
    rows = w.shape[0] // max(groups, 1)
    drawn = rounding.column_key, rounding.role
    if divides_evenly(rows, "tensorwise", granularity):
        of_block = equal_groups(groups, rows, w.device) if granularity == "rowwise" else None
        return quantize_transposed(w, fmt, granularity, *drawn, power_of_two, group_of_block=of_block, groups=groups)
    found = []
    for matrix, key in _each(w, groups, rounding.column_key, fmt):
        found.append(quantize_transposed(matrix, fmt, granularity, key, rounding.role, power_of_two))
    codes, scales = zip(*found, strict=True)
    return torch.cat(codes, 1), torch.cat(scales, scales[0].ndim - 1)


def quantize_stacked_dual(
    w: Tensor,
    groups: int,
    fmt: str,
    granularity: str,
    granularity_t: str,
    rounding: Rounding,
    power_of_two: bool = False,
    fmt_t: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w [E * N, K] -> codes [E * N, K], their scale, transposed codes [K, E * N], their scale, as `quantize_dual`."""
    rows = w.shape[0] // max(groups, 1)
    if divides_evenly(rows, granularity, granularity_t):
        of_block = equal_groups(groups, rows, w.device) if granularity_t == "rowwise" else None
        return quantize_dual(
            w, fmt, granularity, granularity_t, *rounding, power_of_two,
            fmt_t=fmt_t, group_of_block=of_block, groups=groups,
        )  # fmt: skip
    found = []
    for matrix, key in _each(w, groups, rounding.key, fmt_t or fmt):
        own = rounding._replace(key=key)
        found.append(quantize_dual(matrix, fmt, granularity, granularity_t, *own, power_of_two, fmt_t=fmt_t))
    codes, scales, codes_t, scales_t = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(scales), torch.cat(codes_t, 1), torch.cat(scales_t, scales_t[0].ndim - 1)


def _each(w: Tensor, groups: int, key: Tensor | None, fmt_t: str) -> list[tuple[Tensor, Tensor | None]]:
    """Each matrix, and its key."""
    rows = w.shape[0] // groups
    assert rows % FORMATS[fmt_t].packing == 0, f"{rows} rows are not a multiple of the {fmt_t} codes in a byte"
    keys: list[Tensor | None] = [None] * groups
    if key is not None:
        offsets = torch.arange(groups, device=key.device) * TENSORS_PER_MATRIX
        keys = list(torch.stack([key[:1].expand(groups), key[1:2].expand(groups), key[2] + offsets], dim=1))
    return list(zip(w.split(rows), keys, strict=True))
