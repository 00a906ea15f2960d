"""Time every implementation of matrix products: problems > rows > check > time > tables.

python benchmark_mm.py                                      matrix products at 1024, 2048 and 4096 cubed
python benchmark_mm.py --a_column_major --b_column_major    the same for Aᵀ·B, the gradient of a weight
python benchmark_mm.py --model qwen2.5-7b                   the products of that model's linears
python benchmark_mm.py --tables mm,quantizers,linears --png runs/benchmark_mm.png
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import qtrain  # noqa: F401  # isort: skip  (before torch: handles a Ctrl-C during the imports)
import torch

from qtrain.bench.arguments import MAX_SIZE, compared_schemes, parse_sizes, split_list, wanted_names
from qtrain.bench.linears import SHAPES, linear_table
from qtrain.bench.matmul_rows import ROWS
from qtrain.bench.matmuls import Problem, matmul_table
from qtrain.bench.quantizers import QUANTIZER_ROWS, quantizer_table
from qtrain.bench.tables import Cell, Table, about_run, check_json, check_png, write_json, write_png
from qtrain.bench.timing import watching_clocks
from qtrain.checks import Range, user_path
from qtrain.config import parse, run_script
from qtrain.errors import UserError, unknown_name
from qtrain.hardware import describe_hardware
from qtrain.models import read_model_source
from qtrain.models.cost import layer_linears
from qtrain.quant import SCHEMES, Auto
from qtrain.train.listing import listing
from qtrain.train.settings import choose_device

SIZES = {
    "cuda": {
        "shapes": "1024x1024x1024,2048x2048x2048,4096x4096x4096",
        "quantizer_shapes": "16384x4096,16384x14336",
        "tokens": 16384,
    },
    "cpu": {"shapes": "256x256x256,512x512x512", "quantizer_shapes": "256x1024", "tokens": 256},
}
"""Default sizes; on a CPU small ones that show that everything works."""
INT8_ROUNDINGS = ('int8:{"stochastic_rounding":false}', 'int8:{"stochastic_rounding":true}')
"""Beside the default of int8, stochastic rounding in one of its three products: in none, and in all."""
Job = Callable[..., Table]
"""Measures a table; takes `hardware` and `report`."""
R = TypeVar("R")


@dataclass(frozen=True)
class BenchmarkSettings:
    """Time matrix products, quantizers and linears. Every result is checked against fp64 before it is timed."""

    tables: str = "mm"
    """Tables, separated by commas: mm (matrix products), quantizers, linears."""
    shapes: str = ""
    """Sizes MxNxK of the matrix products, separated by commas; empty: 1024, 2048 and 4096 cubed, on a CPU 256, 512."""
    model: str | None = None
    """Use the linears of this model (as for llm_pretrain.py --model) with --tokens rows instead of --shapes."""
    tokens: Annotated[int, Range(0, MAX_SIZE)] = 0
    """Rows of the inputs of linears, with --model and in the table of linears; 0: 16384, on a CPU 256."""
    a_column_major: bool = False
    """Store A [M, K] column-major, like dy in the gradient of a weight."""
    b_column_major: bool = False
    """Store B [N, K] column-major: A·B instead of A·Bᵀ, like the weight in the gradient of the input."""
    rows: str = ""
    """Only rows whose name contains one of these words, separated by commas: int8, cublas, 128x128."""
    skip: str = ""
    """No rows whose name contains one of these words."""
    quantizer_shapes: str = ""
    """Sizes MxK of the quantizers' inputs, separated by commas; empty: 16384x4096, 16384x14336, on a CPU 256x1024."""
    linear_shapes: str = ""
    """Sizes NxK of the linears, separated by commas; empty: of --model, or of Llama and DeepSeek-V3, on a CPU
    512x256."""
    schemes: str = ""
    """Schemes of the table of linears, separated by commas; NAME:{JSON} sets options; empty: all schemes, and int8 also
    with stochastic rounding in none and in all of its GEMMs."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    budget_ms: Annotated[float, Range(1, 10_000)] = 150.0
    """Milliseconds of calls per figure, which is their median."""
    json: str | None = None
    """File for all figures; none: runs/benchmark_mm/<time>.json."""
    png: str | None = None
    """Draw the tables as bar charts into this file; needs matplotlib."""


def main(argv: list[str]) -> None:
    if "--list" in argv:
        rows = [f"  {row.name}" for row in (*ROWS, *QUANTIZER_ROWS)]
        print(listing(), "\n".join(["rows of benchmark_mm.py (--rows, --skip)", *rows]), sep="\n\n")
        return
    settings = parse(BenchmarkSettings, argv, "benchmark_mm.py")

    # ---- tables: whatever can be refused is refused here -------------------------------------------------------------
    device = choose_device(settings.device)
    settings = replace(settings, **{key: v for key, v in SIZES[device.type].items() if not getattr(settings, key)})
    chosen = split_list(settings.tables)
    for name in chosen:
        if name not in TABLES:
            raise unknown_name("--tables", "table", name, TABLES)
    if not chosen:
        raise UserError(f"--tables: it is empty; name some of {', '.join(TABLES)}.")
    jobs = [make(settings, device) for name, make in TABLES.items() if name in chosen]
    if settings.json:
        check_json(user_path(settings.json, "--json"))
    if settings.png:
        check_png()

    # ---- check and time ----------------------------------------------------------------------------------------------
    hardware = describe_hardware(device)
    print(f"device      {hardware.name}, torch {torch.__version__}", flush=True)
    with watching_clocks(device) as clocks:
        tables = []
        for job in jobs:
            tables.append(job(hardware=hardware, report=show_progress))
            print("\n" + tables[-1].markdown() + "\n", flush=True)
    print(clocks.line())

    # ---- write -------------------------------------------------------------------------------------------------------
    path = Path(settings.json or f"runs/benchmark_mm/{time.strftime('%Y%m%d-%H%M%S')}.json")
    write_json(tables, path, about_run(settings, hardware.name, clocks.record()))
    print(f"figures     {path}")
    if settings.png:
        write_png(tables, Path(settings.png))
        print(f"bars        {settings.png}")
    if any(cell.details.get("wrong") for table in tables for row in table.rows.values() for cell in row.values()):
        print("error: a result was wrong; see the footnotes", file=sys.stderr)
        sys.exit(1)


def products(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of matrix products, ready to be measured."""
    if settings.model:
        tokens, found = settings.tokens, layer_linears(read_model_source(settings.model).model_config())
        sizes = {f"{name} {tokens}x{n}x{k}": (tokens, n, k) for name, (n, k) in found.items()}
    else:
        sizes = {text: parse_sizes(text, 3, "--shapes") for text in listed(settings.shapes, "--shapes")}
    layout = settings.a_column_major, settings.b_column_major
    problems = {name: Problem(*size, device, *layout) for name, size in sizes.items()}
    return partial(matmul_table, problems, rows_among(settings, ROWS), settings.budget_ms)


