"""Time every implementation of matrix products: problems > rows > check > time > tables.

python benchmark_mm.py                                      matrix products at 1024, 2048 and 4096 cubed
python benchmark_mm.py --a_column_major --b_column_major    the same for Aᵀ·B, the gradient of a weight
python benchmark_mm.py --model qwen2.5-7b                   the products of that model's linears
python benchmark_mm.py --tables mm,quantizers,linears --png runs/benchmark_mm.png
python benchmark_mm.py --tables grouped,experts             products of a mixture's experts, and experts as a whole
python benchmark_mm.py --tables attention                   causal attention, of all keys, documents, a window
python benchmark_mm.py --tables roofline --gpu h100         what schemes can gain on a GPU that is not here
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qtrain.core.process import prepare_process

prepare_process(script=True)  # before imports that take a while

from qtrain.bench.arguments import BenchmarkSettings
from qtrain.core.config import parse
from qtrain.core.process import run_script
from qtrain.train.settings.listing import listing

if TYPE_CHECKING:
    from qtrain.bench.tables import Cell


def main(argv: list[str]) -> None:
    benchmark(parse(BenchmarkSettings, argv, "benchmark_mm.py", listing_with_rows))


def benchmark(settings: BenchmarkSettings) -> None:
    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    import torch

    from qtrain.bench.benchmark_tables import chosen_tables, with_default_sizes
    from qtrain.bench.case import Bench
    from qtrain.bench.tables import about_run, check_json, check_png, figures_path, write_json, write_png
    from qtrain.bench.timing import watching_clocks
    from qtrain.core.checks import user_path
    from qtrain.core.hardware.device import describe_hardware
    from qtrain.train.settings.machine import choose_device

    # ---- tables: whatever can be refused is refused here -------------------------------------------------------------
    device = choose_device(settings.device)
    settings = with_default_sizes(settings, device)
    jobs = chosen_tables(settings, device)
    if settings.json:
        check_json(user_path(settings.json, "--json"))
    if settings.png:
        check_png()

    # ---- check and time ----------------------------------------------------------------------------------------------
    hardware = describe_hardware(device)
    bench = Bench(device, hardware, settings.budget_ms, show_progress)
    print(f"device      {hardware.name}, torch {torch.__version__}", flush=True)
    with watching_clocks(device) as clocks:
        tables = []
        for job in jobs:
            tables.append(job(bench))
            print("\n" + tables[-1].markdown() + "\n", flush=True)
    print(clocks.line())

    # ---- write -------------------------------------------------------------------------------------------------------
    path = figures_path(settings, "benchmark_mm")
    write_json(tables, path, about_run(settings, hardware.name, clocks.record()))
    print(f"figures     {path}")
    if settings.png:
        write_png(tables, Path(settings.png))
        print(f"bars        {settings.png}")
    cells = [cell for table in tables for row in table.rows.values() for cell in row.values()]
    if any(cell.details.get("wrong") for cell in cells):
        print("error: a result was wrong; see the footnotes", file=sys.stderr)
        sys.exit(1)
    timed = [table for table in tables if table.measured]
    if timed and not any(cell.details.get("runs") for cell in cells):  # which a peak beside the rows has not
        print("error: nothing could be timed; see the footnotes", file=sys.stderr)
        sys.exit(1)


def listing_with_rows() -> str:
    from qtrain.bench.benchmark_tables import row_names

    return "\n  ".join([f"{listing()}\n\nrows of benchmark_mm.py (--rows, --skip)", *row_names()])


def show_progress(what: str, cell: "Cell") -> None:
    print(f"  {what}: {cell.reason or cell.shown()}", file=sys.stderr, flush=True)


def command() -> None:
    """The console command of an installed package."""
    run_script(main)


if __name__ == "__main__":
    command()
