"""The leading subspace, exactly and by sketching."""

import pytest
import torch

from qtrain.optim.subspace import leading_subspace, sketch_columns


def decaying(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A matrix with singular values 1, 0.7, 0.49, ..."""
    generator = torch.Generator().manual_seed(seed)
    small = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, small, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, small, generator=generator, dtype=torch.float64)).Q
    return left * 0.7 ** torch.arange(small) @ right.mT


def sketch_of(rank: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(columns, sketch_columns(rank, rows, columns), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(60, 30), (30, 60), (30, 30)])
@pytest.mark.parametrize("rank", [1, 6, 30])
def test_randomized_finds_what_svd_finds(shape, rank):
    matrix = decaying(*shape)
    exact = leading_subspace(matrix, rank, "svd")
    found = leading_subspace(matrix, rank, "randomized", sketch_of(rank, *shape))
    assert found.shape == exact.shape == (rank, shape[1])
    for basis in (exact, found):
        torch.testing.assert_close(basis @ basis.mT, torch.eye(rank, dtype=torch.float64))
    cosines = (exact * found).sum(-1)[:6]  # row by row: the order is that of the singular values, the sign is fixed
    assert cosines.min() > 0.999


def test_a_batch_is_its_matrices():
    batch = torch.stack([decaying(20, 12, seed) for seed in range(3)]).float()
    sketches = torch.stack([sketch_of(4, 20, 12)] * 3)
    together = leading_subspace(batch, 4, "randomized", sketches)
    for matrix, sketch, found in zip(batch, sketches, together, strict=True):
        torch.testing.assert_close(found, leading_subspace(matrix, 4, "randomized", sketch), rtol=1e-4, atol=1e-5)


def test_rank_is_at_most_the_matrixs():
    assert leading_subspace(decaying(5, 9), 30, "svd").shape == (5, 9)
    assert leading_subspace(decaying(5, 9), 30, "randomized", sketch_of(30, 5, 9)).shape == (5, 9)


@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_a_gradient_of_zeros_gives_an_orthonormal_basis(method):
    found = leading_subspace(torch.zeros(12, 8), 3, method, sketch_of(3, 12, 8))
    torch.testing.assert_close(found @ found.mT, torch.eye(3))
