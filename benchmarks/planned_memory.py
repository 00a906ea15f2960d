"""Memory and time of training steps beside their plans: thirty-odd models, schemes, optimizers and ways to save memory.

python -m benchmarks.planned_memory

Every GPU takes one cell after the other, each in a process of its own, which may take --slack more memory than its plan
says: what does not run within it is planned wrong. On a card with more memory than an H100, --memory_limit stands for
one. The "largest" cells have the most sequences that their plans let an H100 hold.
"""

import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch

from qtrain.bench.resources import FULL as FP8
from qtrain.bench.tables import Cell, Table, about_run, check_json, figures_path, write_json
from qtrain.bench.training_cell import CellSettings, run_apart
from qtrain.core.checks import Range, check_fields
from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.core.hardware.datasheets import DATASHEET
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.process import run_script
from qtrain.pairs.runs import FreeGpus, visible_gpus
from qtrain.train.log.status import three_digits
from qtrain.train.settings.listing import listing

H100 = DATASHEET["H100"].memory_gib
WARMUP_STEPS, STEPS = 4, 2
SELECTIVE = {"recompute": ("norm", "swiglu")}
BLOCK = {"recompute": ("block",)}
LONG = {"seq_len": 4096}
AUTO = {"fit": "auto"}


def largest(sequences: int, **settings: Any) -> dict[str, Any]:
    return {"batch_size": sequences, "memory_limit": H100, **settings}


