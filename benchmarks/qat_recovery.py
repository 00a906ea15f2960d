"""How much of what rounding to a served format costs is recovered by training through it.

python -m benchmarks.qat_recovery

A small llama learns Python's standard library byte by byte. The last share of its steps is run twice, from the same
weights, optimizer states and batches: in high precision, after which the weights are rounded to the format as an export
rounds them, and in `--quantize qat`, whose weights are rounded in training. So both have seen the same tokens. Cost is
what rounding adds to the loss of the first; recovered is the share of it that the second does not have.

--distill WEIGHT adds a third end: qat that learns from the first one as its teacher, which has seen the same tokens.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Literal

import torch
from torch import nn

from benchmarks.merge_recovery import SHAPE, Text, loss_of, python_text, rounded
from qtrain.bench.tables import Cell, Table, about_run, write_json
from qtrain.core.checks import Range
from qtrain.core.config import parse
from qtrain.core.hardware import describe_hardware
from qtrain.core.process import run_script
from qtrain.models import Decoder, Distillation, DistillOptions, ModelSource, build_model
from qtrain.quant import SCHEMES, QuantizedModel, quantize_linears
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import Count

EXPORTS = {
    "int4_g32": "ct_int4_g32",
    "int4_g128": "ct_int4_g128",
    "int8": "ct_int8",
    "fp8_row": "ct_fp8_row",
    "nvfp4": "ct_nvfp4",
}
"""The export format of each `weight` of qat."""
WINDOWS = 2048
"""Of the evaluation, 64 bytes each."""
COLUMNS = ("high precision", "rounded", "qat", "cost", "recovered")
DISTILLED = ("distilled", "recovered, distilled")


@dataclass(frozen=True)
class RecoverySettings:
    """Compare rounding after training with training through the rounding."""

    steps: Count = 3000
    """Steps in all, of 1,024 bytes."""
    share: Annotated[float, Range(0, 1)] = 0.3
    """Share of the steps, the last ones, that train through the rounding."""
    weights: tuple[str, ...] = ("int4_g32", "int4_g128", "nvfp4")
    """Formats, as the option "weight" of --quantize qat."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of the initial weights and of the data."""
    distill: Annotated[float, Range(0, 1)] | None = None
    """Weight of the divergence from the model in high precision, in an end of its own; None: no such end."""
    lr: float = 4e-3
    """Peak learning rate."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    json: str | None = None
    """File for the figures."""


Run = tuple[nn.Module, torch.optim.Optimizer]


def train(run: Run, text: Text, settings: RecoverySettings, seed: int, steps: range, quantized: QuantizedModel) -> None:
    """AdamW, 3% warm-up and a linear decay to 0 over all of the run's steps, of which these are a part."""
    model, optimizer = run
    model.train()
    for step in steps:
        done = step / settings.steps
        optimizer.param_groups[0]["lr"] = settings.lr * min((done + 1 / settings.steps) / 0.03, 1 - done)
        # Keyed by the step: both ends of a run see the same batches.
        loss_of(model, text.batch(torch.Generator().manual_seed(seed * 10**6 + step))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        quantized.refresh()


@torch.no_grad()
def evaluated(model: nn.Module, text: Text) -> float:
    return mean(loss_of(model.eval(), ids).item() for ids in text.evaluation(WINDOWS).split(256))


def finished(
    before: Run,
    text: Text,
    settings: RecoverySettings,
    seed: int,
    weight: str | None,
    distillation: Distillation | None = None,
) -> nn.Module:
    """The model after the last share of the steps; weight: of qat, None: in high precision."""
    model, optimizer = copy.deepcopy(before)  # together: the optimizer's parameters are those of the copy
    assert isinstance(model, Decoder)
    model.distillation = distillation
    scheme = SCHEMES.make("qat", {"weight": weight}, "--weights") if weight else SCHEMES.make("bf16", {}, "")
    quantized = quantize_linears(model, scheme, seed=0, head=model.get_submodule("lm_head"))
    train((model, optimizer), text, settings, seed, range(first_step(settings), settings.steps), quantized)
    return model


def first_step(settings: RecoverySettings) -> int:
    return round((1 - settings.share) * settings.steps)


def main(argv: list[str]) -> None:
    settings = parse(RecoverySettings, argv, "-m benchmarks.qat_recovery")
    for weight in settings.weights:
        SCHEMES.make("qat", {"weight": weight}, "--weights")
    device = choose_device(settings.device)
    text = python_text(device)
    title = f"Losses with the last {settings.share:.0%} of {settings.steps:,} steps in high precision and in qat"
    columns = COLUMNS if settings.distill is None else (*COLUMNS, *DISTILLED)
    table, recovered = Table(title, "nats a byte, %", columns), {weight: [] for weight in settings.weights}
    if settings.distill is not None:
        recovered |= {f"{weight}, distilled": [] for weight in settings.weights}
    for seed in settings.seeds:
        model = build_model(ModelSource("small", SHAPE, "--model"), device=device, seed=seed)
        plain = quantize_linears(model, SCHEMES.make("bf16", {}, ""), seed=0)
        run = model, torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        train(run, text, settings, seed, range(first_step(settings)), plain)
        high = finished(run, text, settings, seed, None)
        loss = evaluated(high, text)
        for weight in settings.weights:
            after = evaluated(rounded(high, EXPORTS[weight]), text)
            qat = evaluated(finished(run, text, settings, seed, weight), text)
            recovered[weight].append(100 * (after - qat) / (after - loss))
            found = dict(zip(COLUMNS, (loss, after, qat, after - loss, recovered[weight][-1]), strict=True))
            if settings.distill is not None:
                teaching = Distillation(high, DistillOptions("-", settings.distill))
                taught = evaluated(finished(run, text, settings, seed, weight, teaching), text)
                shares = recovered[f"{weight}, distilled"]
                shares.append(100 * (after - taught) / (after - loss))
                found |= dict(zip(DISTILLED, (taught, shares[-1]), strict=True))
            for key, value in found.items():
                shown = f"{value:.0f}%" if key.startswith("recovered") else f"{value:.5f}"
                table.put(f"{weight}, seed {seed}", key, Cell(value, text=shown))
            print(f"{weight}, seed {seed}: " + ", ".join(f"{k} {v:.5f}" for k, v in found.items()), flush=True)
    print(table.markdown())
    for weight, shares in recovered.items():
        spread = f" ± {stdev(shares) / len(shares) ** 0.5:.0f}%" if len(shares) > 1 else ""
        print(f"{weight}: recovered {mean(shares):.0f}%{spread} (mean over seeds, standard error)")
    if settings.json:
        write_json([table], Path(settings.json), about_run(settings, describe_hardware(device).name))


if __name__ == "__main__":
    run_script(main)
