"""Every optimizer, of this project or adapted from a library, answers what training asks; nothing probes attributes."""

import re

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS, Optimizer, adapted
from tests.optim.problems import Small, make
from tests.system import ROOT

NAMES = [*OPTIMIZERS.names(), "torch.AdamW", "torch.SGD"]
OPTIONS = {name: {"rank": 3, "update_proj_gap": 2} for name in ("galore_adamw", "q_galore_adamw")}


def with_gradients(seed: int = 0) -> Small:
    model = Small()
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_clipping_is_that_of_torch(name):
    ours, theirs = with_gradients(), with_gradients()
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
    optimizers = [make(name, model, 0.01, **OPTIONS.get(name, {})) for model in (ours, theirs)]
    optimizers[0].clip_gradients(norm, 0.25)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.25)
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_train_restores_what_eval_changed(name):
    model = with_gradients()
    optimizer = make(name, model, 0.01, **OPTIONS.get(name, {}))
    for _ in range(3):
        optimizer.step()
    trained = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))
    assert isinstance(optimizer, Optimizer) and same != optimizer.averages_weights
    optimizer.train()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))


def test_a_librarys_states_are_checked_and_restored_where_they_were():
    model = with_gradients()
    optimizer = adapted(torch.optim.AdamW)(model.parameters(), lr=0.01)
    optimizer.step()
    p = model.embed.weight
    assert type(optimizer).__name__ == "AdamW"  # as checkpoints name it
    assert optimizer.state_device("step", p, True).type == "cpu" and optimizer.state_device("x", p, False) == p.device
    names = {q: name for name, q in model.named_parameters()}
    assert optimizer.adopt_states(names) == []
    optimizer.state[p]["exp_avg"][0, 0] = torch.inf
    with pytest.raises(UserError, match=r"--resume: the optimizer state exp_avg of embed\.weight holds NaN or Inf"):
        optimizer.adopt_states(names)


def test_nothing_probes_an_optimizer_for_attributes():
    probe = re.compile(r"\b(?:has|get)attr\(\s*(?:self\.|run\.)?_?optimizer\b")
    files = [*(ROOT / "qtrain").rglob("*.py"), *ROOT.glob("*.py")]
    assert [str(path) for path in files if probe.search(path.read_text())] == []
