"""What the optimizers' tests share: a small model with every kind of parameter, gradients for it, and a task."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.optim import OPTIMIZERS, parameter_groups


class Small(nn.Module):
    """Embedding, two layers with a fused linear (tall), a wide and a square one, a vector, and an untied head."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.norm = nn.LayerNorm(8, bias=False)
        self.lm_head = nn.Linear(8, 13, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(self.norm(x))


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = {"fused": [8, 4, 8]}
        self.fused = nn.Linear(8, 20, bias=False)
        self.square = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).split([8, 4, 8], dim=-1)
        return self.down(torch.cat([torch.tanh(q) * self.square(v), torch.relu(k)], dim=-1))


def make(name: str, model: nn.Module, lr: float, weight_decay: float = 0.1, seed: int = 0, **options: Any):
    """The optimizer `name` over a model."""
    spec = OPTIMIZERS.make(name, options, "--optim")
    return spec.build(parameter_groups(model, weight_decay), lr, seed=seed)


def drive(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step and, a little, on the weights."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator) * torch.rand(p.shape, generator=generator)
            p.grad = (noise + 0.3 * p.detach().float()).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def follow(
    model: nn.Module, rule: Callable[[str, Tensor, Tensor, dict[str, Any], int], Tensor], steps: range
) -> dict[str, Tensor]:
    """The weights that `drive` leads to under a formula: rule(name, weight, gradient, its own states, step) in fp64."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    states: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for name, w in weights.items():
            noise = torch.randn(w.shape, generator=generator) * torch.rand(w.shape, generator=generator)
            gradient = noise.double() + 0.3 * w
            weights[name] = rule(name, w, gradient, states[name], step + 1)
    return weights


def assert_weights(model: nn.Module, expected: dict[str, Tensor], tolerance: float) -> None:
    """Every parameter to `tolerance` of the largest."""
    for name, p in model.named_parameters():
        error = (p.detach().double() - expected[name]).abs().max().item()
        assert error <= tolerance * expected[name].abs().max().item(), f"{name}: {error:.3g}"


def adamw(w: Tensor, g: Tensor, state: dict[str, Any], step: int, lr: float, decay: float, b1=0.9, b2=0.95, eps=1e-8):
    """AdamW's formula."""
    m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    update = m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + eps)
    return w - lr * decay * w - lr * update


def task_loss(model: nn.Module) -> Tensor:
    """Learn by heart which token follows which."""
    ids = torch.arange(13)
    return nn.functional.cross_entropy(model(ids).float(), (5 * ids + 3) % 13)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
    """Loss before and after."""
    before = task_loss(model).item()
    for _ in range(steps):
        loss = task_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, task_loss(model).item()