CELLS: dict[str, dict[str, Any]] = {
    # Those that take longest come first, the two with most host memory not at the same time.
    "32B FP8, adamw_8bit": {"model": "qwen2.5-32b", "batch_size": 64, "optim": "adamw_8bit", **FP8, **AUTO},
    "14B, adapters on NF4, 16 GiB": {
        "model": "qwen2.5-14b", "batch_size": 4, "memory_limit": 16, "lora": {"base": "nf4"}, **LONG, **AUTO,
    },
    "7B, adapters, a sequence of 65,536": {
        "model": "qwen2.5-7b", "batch_size": 1, "seq_len": 65536, "lora": {}, "offload": ("residuals",),
        "mlp_chunks": 8, **BLOCK,
    },
    "largest: 7B FP8, adamw_8bit, block": largest(80, model="qwen2.5-7b", optim="adamw_8bit", **FP8, **BLOCK),
    "largest: 7B fp8_rowwise, block": largest(28, model="qwen2.5-7b", quantize="fp8_rowwise", **BLOCK),
    "14B FP8, 48 GiB": {"model": "qwen2.5-14b", "batch_size": 32, "memory_limit": 48, **FP8, **AUTO},
    "7B FP8, 24 GiB": {"model": "qwen2.5-7b", "batch_size": 64, "memory_limit": 24, **FP8, **AUTO},
    "3B FP8, adamw_8bit, 16 GiB": {
        "model": "qwen2.5-3b", "batch_size": 64, "memory_limit": 16, "optim": "adamw_8bit", **FP8, **AUTO,
    },
    "largest: 7B, adapters on NF4": largest(4, model="qwen2.5-7b", lora={"base": "nf4"}, **LONG),
    "largest: 7B, adapters on FP8": largest(4, model="qwen2.5-7b", lora={"base": "fp8"}, **LONG),
    "largest: 3B FP8": largest(17, model="qwen2.5-3b", **FP8),
    "largest: 1.5B INT8, adamw_8bit, norm, swiglu": largest(
        48, model="qwen2.5-1.5b", quantize="int8", optim="adamw_8bit", **SELECTIVE
    ),
    "largest: 1.5B FP8, gate_up in 8 bits": largest(
        68, model="qwen2.5-1.5b", keep_8bit=("gate_up",), **FP8, **SELECTIVE
    ),
    "largest: 0.5B FP8": largest(84, model="qwen2.5-0.5b", **FP8),
    "largest: 0.5B bf16": largest(76, model="qwen2.5-0.5b", quantize="bf16"),
    "largest: 0.5B int4, norm, swiglu": largest(112, model="qwen2.5-0.5b", quantize="int4", **SELECTIVE),
    "7B FP8, states on the host": {"model": "qwen2.5-7b", "batch_size": 8, "offload": ("m", "v"), **FP8},
    "7B bf16, states on the host": {"model": "qwen2.5-7b", "batch_size": 8, "offload": ("m", "v"), "quantize": "bf16"},
    "7B FP8, one layout of codes, adamw_8bit": {
        "model": "qwen2.5-7b", "batch_size": 4, "weight_codes": "one", "optim": "adamw_8bit", **FP8,
    },
    "8B FP8, 8,192 tokens a sequence, adamw_8bit, block": {
        "model": "llama3.1-8b", "batch_size": 2, "seq_len": 8192, "optim": "adamw_8bit", **FP8, **BLOCK,
    },
    "3B FP8, the update in backward": {
        "model": "qwen2.5-3b", "batch_size": 8, "optimizer_in_backward": True, "clip_grad_norm": 0.0, **FP8,
    },
    "1.5B, adapters on INT8": {"model": "qwen2.5-1.5b", "batch_size": 8, "lora": {"base": "int8"}, **LONG},
    "1.5B FP8, 8 micro-batches": {"model": "qwen2.5-1.5b", "batch_size": 64, "micro_batch_size": 8, **FP8},
    "1.5B bf16, muon": {"model": "qwen2.5-1.5b", "batch_size": 8, "quantize": "bf16", "optim": "muon"},
    "1.5B int8_weight, adamw_4bit": {
        "model": "qwen2.5-1.5b", "batch_size": 8, "quantize": "int8_weight", "optim": "adamw_4bit",
    },
    "0.5B INT8, 4 chunks of the loss": {
        "model": "qwen2.5-0.5b", "batch_size": 16, "quantize": "int8", "quantize_lm_head": True, "loss_chunks": 4,
    },
    "0.5B bitnet": {"model": "qwen2.5-0.5b", "batch_size": 16, "quantize": "bitnet"},
    "0.5B FP8, not compiled": {"model": "qwen2.5-0.5b", "batch_size": 16, "compile": False, **FP8},
    "mixture of 580 M, fp8_blockwise": {"model": "moe-580m-a100m", "batch_size": 32, "quantize": "fp8_blockwise"},
    "mixture of 580 M, INT8": {"model": "moe-580m-a100m", "batch_size": 32, "quantize": "int8"},
    "largest: 3B fp8_blockwise, adamw_8bit, norm, swiglu": largest(
        26, model="qwen2.5-3b", quantize="fp8_blockwise", optim="adamw_8bit", **SELECTIVE
    ),
    "largest: 1.5B fp8_rowwise, adamw_bf16_sr": largest(
        42, model="qwen2.5-1.5b", quantize="fp8_rowwise", optim="adamw_bf16_sr"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PlannedMemorySettings:
    """Measure the memory and the time of training steps beside their plans."""

    cells: str = "*"
    """Cells to run: a glob that is matched with whole names."""
    slack: Annotated[float, Range(0, 1)] = 0.02
    """Share by which a run may take more memory than its plan says."""
    json: str | None = None
    """JSON file to write the results to; None: runs/planned_memory/TIME.json."""


def main(argv: list[str]) -> None:
    settings = parse(PlannedMemorySettings, argv, "-m benchmarks.planned_memory", listing)
    path = figures_path(settings, "planned_memory")
    check_json(path)
    names = [name for name in CELLS if fnmatchcase(name, settings.cells)]
    if not names:
        raise UserError(
            f"--cells: {settings.cells!r} finds none of the {len(CELLS)} cells, such as {next(iter(CELLS))!r}."
        )
    if not (gpus := visible_gpus()):
        raise UserError("planned_memory: no GPU is visible, and a CPU's memory is not planned; run it on a GPU.")
    device, free = describe_hardware(torch.device("cuda")).name, FreeGpus(gpus)

    def measure(name: str) -> tuple[str, dict[str, Any]]:
        with free.one() as gpu:
            environment = {"CUDA_VISIBLE_DEVICES": str(gpu)}
            return name, run_apart(cell_settings(name), WARMUP_STEPS, settings.slack, environment)

    results = {}
    with ThreadPoolExecutor(len(gpus)) as pool:
        for done in as_completed([pool.submit(measure, name) for name in names]):
            name, result = done.result()
            results[name] = result
            print(f"{name}: {result.get('reason') or shown_line(result)}", file=sys.stderr, flush=True)
            # After each: a machine may be taken away.
            table = planned_table({name: results[name] for name in names if name in results})
            write_json([table], path, about_run(settings, device))
    print(table.markdown(), f"figures     {path}", sep="\n\n")


def cell_settings(name: str) -> CellSettings:
    values = {"seq_len": 1024, "compile": True, "n_steps": STEPS, **CELLS[name]}
    return CellSettings(**check_fields(CellSettings, values, name))


def pairs(result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Planned and measured, by what it is."""
    return {
        "tensors": (result["planned_gib"], result["peak_gib"]),
        "taken": (result["planned_taken_gib"], result["reserved_gib"] + result["outside_gib"]),
        "ms": (result["planned_step_ms"], result["step_ms"]),
    }


def shown_line(result: dict[str, Any]) -> str:
    figures = [f"{what} {planned:.2f}, {measured:.2f}" for what, (planned, measured) in pairs(result).items()]
    return f"{'; '.join(figures)}; {three_digits(result['tok_s'])} tok/s"


def planned_table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        "Training steps beside their plans: planned, measured (off)",
        "GiB; milliseconds",
        ["tensors", "taken", "ms", "tok/s"],
        [
            "taken: tensors, what the allocator holds back, and what CUDA takes; off: planned over measured; *: not "
            "recorded as CUDA graphs."
        ],
    )
    for name, result in results.items():
        if "reason" in result:
            table.put(name, "tensors", Cell(reason=result["reason"]))
            continue
        for what, (planned, measured) in pairs(result).items():
            digits, off = 0 if what == "ms" else 2, planned / measured - 1
            text = f"{planned:,.{digits}f}, {measured:,.{digits}f} ({100 * off:+.1f}%)"
            table.put(name, what, Cell(measured, text=text, details={"planned": planned}))
        details = {"recorded": result["recorded"], "fit": result["fit"]}
        speed = f"{result['tok_s']:,.0f}{'*' * (not result['recorded'])}"
        table.put(name, "tok/s", Cell(result["tok_s"], text=speed, details=details))
    return table


if __name__ == "__main__":
    run_script(main)
