"""What fits which card, and how fast it is by the plan: a table of models and methods by GPUs, on no GPU at all.

python -m qtrain.bench.resources --cards 4090,h100 --models qwen2.5-7b,qwen2.5-14b

Every cell is what `--fit auto` chooses for a batch of 524,288 tokens: sequences a micro-batch, GiB of the card and of
the host's pinned memory, tokens per second. The speed assumes that each card reaches the fraction of its speed of light
that was measured on an H200.
"""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from qtrain.bench.arguments import split_list
from qtrain.bench.tables import Cell, Table, about_run, figures_path, write_json
from qtrain.bench.training_cell import CellSettings
from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.core.hardware.device import datasheet_hardware
from qtrain.core.process import run_script
from qtrain.models import as_lora, read_model_source
from qtrain.train.assembly.assemble import trained_part
from qtrain.train.assembly.frozen_base import frozen_base
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import fit_memory, prepare
from qtrain.train.log.status import short_number
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.plan.plan import GIB, Plan
from qtrain.train.settings.listing import listing
from qtrain.train.settings.settings import Count, LanguageSettings

TOKENS = 2**19
FULL = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "quantize_lm_head": True}
METHODS: dict[str, Mapping[str, Any]] = {
    "full, FP8": FULL,
    "full, FP8, 8-bit states": {**FULL, "optim": "adamw_8bit"},
    "LoRA, bf16 base": {"lora": {}},
    "LoRA, fp8 base": {"lora": {"base": "fp8"}},
    "LoRA, nf4 base": {"lora": {"base": "nf4"}},
}
"""Name -> settings. In INT8 where the card has no FP8."""
FEWEST_CELLS = 12
"""That are worth the start of other processes."""


@dataclasses.dataclass(frozen=True)
class ResourceSettings:
    """Plan models on GPUs that need not be here: what fits, with which settings, how fast."""

    models: str = "qwen2.5-0.5b,qwen2.5-1.5b,qwen2.5-3b,qwen2.5-7b,qwen2.5-14b,qwen2.5-32b"
    """Models, separated by commas; --list shows all."""
    cards: str = "3090,4090,5090,l40s,pro-6000,a100,h100,h200"
    """GPUs, separated by commas."""
    seq_len: Count = 1024
    """Tokens per sequence."""
    json: str | None = None
    """JSON file to write the results to; None: runs/resources/TIME.json."""


def main(argv: list[str]) -> None:
    settings = parse(ResourceSettings, argv, "-m qtrain.bench.resources", listing)
    table = resource_table(settings)
    print(table.markdown())
    path = figures_path(settings, "resources")
    write_json([table], path, about_run(settings, "planned, on no GPU"))
    print(f"figures     {path}", file=sys.stderr)


def resource_table(settings: ResourceSettings) -> Table:
    cards = split_list(settings.cards)
    for card in cards:
        datasheet_hardware(card, "--cards")
    columns = {card: f"{card}, {(datasheet_hardware(card).memory_bytes or 0) / GIB:.0f} GiB" for card in cards}
    table = Table(
        "Planned on one GPU",
        "sequences a micro-batch, GiB (+ of the host's memory), tokens/s",
        list(columns.values()),
        [
            "norm, ...: recomputed; o, r, w: optimizer states, residuals, weights (with gradients, if they train) on "
            "the host, whose memory is taken to be enough; -: does not fit"
        ],
    )
    models = split_list(settings.models)
    for model in models:
        read_model_source(model, "--models").model_config()
    rows = list(itertools.product(models, METHODS))
    for (model, method), cells in zip(rows, _planned_rows(rows, cards, settings.seq_len), strict=True):
        for column, cell in zip(columns.values(), cells, strict=True):
            table.put(f"{model}, {method}", column, cell)
    return table


def _planned_rows(rows: Sequence[tuple[str, str]], cards: Sequence[str], seq_len: int) -> list[list[Cell]]:
    """The cells of each row, a model and a method; several processes plan what takes seconds a cell."""
    plan_row = functools.partial(_planned_row, cards=cards, seq_len=seq_len)
    workers = min(os.cpu_count() or 1, len(rows))
    if workers == 1 or len(rows) * len(cards) < FEWEST_CELLS:
        return list(map(plan_row, rows))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:  # torch has threads: no fork
        return list(pool.map(plan_row, rows))


def _planned_row(row: tuple[str, str], cards: Sequence[str], seq_len: int) -> list[Cell]:
    return [_cell(planned(*row, card, seq_len)) for card in cards]


def planned(model: str, method: str, card: str, seq_len: int) -> tuple[Plan, LanguageSettings] | None:
    """What `--fit auto` chooses, and its plan; None: nothing fits."""
    run = {"model": model, "gpu": card, "seq_len": seq_len, "batch_size": TOKENS // seq_len, "dry_run": True}
    settings = CellSettings(**run, compile=True, fit="auto", **_on_card(METHODS[method], card))
    lora = None if settings.lora is None else as_lora(settings.lora)
    checked = check_settings(settings, "resources", frozen_base(lora, settings))
    architecture = _architecture(model, seq_len)
    trained = trained_part(architecture.config, lora, False, checked.dtype)
    try:
        fitted = fit_memory(checked, architecture, trained)
    except UserError:
        return None
    return prepare(fitted, architecture, (), trained).plan, fitted.language


def _on_card(settings: Mapping[str, Any], card: str) -> Mapping[str, Any]:
    """A method's settings on a card, which may lack FP8."""
    if not datasheet_hardware(card).emulates("fp8"):
        return settings
    if "lora" not in settings:
        return {**settings, "quantize": "int8", "quantize_kwargs": None}
    return {"lora": {"base": "int8"}} if settings["lora"].get("base") == "fp8" else settings


@functools.cache
def _architecture(model: str, seq_len: int) -> LanguageArchitecture:
    """Shared by the cells of a model: its empty modules take longer than a plan."""
    # The shapes are those of any device; a CPU is always here.
    settings = LanguageSettings(model=model, seq_len=seq_len, device="cpu")
    return LanguageArchitecture.of(settings, check_settings(settings, "resources").mesh)


def _cell(found: tuple[Plan, LanguageSettings] | None) -> Cell:
    if found is None:
        return Cell(text="-")
    plan, settings = found
    speed = plan.tokens_per_step / plan.step_seconds
    kinds = settings.recompute
    marks = f" {'+'.join(kinds)}" if kinds else ""
    marks += " o" * bool(plan.host.keys() - {"residuals", "weights", "gradients"}) + " r" * ("residuals" in plan.host)
    marks += " w" * ("weights" in plan.host)
    taken = f"{plan.memory_taken / GIB:.1f}" + (f" + {plan.host_bytes / GIB:.1f}" if plan.host else "")
    text = f"{plan.geometry.micro_batch_size}{marks}, {taken}, {short_number(speed)}"
    return Cell(speed, text=text, details={"gib": plan.memory_taken / GIB, "host_gib": plan.host_bytes / GIB})


if __name__ == "__main__":
    run_script(main)
