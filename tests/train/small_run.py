"""A small real run to save and load: a model with everything that a checkpoint must hold, its optimizer, its steps."""

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn

from qtrain.optim import adapted
from qtrain.train.state.checkpoint import Checkpoints, read_meta
from qtrain.train.state.state_dict import model_tensors, optimizer_tensors, prepare_optimizer, rng_state, set_rng_state


class Net(nn.Module):
    """Embedding, dropout (so that generators matter), a buffer, and a head tied to the embedding."""

    def __init__(self, seed: int, width: int = 16):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.inner(nn.functional.dropout(self.embed(ids), 0.2)))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return self.head(hidden)


def adamw(model: nn.Module, **kwargs) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return adapted(torch.optim.AdamW)(groups, lr=1e-2, betas=(0.9, 0.95), **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Steps on data drawn from all three generators, so that a wrong one shows. Returns the losses."""
    losses = []
    for _ in range(steps):
        ids = torch.randint(32, (8,))
        targets = torch.tensor([random.randrange(32) for _ in range(4)] + np.random.randint(32, size=4).tolist())
        loss = nn.functional.cross_entropy(model(ids).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        losses.append(loss.item())
    return losses


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2) -> Path:
    tensors, described = optimizer_tensors(optimizer, model)
    state = {"model": model_tensors(model), "optim": tensors, "rng": rng_state()}
    return Checkpoints(folder, keep).save(step, state, {"step": step, "optim": described})


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    meta = read_meta(path)
    optim = prepare_optimizer(optimizer, model, meta["optim"])
    state = {"model": model_tensors(model), "optim": optim, "rng": rng_state()}
    assert Checkpoints.load(path, state) == meta
    set_rng_state(state["rng"])
    return meta


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
