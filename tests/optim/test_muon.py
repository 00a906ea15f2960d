"""Muon: torch's own on whole matrices, the formula with parts, AdamW on the rest."""

import pytest
import torch
from torch.optim import _muon

from qtrain.optim.muon import adjustment
from qtrain.optim.newton_schulz import newton_schulz
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
