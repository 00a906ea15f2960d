"""Is this GPU as fast as it should be? Training steps here beside those that were measured on the same GPU elsewhere.

python -m qtrain.bench.baseline --check                       # exit code 1 if a row is more than 5% slower or larger
python -m qtrain.bench.baseline --json configs/baselines/NAME.json    # for a GPU without a file

A file of `configs/baselines/` has the rows of one GPU: settings of a cell of `train_step`, tokens per second, peak
memory, and the versions that were measured. A slow machine is most often one with a lower power cap, a hot GPU, another
process on it, or other versions of torch and triton; the last line names versions that differ.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from qtrain.bench.arguments import split_list
from qtrain.bench.tables import Cell, Table, about_run, check_json, write_record
from qtrain.bench.training_cell import CellSettings, run_apart
from qtrain.core.checks import Range, check_fields, read_json
from qtrain.core.config import parse, versions
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hardware.datasheets import planned_name, product_of
from qtrain.core.process import run_script
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device

FOLDER = Path(__file__).parents[1] / "configs" / "baselines"
_FP8 = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "quantize_lm_head": True}
_STEP = {"seq_len": 1024, "compile": True, "n_steps": 20}
ROWS: dict[str, dict[str, Any]] = {
    "0.5b bf16": {**_STEP, "model": "qwen2.5-0.5b", "batch_size": 32},
    "0.5b int8": {**_STEP, "model": "qwen2.5-0.5b", "batch_size": 32, "quantize": "int8", "quantize_lm_head": True},
    "0.5b fp8": {**_STEP, **_FP8, "model": "qwen2.5-0.5b", "batch_size": 32},
    "1.5b fp8": {**_STEP, **_FP8, "model": "qwen2.5-1.5b", "batch_size": 16},
}
"""Of a new file: all of them fit 80 GB."""
COMPARED = ("torch", "triton")
"""Packages whose version changes the speed."""
WARMUP_STEPS = 6


@dataclass(frozen=True)
class BaselineSettings:
    """Time training steps on this GPU, beside those that were measured on another of its kind."""

    check: bool = False
    """End with exit code 1 if a row is slower, or takes more memory, than --within allows."""
    within: Annotated[float, Range(0.0, 1.0)] = 0.05
    """Share by which a row may be slower or larger."""
    rows: str = ""
    """Rows, separated by commas; empty: all."""
    json: str | None = None
    """Write what was measured here as a baseline, into this file."""


def main(argv: list[str]) -> None:
    settings = parse(BaselineSettings, argv, "-m qtrain.bench.baseline", listing)
    gpu = _gpu()
    baseline = read_baseline(gpu)
    if baseline is None and (settings.check or not settings.json):
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.json"))) or "none"
        flag = "--check" if settings.check else "--json"
        raise UserError(f"{flag}: there is no baseline of {gpu}, but of: {known}. --json FILE measures one.")
    if settings.json:
        check_json(Path(settings.json))
    rows = chosen_rows(settings.rows, baseline)
    measured = {name: _measure(name, row) for name, row in rows.items()}

    table = compare(measured, baseline, gpu)
    print(table.markdown())
    if settings.json:
        write_baseline(Path(settings.json), settings, gpu, rows, measured)
    if baseline is not None:
        for package in COMPARED:
            here, there = versions().get(package), baseline["versions"].get(package)
            if here != there:
                print(f"{package} is {here} here, {there} in the baseline", file=sys.stderr)
        slow = outside(measured, baseline, settings.within)
        for line in slow:
            print(line, file=sys.stderr)
        if settings.check and slow:
            raise SystemExit(1)


def read_baseline(gpu: str) -> dict[str, Any] | None:
    """The file of a GPU by its product name ('H200'); None: there is none."""
    path = FOLDER / f"{planned_name(gpu)}.json"
    return read_json(path, "--check") if path.exists() else None


def chosen_rows(words: str, baseline: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Name -> settings of the rows that `words` names (empty: all), those of the baseline or, without one, ROWS.
    UserError for an unknown name."""
    rows = ROWS if baseline is None else {name: row["settings"] for name, row in baseline["rows"].items()}
    names = split_list(words) or list(rows)
    for name in names:
        if name not in rows:
            raise unknown_name("--rows", "row", name, rows)
    return {name: rows[name] for name in names}


def compare(measured: Mapping[str, dict[str, Any]], baseline: Mapping[str, Any] | None, gpu: str) -> Table:
    """A row for each cell: tokens per second and GiB here, in the baseline, and how many times as fast it is here."""
    columns = ["tok/s", "GiB"] + (["baseline tok/s", "baseline GiB", "as fast"] if baseline else [])
    table = Table(f"Training steps on {gpu}", "median step, peak memory", columns)
    for name, found in measured.items():
        if "reason" in found:
            table.put(name, "tok/s", Cell(reason=found["reason"]))
            continue
        figures = {"tok/s": found["tok_s"], "GiB": found["peak_gib"]}
        if baseline:
            there = baseline["rows"][name]
            figures |= {"baseline tok/s": there["tok_s"], "baseline GiB": there["peak_gib"]}
            ratio = found["tok_s"] / there["tok_s"]
            table.put(name, "as fast", Cell(ratio, text=f"{ratio:.2f}x"))
        for column, figure in figures.items():
            table.put(name, column, Cell(figure, text=f"{figure:,.1f}" if "GiB" in column else f"{figure:,.0f}"))
    return table


def outside(measured: Mapping[str, dict[str, Any]], baseline: Mapping[str, Any], within: float) -> list[str]:
    """A line for each row that failed, or is slower or larger than the baseline by more than the share `within`."""
    lines = []
    for name, found in measured.items():
        there = baseline["rows"][name]
        if "reason" in found:
            lines.append(f"{name}: {found['reason']}")
            continue
        if found["tok_s"] < (1 - within) * there["tok_s"]:
            lines.append(f"{name}: {1 - found['tok_s'] / there['tok_s']:.1%} slower than the baseline")
        if found["peak_gib"] > (1 + within) * there["peak_gib"]:
            lines.append(f"{name}: {found['peak_gib'] / there['peak_gib'] - 1:.1%} more memory than the baseline")
    return lines


def write_baseline(
    path: Path, settings: BaselineSettings, gpu: str, rows: Mapping[str, Any], measured: Mapping[str, dict[str, Any]]
) -> None:
    """The rows that ran, with their settings, as a file of FOLDER. UserError if it cannot be written, or none ran."""
    ran = {
        name: {"settings": rows[name], **{key: round(found[key], 3) for key in ("tok_s", "peak_gib")}}
        for name, found in measured.items()
        if "reason" not in found
    }
    if not ran:
        raise UserError("--json: no row ran, so there is nothing to write.")
    about = {key: value for key, value in about_run(settings, gpu).items() if key in ("versions", "device")}
    write_record(path, {**about, "rows": ran})
    print(f"baseline    {path}")


def _gpu() -> str:
    """The product name of this GPU. UserError without one."""
    device = choose_device("auto")
    if device.type != "cuda":
        raise UserError("--check: there is no GPU here; baselines are of GPUs.")
    return product_of(torch.cuda.get_device_name(device))


def _measure(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    cell = CellSettings(**check_fields(CellSettings, dict(row), f"row {name!r}"))
    found = run_apart(cell, WARMUP_STEPS)
    print(f"{name}: {found.get('reason') or format(found['tok_s'], ',.0f') + ' tok/s'}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    run_script(main)
