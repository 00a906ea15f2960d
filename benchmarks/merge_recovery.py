"""How much of what adapters learn is left when they are merged into weights in low bits.

python -m benchmarks.merge_recovery

A small llama learns Python's standard library byte by byte. Its weights are then rounded to a format, as those of a
quantized checkpoint are, and adapters learn Python's manual (pydoc's topics) on them. Recovery is the fall of the
evaluation loss of the merged and rounded weights, over that of the adapters beside the rounded base: 100% where the
merge loses nothing. Adapters are trained plainly and rounded to nearest, and trained through the rounding of
`--lora '{"merge_format":FORMAT}'`, which is dithered.
"""

import copy
import os
import pydoc_data
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from qtrain.bench.tables import Cell, Table, write_asked
from qtrain.core.config import parse
from qtrain.core.process import run_script
from qtrain.models import Lora, ModelSource, add_lora, build_model, merge_lora
from qtrain.models.adapters.lora import merge_format
from qtrain.quant.export_codes import new_codes, values_of
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import Count

SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
FORMATS = ("ct_int8", "fp8_block", "ct_nvfp4", "ct_int4_g32")
LENGTH, BATCH, EVALUATED = 64, 16, 256
COLUMNS = ("base", "adapters", "plain, merged", "aware, merged", "plain", "aware")


@dataclass(frozen=True)
class RecoverySettings:
    """Compare adapters that are trained plainly and through the rounding of the merge."""

    pretrain_steps: Count = 600
    """Steps on Python's standard library."""
    steps: Count = 100
    """Steps of the adapters."""
    formats: tuple[str, ...] = FORMATS
    """Formats of the weights, as for --export_format."""
    seeds: tuple[int, ...] = (1, 2)
    """Of the adapters and of their data; one row each."""
    r: Count = 8
    """Rank of the adapters."""
    lr: float = 5e-4
    """Learning rate of the adapters."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    json: str | None = None
    """File for the figures."""


class Text:
    """Bytes of files, of which the last tenth is for evaluation."""

    def __init__(self, files: Sequence[Path], device: torch.device):
        data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        self._train, self._held_out, self._device = data[:cut], data[cut:], device

    def batch(self, generator: torch.Generator) -> Tensor:
        return self._windows(self._train, torch.randint(len(self._train) - LENGTH - 1, (BATCH,), generator=generator))

    def evaluation(self, windows: int = EVALUATED) -> Tensor:
        return self._windows(self._held_out, torch.linspace(0, len(self._held_out) - LENGTH - 1, windows).long())

    def _windows(self, data: Tensor, starts: Tensor) -> Tensor:
        windows = torch.stack([data[i : i + LENGTH + 1] for i in starts.tolist()])
        return windows.long().to(self._device)


def python_text(device: torch.device) -> Text:
    return Text(sorted(Path(os.__file__).parent.glob("*.py"))[:80], device)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids[:, :-1], ids[:, 1:].contiguous()).loss / ids[:, 1:].numel()


@torch.no_grad()
def evaluated(model: nn.Module, text: Text) -> float:
    return loss_of(model.eval(), text.evaluation()).item()


def train(model: nn.Module, text: Text, steps: int, lr: float, seed: int) -> None:
    """AdamW with a linear decay, on the parameters that train."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr, weight_decay=0.0)
    model.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        loss_of(model, text.batch(generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def rounded(model: nn.Module, name: str) -> nn.Module:
    """A copy whose linears, but for the head, have the values of their codes in a format."""
    model, fmt = copy.deepcopy(model), merge_format(name, "--formats").weight
    for linear in (m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head):
        with torch.no_grad():
            linear.weight.copy_(values_of(new_codes(linear.weight, fmt), linear.weight))
    return model


def adapted(base: nn.Module, text: Text, settings: RecoverySettings, seed: int, aware: str | None) -> nn.Module:
    model = copy.deepcopy(base)
    add_lora(model, Lora(r=settings.r, alpha=2 * settings.r, merge_format=aware), seed)
    train(model, text, settings.steps, settings.lr, seed)
    return model


def row(base: nn.Module, text: Text, settings: RecoverySettings, seed: int, name: str) -> dict[str, float]:
    """Losses, and recoveries in percent."""
    plain, aware = (adapted(base, text, settings, seed, fmt) for fmt in (None, name))
    found = {"base": evaluated(base, text), "adapters": evaluated(plain, text)}
    merge_lora(plain)
    found |= {"plain, merged": evaluated(rounded(plain, name), text), "aware, merged": evaluated(aware, text)}
    gain = found["base"] - found["adapters"]
    return found | {key: 100 * (found["base"] - found[f"{key}, merged"]) / gain for key in ("plain", "aware")}


def main(argv: list[str]) -> None:
    settings = parse(RecoverySettings, argv, "-m benchmarks.merge_recovery")
    device = choose_device(settings.device)
    for name in settings.formats:
        merge_format(name, "--formats")
    python = python_text(device)
    manual = Text([Path(pydoc_data.__file__).with_name("topics.py")], device)
    model = build_model(ModelSource("small", SHAPE, "--model"), device=device, seed=0)
    train(model, python, settings.pretrain_steps, 2e-3, 0)
    print(
        f"pretrained: loss {evaluated(model, python):.3f} on Python, {evaluated(model, manual):.3f} on its manual",
        flush=True,
    )
    title = f"Loss after {settings.steps} steps of adapters, and recovery of their gain by merged weights in low bits"
    table = Table(title, "nats a byte, %", COLUMNS)
    for name in settings.formats:
        base = rounded(model, name)
        for seed in settings.seeds:
            found = row(base, manual, settings, seed, name)
            for key, value in found.items():
                text = f"{value:.0f}%" if key in ("plain", "aware") else f"{value:.4f}"
                table.put(f"{name}, seed {seed}", key, Cell(value, text=text))
            print(f"{name}, seed {seed}: " + ", ".join(f"{k} {v:.4f}" for k, v in found.items()), flush=True)
    print(table.markdown())
    write_asked([table], settings, device)


if __name__ == "__main__":
    run_script(main)
