"""Training on 1, 2, 4, 8 GPUs of a machine: correct first, then timed and compared with the plan.

python -m qtrain.bench.scaling --json scaling.json --limit 540          # again and again, until all cells are done

Every number of GPUs is checked before it is timed: losses of a few deterministic steps must be those of one process
(`benchmarks/mesh_equality.py`). A cell is one command of llm_pretrain.py on random tokens, by the functions that it
calls. Each result is written at once, and what the file has is not run again; so the table can be made in calls of any
length.

    python -m qtrain.bench.scaling --predict h100                       # what the plan says, for GPUs that are not here
"""

import dataclasses
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from qtrain.bench.arguments import name_and_options, split_list
from qtrain.bench.tables import Cell, Table, about_run, check_json, write_json
from qtrain.bench.train_step import cell_values
from qtrain.bench.training_cell import ROOT, child_environment, run_apart
from qtrain.core.checks import Range, check_fields, read_json
from qtrain.core.config import parse
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hardware.device import datasheet_hardware, describe_hardware
from qtrain.core.process import run_script
from qtrain.models import read_model_source
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import prepare
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.plan.world import SizedStep
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import Count, LanguageSettings

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": "all"},
    "zero2": {"reshard_after_forward": "never"},
    "full": {"reshard_after_forward": "always"},
    "hsdp": {"dp_replicate": "half", "reshard_after_forward": "never"},
    "zero2_int8": {"reshard_after_forward": "never", "gradient_wire": "int8"},
    **{f"tp{n}": {"tp": n, "reshard_after_forward": "never"} for n in (2, 4, 8)},
    **{f"ep{n}": {"ep": n, "reshard_after_forward": "never"} for n in (2, 4, 8)},
}
"""Settings of each way to use several GPUs; replicas: of all GPUs, or two of half of them. --tp is for dense models,
--ep for MoEs."""

MODELS = (
    'qwen2.5-0.5b:{"micro_batch_size":32},qwen2.5-1.5b:{"micro_batch_size":16},qwen2.5-3b:{"micro_batch_size":16},'
    'qwen2.5-7b:{"micro_batch_size":8,"optim":"adamw_8bit"},qwen2.5-14b:{"micro_batch_size":8,"optim":"adamw_8bit"}'
)
SCHEMES_TIMED = 'fp8_tensorwise:{"scaling":"delayed"},int8,bf16'


@dataclass(frozen=True)
class ScalingSettings:
    """Time models on several numbers of GPUs, and compare with the plan."""

    gpus: str = "1,2,4,8"
    """Numbers of GPUs, separated by commas."""
    models: str = MODELS
    """Models, separated by commas; NAME:{JSON} overrides settings of llm_pretrain.py for one."""
    schemes: str = SCHEMES_TIMED
    """Schemes, separated by commas; NAME:{JSON} sets the options of one (--quantize_kwargs)."""
    layouts: str = "zero2,ddp,full"
    """Ways to use several GPUs, separated by commas: ddp, zero2, full, hsdp, zero2_int8 (gradients in INT8), tp2, tp4,
    tp8, ep2, ep4, ep8."""
    tokens: Count = 524_288
    """Tokens of an optimizer step, over all GPUs."""
    seq_len: Count = 1024
    """Tokens per sequence."""
    n_steps: Count = 6
    """Timed steps; the table shows their median."""
    warmup_steps: Count = 4
    """Untimed steps before them, which compile, autotune and record CUDA graphs."""
    compile: bool = True
    """Compile each layer with torch.compile."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto: the GPU if there is one, else the CPU."""
    predict: str | None = None
    """Run nothing, and print what the plan predicts for this GPU: h100, h200, ...; GPUs on one machine."""
    limit: Annotated[float, Range(0)] = 0
    """Seconds after which no further cell starts; 0: none."""
    json: str = "runs/scaling.json"
    """JSON file of the results, which is gone on with if it exists."""


@dataclass(frozen=True)
class ScalingCell:
    """A number of GPUs to check (settings None), or a run to time."""

    name: str
    gpus: int
    row: str = ""
    settings: LanguageSettings | None = None


