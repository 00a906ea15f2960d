"""APOLLO-Mini against the published loop, one matrix at a time in fp64."""

import math

import pytest
import torch

from qtrain.kernels.numerics.philox import normal
from qtrain.optim.matrix_optimizer import MAX_PROJECTIONS
from tests.optim.problems import Small, adamw, assert_weights, drive, follow, make

LR, DECAY, SEED = 0.01, 0.1, 3


def apollo(model: Small, gap: int, scale: float):
    hidden = [name for name, _ in model.named_parameters() if "layers" in name]
    kinds = {name: "fused" in name for name in hidden}
    order = sorted(hidden, key=lambda name: not kinds[name])  # groups: the fused ones came first in the model

    def of_part(w, g, state, step, number):
        turned = g if g.shape[0] >= g.shape[1] else g.mT
        random = normal(torch.tensor([[SEED, (step - 1) // gap, number]]), turned.shape[1])[0].double()
        low = turned @ random
        m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * low
        v = state["v"] = 0.95 * state.get("v", 0) + 0.05 * low * low
        scaled = g * ((m / (v.sqrt() + 1e-8)).norm() / (low.norm() + 1e-8))
        norm = scaled.norm()
        if "norm" in state:
            limiter = max(norm / (state["norm"] + 1e-8), 1.01) / 1.01
            scaled, norm = scaled / limiter, norm / limiter
        state["norm"] = norm
        rate = LR * math.sqrt(1 - 0.95**step) / (1 - 0.9**step)
        return w * (1 - LR * DECAY) - rate * math.sqrt(scale) * scaled

    def rule(name, w, g, state, step):
        if "layers" not in name:
            return adamw(w, g, state, step, LR, DECAY if w.ndim == 2 else 0.0)
        rows = [8, 4, 8] if kinds[name] else [8]
        number = order.index(name) * MAX_PROJECTIONS
        pieces = zip(w.split(rows), g.split(rows), strict=True)
        return torch.cat([of_part(*p, state.setdefault(i, {}), step, number + i) for i, p in enumerate(pieces)])

    return rule


@pytest.mark.parametrize("gap", [200, 7])
def test_is_its_formula(gap):
    model = Small()
    expected = follow(model, apollo(model, gap, 16.0), range(60))
    drive(model, make("apollo_mini", model, LR, DECAY, SEED, update_proj_gap=gap, scale=16.0), range(60))
    assert_weights(model, expected, 1e-3)


def test_states_are_vectors():
    model = Small()
    optimizer = make("apollo_mini", model, LR, DECAY)
    drive(model, optimizer, range(2))
    state = optimizer.state[model.layers[0].down.weight]
    assert {key: value.numel() for key, value in state.items()} == {"exp_avg_0": 12, "exp_avg_sq_0": 12, "norm_0": 1}
