"""The largest scores of each row, in the order of a stable sort."""

import pytest
import torch

from qtrain.kernels.grouped.topk import launch_topk, topk, topk_ref

INF, NAN = float("inf"), float("nan")


def stress_scores(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Few distinct values, zeros of both signs, and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, columns, generator=generator)
    scores[::3] = (scores[::3] * 2).round()  # many ties
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, -NAN, 1e-40, -1e-40])
    where = torch.rand(rows, columns, generator=generator) < 0.1
    where[:1] = False
    scores[where] = special[torch.randint(len(special), (int(where.sum()),), generator=generator)]
    scores[-1:] = 0.5
    return scores


def check_kernel(device: str, shapes: list[tuple[int, int, int]]) -> None:
    for rows, columns, count in shapes:
        scores = stress_scores(rows, columns, rows + columns)
        found = launch_topk(scores.to(device), count)
        assert found.dtype == torch.int64 and torch.equal(found.cpu(), topk_ref(scores, count)), (rows, columns)


def test_by_hand():
    scores = torch.tensor([[1.0, 3.0, 3.0, -INF], [-0.0, 0.0, NAN, INF]])
    assert topk(scores, 3).tolist() == [[1, 2, 0], [2, 3, 0]]
    assert topk(scores[:0], 2).shape == (0, 2)
    assert torch.equal(topk(torch.zeros(300, 128), 8), torch.arange(8).expand(300, 8))


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu", [(5, 8, 2), (40, 128, 8), (3, 60, 6), (1, 1, 1), (2, 3000, 4), (0, 8, 2)])


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_kernel("cuda", [(5, 8, 2), (16384, 128, 8), (1000, 60, 6), (1, 1, 1), (2, 3000, 4), (777, 256, 8), (0, 8, 2)])


def test_operator():
    torch.library.opcheck(topk, (torch.randn(5, 8), 2))
