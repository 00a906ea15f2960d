"""The subspace of a matrix's leading right singular vectors, by a full SVD or by random sketching."""

from typing import Literal

import torch
from torch import Tensor

Method = Literal["randomized", "svd"]

OVERSAMPLING, POWER_ITERATIONS = 8, 2


def leading_subspace(matrix: Tensor, rank: int, method: Method, sketch: Tensor | None = None) -> Tensor:
    """matrix [..., R, C] -> orthonormal rows [..., min(rank, R, C), C], strongest first, in fp32 or wider.

    "svd" decomposes the whole matrix, which takes seconds per layer at a billion parameters. "randomized" needs matrix
    products only: two power iterations on `sketch` [..., C, at least rank] of random numbers (Halko, Martinsson, Tropp
    2011, arXiv:0909.4061, algorithm 4.4), then the singular vectors of the matrix restricted to that basis.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    rank = min(rank, *matrix.shape[-2:])
    if method == "svd":
        return _signed(torch.linalg.svd(matrix, full_matrices=False).Vh[..., :rank, :])
    assert sketch is not None
    basis = sketch.to(matrix.dtype)
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix.mT @ (matrix @ basis)).Q
    sketched = matrix @ basis  # [..., R, columns of the sketch]
    order = torch.linalg.eigh(sketched.mT @ sketched).eigenvectors.flip(-1)  # eigenvalues ascend
    return _signed((basis @ order[..., :rank]).mT)


def _signed(rows: Tensor) -> Tensor:
    """Each row with the sign that makes its largest element positive: a decomposition does not determine the sign."""
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    return (rows * largest.sign()).contiguous()


def sketch_columns(rank: int, rows: int, columns: int) -> int:
    """Columns of the sketch that `leading_subspace` needs for a matrix [rows, columns]."""
    return min(rank + OVERSAMPLING, rows, columns)