def main(argv: list[str]) -> None:
    settings = parse(ScalingSettings, argv, "-m qtrain.bench.scaling", listing)
    if settings.predict is not None:
        print(prediction_table([*scaling_cells(settings)], settings.predict).markdown())
        return
    device = choose_device(settings.device)
    cells, path = [*scaling_cells(settings)], Path(settings.json)
    check_json(path)
    results: dict[str, Any] = read_json(path, "--json").get("cells", {}) if path.exists() else {}
    begin, longest = time.monotonic(), 0.0
    for cell in cells:
        if cell.name in results:
            continue
        started = time.monotonic()
        # Assumes that no cell takes longer than the longest so far.
        if settings.limit and started - begin + longest > settings.limit:
            left = sum(other.name not in results for other in cells)
            print(f"{left} of {len(cells)} cells are left; run the command again to go on.")
            break
        results[cell.name] = run(cell, settings, device.type)
        longest = max(longest, time.monotonic() - started)
        print(f"{cell.name}: {summary(results[cell.name])}", flush=True)
        write(path, settings, cells, results, describe_hardware(device).name)
    else:
        print(f"all {len(cells)} cells are done: {path}")
    print(scaling_table(cells, results).markdown())


def scaling_cells(settings: ScalingSettings) -> Iterator[ScalingCell]:
    """The cells in order, the checks of each number of GPUs first. UserError for what cannot be."""
    numbers = []
    for word in split_list(settings.gpus):
        if not word.isdigit() or not int(word):
            raise UserError(f"--gpus: {word!r} is no number of GPUs; give numbers such as 1,2,4.")
        numbers.append(int(word))
    for layout in split_list(settings.layouts):
        if layout not in LAYOUTS:
            raise unknown_name("--layouts", "layout", layout, LAYOUTS)
    for gpus in numbers:
        if gpus > 1:
            yield ScalingCell(f"check on {gpus}", gpus)
        models, schemes = split_list(settings.models), split_list(settings.schemes)
        for model, scheme, layout in itertools.product(models, schemes, split_list(settings.layouts)):
            if gpus == 1 and layout != split_list(settings.layouts)[0]:
                continue  # one GPU has no layouts
            if gpus == 1 or _applies(layout, model, gpus):
                yield _cell(settings, gpus, model, scheme, "" if gpus == 1 else layout)


def _applies(layout: str, model_word: str, gpus: int) -> bool:
    """Whether the layout fits the number of GPUs and the kind of model."""
    own, model = LAYOUTS[layout], name_and_options(model_word, "--models")[0]
    mixture = read_model_source(model, "--models").model_config().moe is not None
    if ("tp" in own and mixture) or ("ep" in own and not mixture):
        return False
    return max(own.get("tp", 1), own.get("ep", 1)) <= gpus and (layout != "hsdp" or gpus >= 4)


