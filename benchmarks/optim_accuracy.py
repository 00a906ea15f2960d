"""How far optimizers with low-bit states end from fp32 AdamW, given the same gradients.

python -m benchmarks.optim_accuracy --steps 500

The gradients are recorded from a small network that fp32 AdamW trains to predict the next byte of Python's standard
library: an embedding, whose gradients are sparse, and two matrices. Every optimizer starts from the same weights and
gets the recorded gradients. The figure is |w - w_fp32| / |w_fp32 - w_start| of each weight: 0 for fp32 AdamW, 1 for the
distance of the start. Weights are fp32, so that only the states differ.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtrain.bench.tables import Cell, Table, write_asked
from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.core.process import run_script
from qtrain.optim import OPTIMIZERS
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import Count

NAMES = (
    "adamw_8bit", "bnb.AdamW8bit", "torchao.AdamW8bit", "adamw_fp8", "torchao.AdamWFp8", "adamw_4bit",
    "torchao.AdamW4bit", "adamw_bf16_sr",
)  # fmt: skip
LR, WEIGHT_DECAY, BATCH, WIDTH, INNER = 1e-3, 0.1, 256, 64, 256


@dataclass(frozen=True)
class AccuracySettings:
    """Compare low-bit optimizer states with fp32 states."""

    steps: Count = 500
    """Optimizer steps."""
    beta2: tuple[float, ...] = (0.95, 0.999)
    """Decay rates of the second moment; one table each."""
    names: tuple[str, ...] = NAMES
    """Optimizers, as for --optim; those whose library is missing have a footnote."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    json: str | None = None
    """File for the figures."""


@dataclass(frozen=True)
class Recording:
    """A run of fp32 AdamW: the weights at its start and end, and the gradients of every step."""

    start: list[Tensor]
    end: list[Tensor]
    gradients: list[list[Tensor]]
    beta2: float


def record(steps: int, beta2: float, device: torch.device) -> Recording:
    """Train the small network for `steps` steps, each with a new batch."""
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
        gradients.append([w.grad.clone() for w in weights if w.grad is not None])
        optimizer.step()
    return Recording(start, [w.detach() for w in weights], gradients, beta2)


def distances(name: str, recording: Recording) -> list[float]:
    """The distance of an optimizer's result from fp32 AdamW's, for each weight."""
    spec = OPTIMIZERS.make(name, {"betas": [0.9, recording.beta2]}, "--names")
    weights = [nn.Parameter(w.clone()) for w in recording.start]
    optimizer = spec.build([{"params": weights, "weight_decay": WEIGHT_DECAY}], LR, seed=0)
    for gradients in recording.gradients:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    triples = zip(weights, recording.end, recording.start, strict=True)
    return [float((w.detach() - end).norm() / (end - start).norm()) for w, end, start in triples]


def accuracy_table(recording: Recording, names: Sequence[str]) -> Table:
    """The distances of the named optimizers, in percent."""
    steps, columns = len(recording.gradients), ("embedding", "first matrix", "second matrix")
    table = Table(f"Distance from fp32 AdamW after {steps} steps, beta2 {recording.beta2}", "%", columns)
    for name in names:
        try:
            cells = [Cell(100 * x, text=f"{100 * x:.2f}") for x in distances(name, recording)]
        except UserError as error:  # a library that is not installed
            cells = [Cell(reason=str(error))] * len(columns)
        for column, cell in zip(columns, cells, strict=True):
            table.put(name, column, cell)
    return table


def main(argv: list[str]) -> None:
    settings = parse(AccuracySettings, argv, "-m benchmarks.optim_accuracy")
    device, tables = choose_device(settings.device), []
    for beta2 in settings.beta2:
        tables.append(accuracy_table(record(settings.steps, beta2, device), settings.names))
        print(tables[-1].markdown() + "\n", flush=True)
    write_asked(tables, settings, device)


if __name__ == "__main__":
    run_script(main)
