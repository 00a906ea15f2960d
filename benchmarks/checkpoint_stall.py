"""How long training waits for a checkpoint: written at once, and in the background (--async_checkpoint).

    python -m benchmarks.checkpoint_stall --model qwen2.5-1.5b --optim adamw_8bit
    torchrun --nproc_per_node 2 -m benchmarks.checkpoint_stall --model qwen2.5-7b

The steps are those of llm_pretrain.py, on random tokens. The first copy also allocates and locks the host's memory; the
table's is a later one. Every checkpoint is deleted again.
"""

import dataclasses
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from qtrain.bench.tables import Cell, Table
from qtrain.bench.training_cell import random_batch
from qtrain.comm.ranks import all_gather, from_rank_0, leave_world, rank
from qtrain.core.config import JsonDict, as_dict, parse
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.hardware.rates import synchronized_time
from qtrain.core.process import run_script
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import prepare
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.listing import listing
from qtrain.train.settings.settings import Count, LanguageSettings
from qtrain.train.state.background_save import Written
from qtrain.train.state.run import Run
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients


@dataclass(frozen=True)
class CheckpointStallSettings:
    """Time checkpoints of a model in training, written at once and in the background."""

    model: str = "qwen2.5-0.5b"
    """Model to train: a name that --list shows, a hub id, a local folder, or a config.json."""
    quantize: str = "bf16"
    """Scheme of the linear layers; --list shows all."""
    optim: str = "adamw"
    """Optimizer; --list shows all."""
    optim_kwargs: JsonDict = None
    """Options of --optim as a JSON object; --list shows them."""
    batch_size: Count = 8
    """Sequences per optimizer step, over all processes."""
    seq_len: Count = 1024
    """Tokens per sequence."""
    saves: Count = 3
    """Checkpoints of each kind; the table shows medians."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto: the GPU if there is one, else the CPU."""
    folder: str = "."
    """Where to write the checkpoints: a folder on the disk in question."""


def main(argv: list[str]) -> None:
    settings = parse(CheckpointStallSettings, argv, "-m benchmarks.checkpoint_stall", listing)
    own = {f.name for f in dataclasses.fields(LanguageSettings)}
    chosen = LanguageSettings(**{key: value for key, value in as_dict(settings).items() if key in own})
    checked = check_settings(chosen, "checkpoint_stall")
    architecture = LanguageArchitecture.of(chosen, checked.mesh)
    prepared = prepare(checked, architecture, data=())
    model, quantized = build_quantized(prepared)
    run = assemble(prepared, model, quantized)
    forward, generator = language_forward(model, None), torch.Generator().manual_seed(rank())
    size = (architecture.vocab_size or 0, prepared.geometry.micro_batch_size, chosen.seq_len)

    def step() -> None:
        batches = [random_batch(*size, generator).to(prepared.device)]
        gradients = compute_gradients(model, forward, quantized, batches, run.state.step, parallel=run.parallel)
        apply_gradients(run.optimizer, quantized, gradients, lr=1e-4, clip_grad_norm=1.0, parallel=run.parallel)
        run.state.step += 1

    folder = Path(from_rank_0(lambda: tempfile.mkdtemp(prefix="checkpoint_stall-", dir=settings.folder)))
    run.folder = dataclasses.replace(run.folder, path=folder)
    try:
        table = measure(
            run, step, settings.saves, f"Checkpoints of {settings.model} on {describe_hardware(run.device).name}"
        )
    finally:
        all_gather(None)  # nobody writes any more
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    print(table.markdown())
    leave_world()


def measure(run: Run, step: Callable[[], None], saves: int, title: str) -> Table:
    """The table of medians over `saves` checkpoints of each kind, with steps before, between and during them."""

    def seconds(action: Callable[[], object]) -> float:
        start = synchronized_time(run.device)
        action()
        return synchronized_time(run.device) - start

    alone = [seconds(step) for _ in range(2 + 5)][2:]
    at_once = []
    for _ in range(saves):
        step()
        at_once.append(seconds(run.save))
    stalls, during, written = [], [], []
    for _ in range(1 + saves):
        step()
        stalls.append(seconds(run.begin_save))
        # The number of steps that fit while all ranks write must be the same on all of them.
        while not any(all_gather(run.background.ended)):
            during.append(seconds(step))
        written.append(run.background.finish())
    first, *stalls = stalls
    sync, stall = statistics.median(at_once), statistics.median(stalls)
    return _table(title, sync, stall, first, alone, during, written[-1])


def _table(
    title: str, sync: float, stall: float, first: float, alone: list[float], during: list[float], written: Written
) -> Table:
    columns = ["at once s", "stall s", "of at once", "first stall s", "written in s", "step s", "step s while writing"]
    table = Table(title, "seconds for which training waits", [*columns, "host GiB a process"])
    values = {"at once s": sync, "stall s": stall, "first stall s": first, "written in s": written.write_s}
    values |= {"step s": statistics.median(alone), "host GiB a process": written.nbytes / 2**30}
    if during:
        values["step s while writing"] = statistics.median(during)
    for column, value in values.items():
        table.put("checkpoint", column, Cell(value, text=f"{value:,.3f}"))
    table.put("checkpoint", "of at once", Cell(stall / sync, text=f"{100 * stall / sync:.1f}%"))
    return table


if __name__ == "__main__":
    run_script(main)
