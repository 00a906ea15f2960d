"""How much of what rounding to a served format costs is recovered by training through it.

python -m benchmarks.qat_recovery

A small llama learns Python's standard library byte by byte. The last share of its steps is run twice, from the same
weights, optimizer states and batches: in high precision, after which the weights are rounded to the format as an export
rounds them, and in `--quantize qat`, whose weights are rounded in training. So both have seen the same tokens. Cost is
what rounding adds to the loss of the first; recovered is the share of it that the second does not have.

--distill WEIGHT adds two more ends: the finished model in high precision goes on in qat for as many steps again, with
the learning rate warmed up to a tenth of its peak, once without a teacher and once with the finished model as its
teacher. These two have seen the same tokens, more than the others: compare them with each other.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Annotated, Literal

import torch
from torch import nn

from benchmarks.merge_recovery import SHAPE, Text, loss_of, python_text, rounded
from qtrain.bench.tables import Cell, Table, write_asked
from qtrain.core.checks import Range
from qtrain.core.config import parse
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
CONTINUED = ("continued", "recovered, continued")
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
    """Weight of the divergence from the finished model, in qat that continues it; None: no such ends."""
    lr: float = 4e-3
    """Peak learning rate."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    json: str | None = None
    """File for the figures."""


Run = tuple[nn.Module, torch.optim.Optimizer]
CONTINUED_LR = 0.1
"""Of the peak learning rate: that of qat which continues a finished model."""


def train(run: Run, text: Text, seed: int, rates: Mapping[int, float], quantized: QuantizedModel) -> None:
    """Steps of AdamW. rates: number of a step -> its learning rate."""
    model, optimizer = run
    model.train()
    for step, rate in rates.items():
        optimizer.param_groups[0]["lr"] = rate
        # Keyed by the step: the ends of a run that are compared see the same batches.
        loss_of(model, text.batch(torch.Generator().manual_seed(seed * 10**6 + step))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        quantized.refresh()


def learning_rates(peak: float, steps: int, first: int = 0) -> dict[int, float]:
    """Of each of `steps` steps, numbered from `first`: 3% warm-up and a linear decay to 0."""
    return {first + i: peak * min((i + 1) / (0.03 * steps), 1 - i / steps) for i in range(steps)}


@torch.no_grad()
def evaluated(model: nn.Module, text: Text) -> float:
    return mean(loss_of(model.eval(), ids).item() for ids in text.evaluation(WINDOWS).split(256))


def finished(
    before: Run,
    text: Text,
    seed: int,
    rates: Mapping[int, float],
    weight: str | None,
    distillation: Distillation | None = None,
) -> Run:
    """A copy of `before` after the steps of `rates`; weight: of qat, None: in high precision."""
    model, optimizer = copy.deepcopy(before)  # together: the optimizer's parameters are those of the copy
    assert isinstance(model, Decoder)
    model.distillation = distillation
    scheme = SCHEMES.make("qat", {"weight": weight}, "--weights") if weight else SCHEMES.make("bf16", {}, "")
    quantized = quantize_linears(model, scheme, seed=0, head=model.get_submodule("lm_head"))
    train((model, optimizer), text, seed, rates, quantized)
    return model, optimizer


def first_step(settings: RecoverySettings) -> int:
    return round((1 - settings.share) * settings.steps)


def main(argv: list[str]) -> None:
    settings = parse(RecoverySettings, argv, "-m benchmarks.qat_recovery")
    for weight in settings.weights:
        SCHEMES.make("qat", {"weight": weight}, "--weights")
    device = choose_device(settings.device)
    text = python_text(device)
    title = f"Losses with the last {settings.share:.0%} of {settings.steps:,} steps in high precision and in qat"
    columns = COLUMNS if settings.distill is None else (*COLUMNS, *CONTINUED, *DISTILLED)
    table, recovered = Table(title, "nats a byte, %", columns), dict[str, list[float]]()
    rates, first = learning_rates(settings.lr, settings.steps), first_step(settings)
    start, end = ({i: rates[i] for i in steps} for steps in (range(first), range(first, settings.steps)))
    again = learning_rates(CONTINUED_LR * settings.lr, settings.steps - first, settings.steps)
    for seed in settings.seeds:
        model = build_model(ModelSource("small", SHAPE, "--model"), device=device, seed=seed)
        plain = quantize_linears(model, SCHEMES.make("bf16", {}, ""), seed=0)
        run = model, torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        train(run, text, seed, start, plain)
        high = finished(run, text, seed, end, None)
        loss = evaluated(high[0], text)
        for weight in settings.weights:
            after = evaluated(rounded(high[0], EXPORTS[weight]), text)
            found = {"high precision": loss, "rounded": after, "cost": after - loss}
            ends = {"qat": finished(run, text, seed, end, weight)}
            if settings.distill is not None:
                ends["continued"] = finished(high, text, seed, again, weight)
                teaching = Distillation(copy.deepcopy(high[0]), DistillOptions("-", settings.distill))
                ends["distilled"] = finished(high, text, seed, again, weight, teaching)
            for name, (trained, _) in ends.items():
                found[name] = evaluated(trained, text)
                label = "recovered" if name == "qat" else f"recovered, {name}"
                found[label] = 100 * (after - found[name]) / (after - loss)
                of_weight = weight if name == "qat" else f"{weight}, {name}"
                recovered.setdefault(of_weight, []).append(found[label])
            for key, value in found.items():
                shown = f"{value:.0f}%" if key.startswith("recovered") else f"{value:.5f}"
                table.put(f"{weight}, seed {seed}", key, Cell(value, text=shown))
            print(f"{weight}, seed {seed}: " + ", ".join(f"{k} {v:.5f}" for k, v in found.items()), flush=True)
    print(table.markdown())
    for weight, shares in recovered.items():
        spread = f" ± {stdev(shares) / len(shares) ** 0.5:.0f}%" if len(shares) > 1 else ""
        print(f"{weight}: recovered {mean(shares):.0f}%{spread} (mean over seeds, standard error)")
    write_asked([table], settings, device)


if __name__ == "__main__":
    run_script(main)
