"""Training speed of models x schemes in one table: tokens per second, share of the speed of light, peak memory.

python -m qtrain.bench.train_step --models qwen2.5-0.5b,qwen2.5-1.5b --schemes bf16,int8,fp8_rowwise --batch_size 32

The steps are those of llm_pretrain.py, the same functions in the same order, on random tokens. Each cell runs in its
own process, so one that runs out of memory does not affect the others. Models and schemes may have their own options:
any setting of llm_pretrain.py after a model, --lora too, the scheme's options after a scheme.

    --models 'qwen2.5-0.5b,qwen2.5-7b:{"batch_size":64,"micro_batch_size":8}'
    --models 'qwen2.5-7b:{"lora":{"base":"nf4"},"fit":"auto","memory_limit":24}'
    --models 'qwen2.5-7b:{"gpus":2,"batch_size":256,"micro_batch_size":8,"optim":"adamw_8bit"}'
    --schemes 'bf16,int8,int8:{"stochastic_rounding":true}'
"""

import dataclasses
import itertools
import sys
from dataclasses import dataclass
from typing import Any, Literal

from qtrain.bench.arguments import name_and_options, split_list
from qtrain.bench.tables import Cell, Table, about_run, figures_path, write_json
from qtrain.bench.timing import watching_clocks
from qtrain.bench.training_cell import CellSettings, run_apart
from qtrain.core.checks import check_fields
from qtrain.core.config import JsonDict, as_dict, parse
from qtrain.core.errors import UserError
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.process import run_script
from qtrain.models import read_model_source
from qtrain.quant import SCHEMES
from qtrain.train.log.status import three_digits
from qtrain.train.settings.exclusions import check_exclusions
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import Count, CountOrZero


@dataclass(frozen=True)
class TrainStepSettings:
    """Time training steps of models under schemes, on random tokens."""

    models: str = "qwen2.5-0.5b"
    """Models to time, separated by commas; NAME:{JSON} overrides settings of llm_pretrain.py for one."""
    schemes: str = "bf16,int8"
    """Schemes to time, separated by commas; NAME:{JSON} sets the options of one (--quantize_kwargs)."""
    batch_size: Count = 32
    """Sequences per optimizer step."""
    micro_batch_size: CountOrZero = 0
    """Sequences per forward pass; 0: batch_size."""
    seq_len: Count = 1024
    """Tokens per sequence."""
    n_steps: Count = 20
    """Timed steps; the table shows their median."""
    warmup_steps: Count = 6
    """Untimed steps before them, which compile, autotune and record CUDA graphs."""
    optim: str = "adamw"
    """Optimizer; --list shows all."""
    optim_kwargs: JsonDict = None
    """Options of --optim as a JSON object; --list shows them."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Save memory by recomputing in the backward pass: nothing; norms and activation functions; or whole layers."""
    quantize_lm_head: bool = False
    """Quantize the output head too, not only the linear layers below it."""
    compile: bool = True
    """Compile each layer with torch.compile."""
    cuda_graphs: bool = True
    """On a GPU with --compile, record the step as CUDA graphs and replay them."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto: the GPU if there is one, else the CPU."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights, gradients and activations; auto: bf16 on a GPU, fp32 on a CPU."""
    json: str | None = None
    """JSON file to write the results to; None: runs/train_step/TIME.json."""


def main(argv: list[str]) -> None:
    settings = parse(TrainStepSettings, argv, "-m qtrain.bench.train_step", listing)
    device = choose_device(settings.device)
    cells = step_cells(settings)
    with watching_clocks(device) as clocks:
        results = {}
        for name, cell in cells.items():
            results[name] = result = run_apart(cell, settings.warmup_steps)
            shown = result.get("reason") or f"{three_digits(result['tok_s'])} tok/s"
            print(f"{' '.join(name)}: {shown}", *result.get("fit", ()), sep="\n", file=sys.stderr, flush=True)
    hardware = describe_hardware(device)
    table = step_table(results, f"Training steps on {hardware.name}")
    print(table.markdown(), clocks.line(), sep="\n\n")
    path = figures_path(settings, "train_step")
    write_json([table], path, about_run(settings, hardware.name, clocks.record()))
    print(f"figures     {path}")


def cell_values(settings: Any, model_word: str, scheme_word: str, **more: Any) -> dict[str, Any]:
    """Settings of llm_pretrain.py for a model and a scheme, each NAME or NAME:{JSON}: those of `settings` that it has
    too, then `more`, then the model's own. UserError for an unknown model or scheme."""
    names = {f.name for f in dataclasses.fields(CellSettings)}
    model, options = name_and_options(model_word, "--models")
    scheme, kwargs = name_and_options(scheme_word, "--schemes")
    read_model_source(model, "--models").model_config()
    SCHEMES.make(scheme, kwargs, "--schemes")
    shared = {key: value for key, value in as_dict(settings).items() if key in names}
    return {**shared, **more, "model": model, "quantize": scheme, "quantize_kwargs": kwargs, **options}


def step_cells(settings: TrainStepSettings) -> dict[tuple[str, str], CellSettings]:
    """The settings of each (model, scheme), in order. UserError for whatever can be refused before anything runs."""
    cells = {}
    for words in itertools.product(split_list(settings.models), split_list(settings.schemes)):
        values = cell_values(settings, *words)
        cell = CellSettings(**check_fields(CellSettings, values, f"--models ({values['model']})"))
        options = Options(cell)
        _ = options.geometry, options.optimizer  # refuse what their flags cannot be
        check_exclusions(options, option="--optimizer_in_backward")
        cells[words] = cell
    if not cells:
        raise UserError("--models, --schemes: nothing to time; name at least one model and one scheme.")
    return cells


def step_table(results: dict[tuple[str, str], dict[str, Any]], title: str) -> Table:
    """One row per result, with the speed relative to the model's first scheme."""
    energy = [("W", "watts", ".0f"), ("J/token", "joules_token", ".3g")]
    figures = [
        ("ms/step", "step_ms", ",.2f"),
        *(energy if any("watts" in result for result in results.values()) else []),
        *((f"{kind} GiB", f"{kind}_gib", ",.2f") for kind in ("peak", "reserved", "planned")),
    ]
    columns = ["tok/s", "over first", "sol", "mfu", *(column for column, _, _ in figures)]
    unit = "median step; sol, mfu: share of the peak; *: not recorded as CUDA graphs"
    table = Table(title, unit, columns)
    firsts: dict[str, float] = {}
    for (model, scheme), result in results.items():
        row = f"{model} {scheme}"
        if "reason" in result:
            table.put(row, "tok/s", Cell(reason=result["reason"]))
            continue
        first = firsts.setdefault(model, result["tok_s"])  # the first scheme of --schemes that ran
        over = result["tok_s"] / first
        eager = "reserved_gib" in result and not result["recorded"]  # on a CPU nothing is
        speed = f"{result['tok_s']:,.0f}{'*' * eager}"
        table.put(row, "tok/s", Cell(result["tok_s"], text=speed, details=result))
        table.put(row, "over first", Cell(over, text=f"{over:.2f}x"))
        for column, key in (("sol", "sol"), ("mfu", "mfu")):
            if result[key] is not None:  # no mfu without a datasheet
                table.put(row, column, Cell(result[key], text=f"{100 * result[key]:.1f}%"))
        for column, key, digits in figures:
            if key in result:  # nothing is reserved on a CPU
                table.put(row, column, Cell(result[key], text=f"{result[key]:{digits}}"))
    return table


if __name__ == "__main__":
    run_script(main)
