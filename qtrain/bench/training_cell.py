"""Training steps of one model with one set of settings, timed on random tokens in a process of its own.

The steps are those of llm_pretrain.py, the same functions in the same order. A cell that runs out of memory does not
affect the next one.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtrain.comm.launch import check_gpus, launch
from qtrain.comm.ranks import rank
from qtrain.core.checks import check_fields, parse_json
from qtrain.core.config import JsonDict, as_dict
from qtrain.core.gpu_sensors import GpuSensors
from qtrain.core.hardware.memory import limit_allocator, peak_memory
from qtrain.core.process import run_script
from qtrain.data.batch import Batch
from qtrain.models import add_lora, as_lora
from qtrain.train.assembly.assemble import assemble, build_quantized, trained_part
from qtrain.train.assembly.frozen_base import frozen_base
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import fit_memory, prepare
from qtrain.train.log.failures import is_out_of_memory
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.plan.plan import GIB
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.step.cuda_graphs import step_graphs
from qtrain.train.step.forward import language_forward
from qtrain.train.step.in_backward import OptimizerInBackward
from qtrain.train.step.step import apply_gradients, compute_gradients

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class CellSettings(LanguageSettings):
    """Settings of llm_pretrain.py, and adapters."""

    lora: JsonDict = None
    """Adapters, as --lora of llm_finetune.py; None: everything trains."""


def time_training(settings: LanguageSettings, warmup_steps: int, slack: float | None = None) -> dict[str, Any]:
    """Speed over `settings.n_steps` steps after `warmup_steps`, on random tokens: the median time from the end of a
    step to the end of the next; or {"reason": ...}. Of all processes, if a launcher has started several.

    slack: the share by which the run may take more of a GPU's memory than its plan says; None: all of it.

    Keys: tok_s, step_ms, sol, mfu, loss; watts and joules_token of this process's GPU, if NVML tells them: means over
    all timed steps, joules over the tokens of all ranks; recorded, whether as CUDA graphs; peak_gib, and build_gib
    before the first step; on a GPU reserved_gib and outside_gib (`memory_in_use`); of the plan planned_gib,
    planned_taken_gib, planned_step_ms; fit, the plan's lines.
    """
    try:
        return _time_training(settings, warmup_steps, slack)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        device = choose_device(settings.device)
        taken = "".join(f", {size / GIB:.1f} {kind}" for kind, size in memory_in_use(device).items())
        return {"reason": f"out of memory, with {peak_memory(device) / GIB:.1f} GiB in use{taken}"}


def _time_training(settings: LanguageSettings, warmup_steps: int, slack: float | None) -> dict[str, Any]:
    # ---- plan, model, quantize, adapt, optimizer ---------------------------------------------------------------------
    lora = as_lora(settings.lora) if isinstance(settings, CellSettings) and settings.lora is not None else None
    checked = check_settings(settings, "train_step", frozen_base(lora, settings))
    architecture = LanguageArchitecture.of(settings, checked.mesh)
    trained = trained_part(architecture.rank_config, lora, False, checked.dtype)
    prepared = prepare(fit_memory(checked, architecture, trained), architecture, (), trained)
    settings = prepared.language
    device, geometry, plan = prepared.device, prepared.geometry, prepared.plan
    model, quantized = build_quantized(prepared)
    build_peak = peak_memory(device)
    if slack is not None and device.type == "cuda":
        most = round((1 + slack) * plan.memory_taken)
        limit_allocator(device, min(most, plan.hardware.memory_bytes or most))  # the latter is --memory_limit's too
    if lora is not None:
        add_lora(model, lora, settings.seed)
    run = assemble(prepared, model, quantized)

    # ---- steps -------------------------------------------------------------------------------------------------------
    forward = language_forward(model, None)
    graphs = step_graphs(run, forward)
    in_backward = OptimizerInBackward(run.optimizer, run.parallel) if settings.optimizer_in_backward else None
    # Ranks train on different tokens, as in a run: an MoE's routing depends on them.
    generator = torch.Generator().manual_seed(settings.seed + prepared.mesh.reader)
    size = (architecture.vocab_size or 0, geometry.micro_batch_size, settings.seq_len)
    marks, loss = [_mark(device)], float("nan")
    sensors, start = GpuSensors(device), None
    for step in range(warmup_steps + settings.steps):
        if step == warmup_steps:
            start = _energy_mark(sensors, device)
        batch = random_batch(*size, generator).to(device, non_blocking=True)
        batches = [batch] * geometry.gradient_accumulation  # any tokens are as fast
        gradients = compute_gradients(
            model, forward, quantized, batches, step, graphs, in_backward, parallel=run.parallel,
            optimizer=run.optimizer,
        )  # fmt: skip
        rates = {"lr": settings.lr, "clip_grad_norm": settings.clip_grad_norm}
        recorded = {"graphs": graphs, "in_backward": in_backward, "parallel": run.parallel}
        apply_gradients(run.optimizer, quantized, gradients, **rates, **recorded)
        marks.append(_mark(device))
        loss = gradients.loss
    # From the end of a step to the end of the next: what the host prepares meanwhile is not counted twice.
    seconds = statistics.median(_seconds(*pair) for pair in itertools.pairwise(marks[warmup_steps:]))
    tok_s = plan.tokens_per_step / seconds
    return {
        "tok_s": tok_s,
        "step_ms": 1000 * seconds,
        **plan.efficiency(tok_s),
        **_energy(start, _energy_mark(sensors, device), settings.steps * plan.tokens_per_step),
        "recorded": graphs is not None and graphs.recorded,
        "peak_gib": peak_memory(device) / GIB,
        "build_gib": build_peak / GIB,
        **{f"{kind}_gib": size / GIB for kind, size in memory_in_use(device).items()},
        "planned_gib": sum(plan.memory.values()) / GIB,
        "planned_taken_gib": plan.memory_taken / GIB,
        "planned_step_ms": 1000 * plan.step_seconds,
        "fit": [note for note in prepared.notes if note.startswith("fit")],
        "loss": loss,
    }


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes of a GPU at their peak: what the allocator has reserved for tensors, and what is taken outside of it, by
    the CUDA context, loaded kernels and libraries, and by other processes. Empty for a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return {"reserved": torch.cuda.max_memory_reserved(device), "outside": total - free - reserved}


def random_batch(vocab_size: int, sequences: int, seq_len: int, generator: torch.Generator) -> Batch:
    """Random tokens on the generator's device; every next token is a label."""
    tokens = torch.randint(0, vocab_size, (sequences, seq_len + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _mark(device: torch.device) -> Any:
    """The end of a step. Not waited for, as a training loop does not: the host prepares the next step meanwhile."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _energy_mark(sensors: GpuSensors, device: torch.device) -> tuple[float, float] | None:
    """Joules of the energy counter and seconds, when the device has nothing left to do; None without a counter."""
    if sensors.available:
        torch.cuda.synchronize(device)
    joules = sensors.joules()
    return None if joules is None else (joules, time.perf_counter())


def _energy(start: tuple[float, float] | None, end: tuple[float, float] | None, tokens: int) -> dict[str, float]:
    """Mean power between two marks, and joules per token."""
    if start is None or end is None:
        return {}
    joules, seconds = (after - before for before, after in zip(start, end, strict=True))
    return {"watts": joules / seconds, "joules_token": joules / tokens}


# ---- in a process of its own -----------------------------------------------------------------------------------------


def run_apart(
    settings: LanguageSettings,
    warmup_steps: int,
    slack: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """`time_training` in its own process, or in --gpus of them; if that fails, {"reason": its last line}."""
    cell = json.dumps({"settings": as_dict(settings), "warmup_steps": warmup_steps, "slack": slack})
    done = subprocess.run(
        [sys.executable, "-m", "qtrain.bench.training_cell", cell],
        capture_output=True, text=True, env={**child_environment(), **(environment or {})},
    )  # fmt: skip
    # Whatever else the child prints, its result is the last line.
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    return {"reason": reason_of(done)[:200]}


def reason_of(done: subprocess.CompletedProcess) -> str:
    """Why a process failed: the signal that ended it, or the last line of what it said."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return name + (", as the kernel does when host memory runs out" if name == "SIGKILL" else "")
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def child_environment() -> dict[str, str]:
    """That of a process that imports this package and its scripts from wherever it runs."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def main(argv: list[str]) -> None:
    """Time the cell that the JSON object in argv describes, and print its figures as one."""
    cell = parse_json(argv[0], "cell")
    settings = CellSettings(**check_fields(CellSettings, cell["settings"], "cell"))
    # With --gpus this process only starts the ranks; they come here again with WORLD_SIZE set.
    check_gpus(settings.gpu_count, settings.device)
    launch(settings.gpu_count)
    result = time_training(settings, cell["warmup_steps"], cell["slack"])
    if rank() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    run_script(main)
