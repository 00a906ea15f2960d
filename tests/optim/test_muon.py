"""Muon: torch's own on whole matrices, the formula with parts, AdamW on the rest."""

import pytest
import torch
from torch.optim import _muon
from torch.optim._muon import _zeropower_via_newtonschulz

from qtrain.optim.muon import COEFFICIENTS, adjustment, newton_schulz
from tests.optim.problems import Small, adamw, assert_weights, drive, follow, make

LR, DECAY = 0.02, 0.1


def rule(adjust: str, nesterov: bool = True, rest_scale: float = 1.0):
    def step_of(name, w, g, state, step):
        if "layers" not in name:
            lr = LR * rest_scale
            return adamw(w, g, state, step, lr, DECAY if w.ndim == 2 else 0.0)
        m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
        update = 0.05 * g + 0.95 * m if nesterov else m
        parts = update.split([8, 4, 8]) if "fused" in name else [update]
        done = [newton_schulz(part[None])[0] * adjustment(*part.shape, adjust) for part in parts]
        return w * (1 - LR * DECAY) - LR * torch.cat(done)

    return step_of


@pytest.mark.parametrize("options", [{}, {"adjust": "spectral", "nesterov": False}, {"adjust": "none"}])
def test_is_its_formula(options):
    model = Small()
    expected = follow(model, rule(options.get("adjust", "match_rms"), options.get("nesterov", True)), range(60))
    drive(model, make("muon", model, LR, DECAY, **options), range(60))
    assert_weights(model, expected, 2e-4)


def test_rate_of_the_rest():
    model = Small()
    expected = follow(model, rule("match_rms", rest_scale=0.1), range(20))
    drive(model, make("muon", model, LR, DECAY, rest_lr_scale=0.1), range(20))
    assert_weights(model, expected, 1e-4)


@pytest.mark.parametrize("adjust,torchs", [("spectral", "original"), ("match_rms", "match_rms_adamw")])
def test_is_torchs_muon(adjust, torchs, monkeypatch):
    """torch's iterates in bf16; given fp32 there, they agree."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    ours, theirs = torch.nn.Sequential(torch.nn.Linear(12, 8, bias=False)), torch.nn.Linear(12, 8, bias=False)
    theirs.weight.data.copy_(ours[0].weight.data)
    optimizer = make("muon", ours, LR, DECAY, adjust=adjust)
    reference = torch.optim.Muon(theirs.parameters(), lr=LR, weight_decay=DECAY, adjust_lr_fn=torchs)
    assert (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C) == (3.4445, -4.7750, 2.0315)
    drive(ours, optimizer, range(50))
    drive(theirs, reference, range(50))
    torch.testing.assert_close(ours[0].weight, theirs.weight, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("state,near", [("bf16", 0.02), ("int8", 0.1)])
def test_low_bit_momentum_stays_close(state, near):
    exact, model = Small(), Small()
    drive(exact, make("muon", exact, LR, DECAY), range(60))
    drive(model, make("muon", model, LR, DECAY, state=state), range(60))
    weight, expected = model.layers[0].square.weight, exact.layers[0].square.weight
    moved = (expected - Small().layers[0].square.weight).norm()
    assert 0 < (weight - expected).norm() < near * moved


def quintic(x: float, steps: int = 5) -> float:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("shape", [(3, 17, 40), (2, 40, 17), (1, 24, 24), (2, 1, 9)])
def test_maps_every_singular_value_by_the_quintic(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    mapped = (s / s.norm(dim=-1, keepdim=True)).apply_(quintic)
    torch.testing.assert_close(newton_schulz(x), u * mapped.unsqueeze(-2) @ vh, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(newton_schulz(x.float()).double(), newton_schulz(x), rtol=1e-4, atol=1e-4)


def test_is_torchs_for_one_matrix_in_bf16():
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    expected = _zeropower_via_newtonschulz(x, COEFFICIENTS, 5, 1e-7).float()
    found = newton_schulz(x.bfloat16()[None])[0].float()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)


def test_zero_stays_zero():
    assert not newton_schulz(torch.zeros(2, 4, 6)).any()
