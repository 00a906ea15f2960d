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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from qtrain.bench.tables import Cell, Table, about_run, write_json
from qtrain.core.config import parse
from qtrain.core.hardware import describe_hardware
from qtrain.core.process import run_script
from qtrain.models.native.router import Router
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.schemes.fp8_rowwise import Fp8Rowwise
from qtrain.tensors.quantized_tensor import OperandFormat
from qtrain.train.assembly import assemble
from qtrain.train.settings.settings import Count

READERS = {"attn_norm": "attn.qkv", "mlp_norm": "mlp.gate_up"}
"""The linear that reads a norm's output."""


@contextlib.contextmanager
def outlier_channel(
    size: float | torch.Tensor = 1000.0, layers: Sequence[int] | None = None, norms: Sequence[str] = tuple(READERS)
) -> Iterator[None]:
    """A channel of the inputs of these layers' linears (None: of all layers), whose root mean square is 1, is `size`.
    Nothing reads it: its weights are 0."""
    build = assemble.build_quantized

    def with_outlier(prepared: Any) -> Any:
        built = build(prepared)
        model: Any = built[0]
        quantized = built[1]
        for layer in model.layers if layers is None else [model.layers[i] for i in layers]:
            for norm in norms:
                _add_outlier(getattr(layer, norm), layer.get_submodule(READERS[norm]).weight, size)
        quantized.refresh_weights()
        return model, quantized

    with patch.object(assemble, "build_quantized", with_outlier):
        yield


def _add_outlier(norm: nn.Module, weight: nn.Parameter, size: float | torch.Tensor) -> None:
    mask = torch.ones(weight.shape[1], device=weight.device)
    mask[5] = 0

    def hook(module: nn.Module, inputs: Any, x: torch.Tensor) -> torch.Tensor:
        return x * mask.to(x.dtype) + size * (1 - mask).to(x.dtype)

    norm.register_forward_hook(hook)
    with torch.no_grad():
        weight.mul_(mask)
    weight.register_hook(lambda gradient: gradient * mask.to(gradient.dtype))


@contextlib.contextmanager
def e5m2_activations() -> Iterator[None]:
    """Of fp8_rowwise with scales that are no powers of two."""
    formats = Fp8Rowwise.low_bit_formats

    def low_bit_formats(self: Fp8Rowwise, gemm: Any) -> tuple[OperandFormat, OperandFormat]:
        first, second = formats(self, gemm)
        return (first._replace(fmt="e5m2"), second) if gemm == "output" and not self.power_of_two else (first, second)

    with patch.object(Fp8Rowwise, "low_bit_formats", low_bit_formats):
        yield


@contextlib.contextmanager
def head_to_nearest() -> Iterator[None]:
    """The gradient of logits is rounded to nearest in INT8."""
    with patch.object(LowBitScheme, "for_linear", lambda self, *_, **__: self):
        yield


@contextlib.contextmanager
def collapsed_router() -> Iterator[None]:
    """All tokens go to the first experts."""

    def select(self: Router, scores: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.moe.per_token, device=scores.device).expand(len(scores), -1).contiguous()

    with patch.object(Router, "select", select):
        yield


@dataclass(frozen=True)
class Fault:
    """How a fault is put into a process, and the settings of the runs with and without it."""

    inject: Callable[[], contextlib.AbstractContextManager[None]]
    settings: dict[str, Any]
    vocab_size: int = 258


NEAREST = {"quantize": "int8", "quantize_kwargs": '{"stochastic_rounding":false}'}
FAULTS = {
    "outlier channel, int8": Fault(outlier_channel, {"quantize": "int8"}),
    "larger outlier channel, fp8_rowwise": Fault(partial(outlier_channel, 1e6), {"quantize": "fp8_rowwise"}),
    "e5m2 activations": Fault(
        e5m2_activations, {"quantize": "fp8_rowwise", "quantize_kwargs": '{"power_of_two":false}'}
    ),
    "head to nearest": Fault(head_to_nearest, {**NEAREST, "quantize_lm_head": True}, 2048),
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
    model.write_text(json.dumps({**SHAPE, "vocab_size": given.vocab_size}))
    data = {part: f'{{"type":"text","paths":"{folder / part}","tokenizer":"byte"}}' for part in ("train", "held_out")}
    values = {
        "model": model, "train_ds": data["train"], "eval_ds": data["held_out"], "seq_len": 64, "batch_size": 8,
        "lr": settings.lr, "lr_schedule_kwargs": '{"warmup":0.05,"decay":0.5}', "n_steps": settings.n_steps,
        "eval_interval": settings.n_steps, "eval_sequences": 256, "device": "cpu", "dtype": "fp32", "keep_ckpts": 0,
        "seed": seed, "runs_dir": folder / "runs", "run_name": name, "health": settings.health,
        "health_fallback": 2 * (column == "with fallback"), **given.settings,
    }  # fmt: skip
    flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in values.items()]
    inject = contextlib.nullcontext if column == "no fault" else given.inject
    torch.set_num_threads(1)
    with inject(), open(folder / f"{name}.log", "w") as log, contextlib.redirect_stdout(log):
        pretrain([*flags, "--no_export"])
    (run,) = (folder / "runs" / "llm_pretrain").glob(f"*_{name}")
    for row in read_metrics(run / "health.jsonl") if (run / "health.jsonl").exists() else []:
        if "warning" in row:
            print(f"{name}: {row['step']} {row['warning']}", file=sys.stderr, flush=True)
    loss = read_metrics(run / "metrics.jsonl")[-1]["eval_loss"]
    print(f"{name}: {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def with_error(values: Sequence[float]) -> str:
    """Mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):+.3f} ± {error:.3f}"


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
    if settings.json:
        write_json([table], Path(settings.json), about_run(settings, describe_hardware(torch.device("cpu")).name))


if __name__ == "__main__":
    run_script(main)