def _cell(settings: ScalingSettings, gpus: int, model_word: str, scheme_word: str, layout: str) -> ScalingCell:
    values = cell_values(settings, model_word, scheme_word, gpus=gpus)
    # Strong scaling: the same tokens a step on any number of GPUs.
    values["batch_size"] = settings.tokens // values["seq_len"]
    values |= LAYOUTS.get(layout, {})  # one GPU has no layout
    if replicas := {"all": gpus, "half": gpus // 2}.get(str(values.get("dp_replicate"))):
        values["dp_replicate"] = replicas
    checked = LanguageSettings(**check_fields(LanguageSettings, values, f"--models ({values['model']})"))
    row = f"{values['model']} {values['quantize']}{' ' + layout if layout else ''}"
    return ScalingCell(f"{row} on {gpus}", gpus, row, checked)


def run(cell: ScalingCell, settings: ScalingSettings, device: str) -> dict[str, Any]:
    """{"equal": bool} of a check, else what `time_training` returns, with the plan's rate as predicted_tok_s."""
    if cell.settings is None:
        if not (ROOT / "benchmarks").is_dir():  # which an installed package lacks
            return {"reason": "not checked: benchmarks/mesh_equality.py is in a checkout of the repository only"}
        meshes = ["1x1", f"1x{cell.gpus}", f"{cell.gpus}x1"]
        command = [sys.executable, "-m", "benchmarks.mesh_equality", "--device", device, "--steps", "3"]
        # Codes of rows, and a scale that spans ranks.
        command += ["--schemes", "int8", "fp8_tensorwise", "--optimizers", "adamw_8bit", "--meshes", *meshes]
        done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
        lines = (done.stdout + done.stderr).strip().splitlines()
        return {"equal": done.returncode == 0, "line": lines[-1][:200] if lines else ""}
    try:
        planned = predicted(cell.settings).rate if device == "cuda" else None
    except UserError as error:  # such as heads that --tp does not divide
        return {"reason": str(error)}
    return {**run_apart(cell.settings, settings.warmup_steps), "predicted_tok_s": planned}


def predicted(settings: LanguageSettings, gpu: str | None = None) -> SizedStep:
    """The step that `--dry_run --world_size` plans. gpu: None: that of this machine."""
    planned = dataclasses.replace(settings, gpus=0, dry_run=True, gpu=gpu, world_size=settings.gpu_count)
    checked = check_settings(planned, "scaling")
    world = prepare(checked, LanguageArchitecture.of(planned, checked.mesh), data=()).plan.world
    assert world is not None, "--world_size makes a plan of it"
    return world.step(world.mesh)


def prediction_table(cells: list[ScalingCell], gpu: str) -> Table:
    """As `scaling_table`, of what the plan says alone."""
    have = datasheet_hardware(gpu).memory_bytes
    numbers = sorted({cell.gpus for cell in cells})
    columns = [f"{n} GPU{'s' * (n > 1)}" for n in numbers]
    table = Table(f"Planned for {datasheet_hardware(gpu).name}", "tok/s of all; GiB a GPU (* does not fit)", columns)
    for cell in cells:
        if cell.settings is None:
            continue
        try:
            step = predicted(cell.settings, gpu)
            fits = have is None or step.memory <= have
            found = Cell(step.rate, text=f"{step.rate:,.0f}; {step.memory / 2**30:.1f}{'' if fits else '*'}")
        except UserError as error:
            found = Cell(reason=str(error))
        table.put(cell.row, columns[numbers.index(cell.gpus)], found)
    return table


def summary(result: dict[str, Any]) -> str:
    if "equal" in result:
        return "losses are those of one process" if result["equal"] else f"NOT EQUAL: {result['line']}"
    return result.get("reason") or f"{result['tok_s']:,.0f} tok/s"


def scaling_table(cells: list[ScalingCell], results: dict[str, Any]) -> Table:
    """A row for each model, scheme and layout; a column for each number of GPUs, and of what share of as many times one
    GPU the largest is."""
    numbers = sorted({cell.gpus for cell in cells})
    columns = [f"{n} GPU{'s' * (n > 1)}" for n in numbers]
    table = Table("Training on several GPUs", "tok/s of all; planned; GiB a GPU", [*columns, "of as many times one"])
    # tok/s on one GPU, by row: what several are compared with.
    single = {
        cell.row: results[cell.name]["tok_s"]
        for cell in cells
        if cell.gpus == 1 and "tok_s" in results.get(cell.name, {})
    }
    for cell in cells:
        result = results.get(cell.name)
        if cell.settings is None or result is None:
            continue
        column = columns[numbers.index(cell.gpus)]
        if "tok_s" not in result:
            table.put(cell.row, column, Cell(reason=result.get("reason", "failed")))
            continue
        planned = f"; {result['predicted_tok_s']:,.0f}" if result.get("predicted_tok_s") else ""
        text = f"{result['tok_s']:,.0f}{planned}; {result['peak_gib']:.1f}"
        table.put(cell.row, column, Cell(result["tok_s"], text=text, details={"loss": result["loss"]}))
        alone = single.get(cell.row.rsplit(" ", 1)[0])  # the row without its layout
        if alone and cell.gpus > 1:
            share = result["tok_s"] / (cell.gpus * alone)
            table.put(cell.row, "of as many times one", Cell(share, text=f"{100 * share:.0f}% on {cell.gpus}"))
    return table


def write(
    path: Path, settings: ScalingSettings, cells: list[ScalingCell], results: dict[str, Any], device: str
) -> None:
    """The table as every benchmark writes it, and the cells, from which a later call goes on."""
    write_json([scaling_table(cells, results)], path, {**about_run(settings, device), "cells": results})


if __name__ == "__main__":
    run_script(main)
