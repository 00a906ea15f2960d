"""Held-out loss of runs with a fault of quantization, and how much of it `--health_fallback` brings back.

python -m benchmarks.health_faults --seeds 1 2 3 4 --json health_faults.json

A small llama learns Python's standard library byte by byte, three times a seed: in the scheme without the fault, with
it, and with it and the fallback. The runs of a seed begin with the same weights and see the same batches, so their
losses are compared in pairs; the table has means over the seeds, of differences with their standard errors.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import faults
from qtrain.bench.tables import Cell, Table, write_asked
from qtrain.core.config import parse
from qtrain.core.process import run_script
from qtrain.pairs.results import with_error
from qtrain.train.settings.settings import Count


@dataclass(frozen=True)
class Fault:
    """How a fault is put into a process, and the settings of the runs with and without it."""

    inject: Callable[[], contextlib.AbstractContextManager[None]]
    settings: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    """What the model has besides SHAPE."""
    without_fault: dict[str, Any] = field(default_factory=dict)
    """Settings of the run without it, where they are others."""


E5M2 = {"quantize": "fp8_rowwise", "quantize_kwargs": '{"power_of_two":false}'}
NEAREST = {"quantize": "int8", "quantize_kwargs": '{"stochastic_rounding":false}'}
EXPERTS = {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "head_dim": 32, "norm_topk_prob": False,
}  # fmt: skip
FAULTS = {
    "outlier channel, int8": Fault(faults.outlier_channel, {"quantize": "int8"}),
    "e5m2 activations": Fault(faults.e5m2_activations, E5M2),
    "INT8 head to nearest": Fault(faults.head_to_nearest, {**NEAREST, "quantize_lm_head": True}, {"vocab_size": 4096}),
    "collapsed router": Fault(
        faults.collapsed_router,
        {"quantize": "int8", "router_balance_loss": 0},
        EXPERTS,
        without_fault={"router_balance_loss": 0.01},
    ),
}

SHAPE = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
COLUMNS = ("no fault", "fault", "with fallback", "fault - no fault", "with fallback - no fault")


@dataclass(frozen=True)
class FaultSettings:
    """Compare runs with faults, with and without --health_fallback."""

    faults: tuple[str, ...] = tuple(FAULTS)
    """Faults."""
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    """Of weights and batches."""
    n_steps: Count = 240
    """Steps of a run."""
    health: Count = 20
    """Steps between health samples."""
    lr: float = 1e-3
    """Peak learning rate."""
    jobs: Count = 1
    """Runs at a time."""
    json: str | None = None
    """File for the figures."""


def write_texts(folder: Path) -> None:
    """Python's standard library, every tenth file held out."""
    for i, path in enumerate(sorted(Path(os.__file__).parent.glob("*.py"))):
        part = folder / ("held_out" if i % 10 == 9 else "train")
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{path.stem}.txt").write_bytes(path.read_bytes())


def train(folder: Path, settings: FaultSettings, seed: int, fault: str, column: str) -> float:
    """The held-out loss of a run in nats a byte."""
    # Imported by the processes of the pool, whose training threads it sets up.
    from qtrain.scripts.llm_pretrain import main as pretrain
    from qtrain.train.log.metrics import read_metrics

    name = f"{''.join(c if c.isalnum() else '_' for c in f'{fault} {column}')}_{seed}"
    given, model = FAULTS[fault], folder / f"{name}.json"
    model.write_text(json.dumps(SHAPE | given.shape))
    data = {part: f'{{"type":"text","paths":"{folder / part}","tokenizer":"byte"}}' for part in ("train", "held_out")}
    values = {
        "model": model, "train_ds": data["train"], "eval_ds": data["held_out"], "seq_len": 64, "batch_size": 8,
        "lr": settings.lr, "lr_schedule_kwargs": '{"warmup":0.05,"decay":0.5}', "n_steps": settings.n_steps,
        "eval_interval": settings.n_steps, "eval_sequences": 256, "device": "cpu", "dtype": "fp32", "keep_ckpts": 0,
        "seed": seed, "runs_dir": folder / "runs", "run_name": name, "health": settings.health,
        "health_fallback": 2 * (column == "with fallback"), **given.settings,
        **(given.without_fault if column == "no fault" else {}),
    }  # fmt: skip
    flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in values.items()]
    inject = contextlib.nullcontext if column == "no fault" else given.inject
    torch.set_num_threads(1)
    with inject(), open(folder / f"{name}.log", "w") as log, contextlib.redirect_stdout(log):
        pretrain([*flags, "--no_export"])
    (run,) = (folder / "runs" / "llm_pretrain").glob(f"*_{name}")
    samples = read_metrics(run / "health.jsonl") if (run / "health.jsonl").exists() else []
    for row in samples:
        if "warning" in row:
            print(f"{name}: {row['step']} {row['warning']}", file=sys.stderr, flush=True)
    loss = read_metrics(run / "metrics.jsonl")[-1]["eval_loss"]
    # Of each router, the effective number of experts (inverse Simpson index) in its last sample.
    used = {row["linear"]: 1 / sum(share**2 for share in row["experts"]["load"]) for row in samples if "experts" in row}
    routers = f", {statistics.mean(used.values()):.1f} experts in use" if used else ""
    print(f"{name}: {loss:.4f}{routers}", file=sys.stderr, flush=True)
    return loss


def main(argv: list[str]) -> None:
    settings = parse(FaultSettings, argv, "-m benchmarks.health_faults")
    table = Table("Held-out loss with faults", "nats a byte", COLUMNS)
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(settings.jobs, get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        folder = Path(name)
        write_texts(folder)
        runs = {
            (seed, fault, column): pool.submit(train, folder, settings, seed, fault, column)
            for fault in settings.faults for seed in settings.seeds for column in COLUMNS[:3]
        }  # fmt: skip
        for fault in settings.faults:
            found = {c: [runs[seed, fault, c].result() for seed in settings.seeds] for c in COLUMNS[:3]}
            print(fault, {column: [round(x, 4) for x in losses] for column, losses in found.items()}, flush=True)
            for column, losses in found.items():
                table.put(fault, column, Cell(statistics.mean(losses), text=f"{statistics.mean(losses):.3f}"))
            for column in COLUMNS[1:3]:
                more = [one - other for one, other in zip(found[column], found["no fault"], strict=True)]
                table.put(fault, f"{column} - no fault", Cell(statistics.mean(more), text=with_error(more)))
    print(table.markdown())
    write_asked([table], settings, torch.device("cpu"))


if __name__ == "__main__":
    run_script(main)
