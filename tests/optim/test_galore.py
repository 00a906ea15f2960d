"""GaLore: AdamW in rotated coordinates at full rank, its formula below that, Q-GaLore's quantization and laziness."""

import pytest
import torch

from qtrain.kernels.numerics.formats import dequantize
from qtrain.optim.galore import leading_subspace, sketch_columns
from tests.optim.problems import Small, adamw, assert_weights, drive, follow, make

LR, DECAY = 0.02, 0.1


def galore(rank: int, gap: int, scale: float):
    """The published update, part by part, with exact subspaces."""

    def of_part(w, g, state, step):
        turned = g.mT if g.shape[0] < g.shape[1] else g
        if (step - 1) % gap == 0:
            state["p"] = leading_subspace(turned, rank, "svd")
        p = state["p"]
        low = turned @ p.mT
        m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * low
        v = state["v"] = 0.95 * state.get("v", 0) + 0.05 * low * low
        back = scale * (m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)) @ p
        return w * (1 - LR * DECAY) - LR * (back.mT if g.shape[0] < g.shape[1] else back)

    def rule(name, w, g, state, step):
        if "layers" not in name:
            return adamw(w, g, state, step, LR, DECAY if w.ndim == 2 else 0.0)
        rows = [8, 4, 8] if "fused" in name else [8]
        pieces = zip(w.split(rows), g.split(rows), strict=True)
        return torch.cat([of_part(*piece, state.setdefault(i, {}), step) for i, piece in enumerate(pieces)])

    return rule


@pytest.mark.parametrize("subspace,rank", [("svd", 3), ("svd", 100), ("randomized", 100)])
def test_is_its_formula(subspace, rank):
    """With a sketch of full width, too: any basis of the whole space in the order of singular values is the one."""
    model = Small()
    expected = follow(model, galore(rank, 10, 0.5), range(60))
    options = {"rank": rank, "update_proj_gap": 10, "scale": 0.5, "subspace": subspace}
    drive(model, make("galore_adamw", model, LR, DECAY, **options), range(60))
    assert_weights(model, expected, 2e-3)


def test_at_full_rank_is_adamw_in_rotated_coordinates():
    """W·Pᵀ of one refresh moves as AdamW moves it, given G·Pᵀ."""
    model = Small()
    start = model.layers[0].down.weight.detach().clone()
    optimizer = make("galore_adamw", model, LR, 0.0, rank=100, update_proj_gap=1000, scale=1.0)
    generator, rotated, state = torch.Generator().manual_seed(0), None, {}
    for step in range(50):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        gradient = model.layers[0].down.weight.grad
        optimizer.step()
        p = optimizer.state[model.layers[0].down.weight]["projection_0"]  # [8, 8], of the turned [12, 8]
        torch.testing.assert_close(p @ p.mT, torch.eye(8), rtol=0, atol=1e-5)
        rotated = p.double() @ start.double() if rotated is None else rotated
        rotated = adamw(rotated, p.double() @ gradient.double(), state, step + 1, LR, 0.0)
    found = p.double() @ model.layers[0].down.weight.detach().double()
    torch.testing.assert_close(found, rotated, rtol=1e-4, atol=1e-4)


def test_randomized_subspaces_are_close_to_exact_ones():
    losses = {}
    for subspace in ("svd", "randomized"):
        model = Small()
        drive(model, make("galore_adamw", model, LR, DECAY, rank=4, update_proj_gap=5, subspace=subspace), range(30))
        losses[subspace] = torch.cat([p.flatten() for p in model.layers.parameters()])
    moved = losses["svd"] - torch.cat([p.flatten() for p in Small().layers.parameters()])
    assert (losses["svd"] - losses["randomized"]).norm() < 0.5 * moved.norm()


def test_states_are_of_the_low_rank():
    model = Small()
    optimizer = make("galore_adamw", model, LR, DECAY, rank=2)
    drive(model, optimizer, range(2))
    state = optimizer.state[model.layers[0].fused.weight]
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    assert shapes["exp_avg_0"] == (8, 2) and shapes["projection_1"] == (2, 4) and shapes["exp_avg_sq_2"] == (8, 2)
    assert set(shapes) == {f"{n}_{i}" for n in ("exp_avg", "exp_avg_sq", "projection") for i in range(3)} | {
        "refresh",
        "cosines",
    }


def test_q_galore_keeps_int4_projections_and_int8_moments_and_stays_close():
    exact, model = Small(), Small()
    options = {"rank": 4, "update_proj_gap": 100, "subspace": "svd"}
    drive(exact, make("galore_adamw", exact, LR, DECAY, **options), range(40))
    optimizer = make("q_galore_adamw", model, LR, DECAY, **options)
    drive(model, optimizer, range(40))
    state = optimizer.state[model.layers[0].square.weight]
    assert state["projection_0.int4.codes"].dtype == torch.uint8 and state["projection_0.int4.codes"].shape == (4, 4)
    assert next(v.dtype for k, v in state.items() if k.startswith("exp_avg_sq")) == torch.uint8
    codes, scale = state["projection_0.int4.codes"], state["projection_0.int4.scale"]
    projection = dequantize(codes, scale, "int4", "1x128", [4, 8], torch.float32)
    assert (projection @ projection.mT - torch.eye(4)).abs().max() < 0.2
    start = torch.cat([p.flatten() for p in Small().layers.parameters()])
    moved = torch.cat([p.flatten() for p in exact.layers.parameters()]) - start
    error = torch.cat([p.flatten() for p in model.layers.parameters()]) - start - moved
    assert 0 < error.norm() < 0.4 * moved.norm()


def test_lazy_refreshes_wait_longer_where_the_subspace_stands_still():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    options = {"rank": 2, "update_proj_gap": 2, "queue_size": 3, "cos_threshold": 0.9, "subspace": "svd"}
    optimizer = make("q_galore_adamw", model, LR, DECAY, **options)
    generator = torch.Generator().manual_seed(0)
    still = torch.randn(8, 8, generator=generator)
    gaps = []
    for _ in range(20):
        model[0].weight.grad = still + 0.01 * torch.randn(8, 8, generator=generator)
        model[1].weight.grad = torch.randn(8, 8, generator=generator)
        optimizer.step()
        gaps.append([optimizer.state[layer.weight]["refresh"][0, 1].item() for layer in model])
    # refreshes at steps 1, 3, 5, 7: the third cosine is known at step 7
    assert [gap for gap, _ in gaps[:6]] == [2] * 6 and gaps[6][0] == 4
    assert gaps[-1][0] > 4 and all(gap == 2 for _, gap in gaps)


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
