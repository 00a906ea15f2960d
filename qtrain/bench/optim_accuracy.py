"""How far optimizers with low-bit states stray from fp32 AdamW when all are fed the same gradients.

python -m qtrain.bench.optim_accuracy --steps 500

The gradients are those of a small network that fp32 AdamW trains to predict the next byte of Python's standard library:
an embedding, whose gradients are sparse, and two matrices. Every optimizer starts from the same weights and gets the
recorded gradients; the figure is |w - w_fp32| / |w_fp32 - w_start| for each weight: 0 is fp32 AdamW, 1 as far from it
as the start is. Weights are fp32, so that it is the states alone that differ.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

from qtrain.errors import UserError
from qtrain.optim import OPTIMIZERS
from qtrain.train.settings import choose_device

NAMES = (
    "adamw_8bit", "bnb.AdamW8bit", "torchao.AdamW8bit", "adamw_fp8", "torchao.AdamWFp8", "adamw_4bit",
    "torchao.AdamW4bit", "adamw_bf16_sr",
)  # fmt: skip
LR, WEIGHT_DECAY, BATCH, WIDTH, INNER = 1e-3, 0.1, 256, 64, 256


@dataclass(frozen=True)
class AccuracySettings:
    """Compare optimizers' states with fp32."""

    steps: int = 500
    """Steps."""
    beta2: tuple[float, ...] = (0.95, 0.999)
    """Decay of the second moment; a table for each."""
    names: tuple[str, ...] = NAMES
    """Optimizers, as for --optim; those whose library is missing are left out."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where."""


@dataclass(frozen=True)
class Recording:
    """A run of fp32 AdamW: the weights at its start and end, and every step's gradients."""

    start: list[Tensor]
    end: list[Tensor]
    gradients: list[list[Tensor]]
    beta2: float


def record(steps: int, beta2: float, device: torch.device) -> Recording:
    """Train the small network for some steps, with a batch of its own each."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
    generator = torch.Generator().manual_seed(0)
    shapes = [(256, WIDTH), (INNER, 2 * WIDTH), (WIDTH, INNER)]
    weights = [(torch.randn(s, generator=generator) * 0.06).to(device).requires_grad_() for s in shapes]
    start, gradients = [w.detach().clone() for w in weights], []
    optimizer = torch.optim.AdamW(weights, lr=LR, betas=(0.9, beta2), weight_decay=WEIGHT_DECAY)
    data = torch.tensor(list(text))
    for _ in range(steps):
        i = torch.randint(len(data) - 2, (BATCH,), generator=generator)
        first, second, target = (data[i + n].to(device) for n in range(3))
        hidden = torch.cat([weights[0][first], weights[0][second]], 1)
        hidden = F.relu(hidden @ weights[1].t()) @ weights[2].t()
        loss = F.cross_entropy(hidden @ weights[0].t(), target)
        optimizer.zero_grad()
        loss.backward()
        gradients.append([w.grad.clone() for w in weights])
        optimizer.step()
    return Recording(start, [w.detach() for w in weights], gradients, beta2)


def distances(name: str, recording: Recording) -> list[float]:
    """How far an optimizer ends from fp32 AdamW, for each weight."""
    spec = OPTIMIZERS.make(name, {"betas": [0.9, recording.beta2]}, "--names")
    weights = [nn.Parameter(w.clone()) for w in recording.start]
    optimizer = spec.build([{"params": weights, "weight_decay": WEIGHT_DECAY}], LR, seed=0)
    for gradients in recording.gradients:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    triples = zip(weights, recording.end, recording.start, strict=True)
    return [float((w.detach() - end).norm() / (end - start).norm()) for w, end, start in triples]


def table(recording: Recording, names: Sequence[str]) -> list[str]:
    lines = ["| | embedding | first matrix | second matrix |", "|---|---|---|---|"]
    for name in names:
        try:
            found = distances(name, recording)
        except UserError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        lines.append(f"| {name} | " + " | ".join(f"{100 * x:.2f}%" for x in found) + " |")
    return lines


def main(argv: list[str]) -> None:
    settings = tyro.cli(AccuracySettings, args=argv)
    device = choose_device(settings.device)
    for beta2 in settings.beta2:
        print(f"beta2 {beta2}, {settings.steps} steps")
        print("\n".join(table(record(settings.steps, beta2, device), settings.names)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
