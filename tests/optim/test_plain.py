"""Optimizers as functions of parameters, as a training loop of one's own calls them."""

import inspect

import pytest
import torch
from torch import nn

from qtrain import optim
from qtrain.core.errors import UserError
from qtrain.optim.registry import OPTIMIZERS, parameter_groups

FUNCTIONS = {
    name: made for name in optim.__all__ if inspect.isfunction(made := getattr(optim, name)) and name[0].isupper()
}
OF_MATRICES = {"Muon", "GaLoreAdamW", "QGaLoreAdamW", "ApolloMini"}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def test_every_registered_optimizer_has_a_function():
    assert len(FUNCTIONS) == len(OPTIMIZERS.names())
    assert all(made.__name__ == name and made.__doc__ for name, made in FUNCTIONS.items())


REGISTERED = {
    "AdamW": "adamw",
    "AdamW4bit": "adamw_4bit",
    "AdamW8bit": "adamw_8bit",
    "AdamWBf16SR": "adamw_bf16_sr",
    "AdamWFp8": "adamw_fp8",
    "AdamWScheduleFree": "adamw_schedule_free",
    "ApolloMini": "apollo_mini",
    "GaLoreAdamW": "galore_adamw",
    "Lion": "lion",
    "Muon": "muon",
    "QGaLoreAdamW": "q_galore_adamw",
    "SGD": "sgd",
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_of_a_model_it_is_the_registered_one(name):
    ours, theirs = model(), model()
    built = FUNCTIONS[name](ours, 1e-2, weight_decay=0.1, seed=5)
    twin = OPTIMIZERS.make(REGISTERED[name], {}, "").build(parameter_groups(theirs, 0.1), 1e-2, 5)
    assert isinstance(built, torch.optim.Optimizer)
    assert all(torch.equal(a, b) for a, b in zip(train(ours, built), train(theirs, twin), strict=True))


def test_adamw_is_torchs():
    ours, theirs = model(), model()
    built = optim.AdamW(ours.parameters(), 1e-2, weight_decay=0.1, betas=[0.9, 0.99])
    torchs = torch.optim.AdamW(theirs.parameters(), 1e-2, weight_decay=0.1, betas=(0.9, 0.99))
    for a, b in zip(train(ours, built), train(theirs, torchs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - OF_MATRICES))
def test_parameters_pairs_and_groups_are_equal(name):
    of = {
        "parameters": lambda net: net.parameters(),
        "pairs": lambda net: net.named_parameters(),
        "groups": lambda net: [{"params": [p]} for p in net.parameters()],
    }
    found = []
    for given in of.values():
        net = model()
        found.append(train(net, FUNCTIONS[name](given(net), 1e-2)))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", sorted(OF_MATRICES))
def test_an_optimizer_of_matrices_takes_the_model(name):
    with pytest.raises(TypeError, match=f"{name} treats matrices of hidden layers"):
        FUNCTIONS[name](model().parameters(), 1e-2)


def test_mistakes():
    with pytest.raises(UserError, match=r"AdamW8bit.*blok.*Did you mean 'block'"):
        optim.AdamW8bit(model(), 1e-3, blok=64)
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW8bit([], 1e-3)


def test_a_scheduler_and_a_state_dict_work():
    net, again = model(), model()
    optimizer = optim.AdamW8bit(net, 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(net, optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
    again.load_state_dict(net.state_dict())
    other = optim.AdamW8bit(again, 1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(train(net, optimizer), train(again, other), strict=True))
