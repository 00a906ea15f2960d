"""SGD against torch's, Lion against its paper, with decay that is decoupled."""

import pytest
import torch

from tests.optim.problems import Small, assert_weights, drive, follow, make

LR, DECAY = 0.02, 0.1


@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torchs(momentum, nesterov):
    model, theirs = Small(), Small()
    drive(model, make("sgd", model, LR, 0.0, momentum=momentum, nesterov=nesterov), range(60))
    drive(theirs, torch.optim.SGD(theirs.parameters(), lr=LR, momentum=momentum, nesterov=nesterov), range(60))
    assert_weights(model, {name: p.detach().double() for name, p in theirs.named_parameters()}, 1e-5)


def test_sgd_decays_weights_and_not_its_momentum():
    def rule(name, w, g, state, step):
        state["m"] = 0.9 * state.get("m", 0) + g
        return w * (1 - LR * (DECAY if w.ndim == 2 else 0)) - LR * state["m"]

    model = Small()
    expected = follow(model, rule, range(60))
    drive(model, make("sgd", model, LR, DECAY), range(60))
    assert_weights(model, expected, 1e-5)


def test_sgd_without_momentum_keeps_no_state():
    model = Small()
    optimizer = make("sgd", model, LR, momentum=0.0)
    drive(model, optimizer, range(2))
    assert {key for state in optimizer.state.values() for key in state} == {"step"}


def test_lion_is_its_formula():
    def rule(name, w, g, state, step):
        m = state.get("m", torch.zeros_like(w))
        state["m"] = 0.99 * m + 0.01 * g
        return w * (1 - LR * (DECAY if w.ndim == 2 else 0)) - LR * (0.9 * m + 0.1 * g).sign()

    model = Small()
    expected = follow(model, rule, range(20))
    drive(model, make("lion", model, LR, DECAY), range(20))
    assert_weights(model, expected, 1e-5)