def quantizers(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of quantizers, ready to be measured."""
    texts = listed(settings.quantizer_shapes, "--quantizer_shapes")
    shapes = [parse_sizes(text, 2, "--quantizer_shapes") for text in texts]
    return partial(quantizer_table, shapes, rows_among(settings, QUANTIZER_ROWS), device, settings.budget_ms)


def linears(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of linears under schemes, ready to be measured."""
    if settings.linear_shapes:
        texts = split_list(settings.linear_shapes)
        shapes = {text: parse_sizes(text, 2, "--linear_shapes") for text in texts}
    elif settings.model:
        shapes = layer_linears(read_model_source(settings.model).model_config())
    else:
        shapes = SHAPES if device.type == "cuda" else {"512x256": (512, 256)}
    names = [name for name in SCHEMES.names() if SCHEMES.get(name, "") is not Auto]
    schemes = compared_schemes(split_list(settings.schemes) or [*names, *INT8_ROUNDINGS])
    return partial(linear_table, shapes, settings.tokens, schemes, device, settings.budget_ms)


TABLES: dict[str, Callable[[BenchmarkSettings, torch.device], Job]] = {
    "mm": products,
    "quantizers": quantizers,
    "linears": linears,
}


def listed(text: str, flag: str) -> list[str]:
    found = split_list(text)
    if not found:
        raise UserError(f"{flag}: it is empty; name at least one size.")
    return found


def rows_among(settings: BenchmarkSettings, rows: Sequence[R]) -> list[R]:
    """The rows that --rows and --skip select."""
    names = [row.name for row in (*ROWS, *QUANTIZER_ROWS)]
    wanted = wanted_names(settings.rows, settings.skip, names, "--rows")
    return [row for row in rows if row.name in wanted]


def show_progress(what: str, cell: Cell) -> None:
    print(f"  {what}: {cell.reason or cell.shown()}", file=sys.stderr, flush=True)


def command() -> None:
    """The console command of an installed package."""
    run_script(main)


if __name__ == "__main__":
    command()
