"""Training steps of one model with one scheme, timed; `train_step.py` runs each in its own process."""

import itertools
import statistics
import time
from typing import Any

import torch

from qtrain.data import Batch
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import prepare
from qtrain.train.log.failures import GIB, is_out_of_memory
from qtrain.train.loop import peak_memory
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.step.cuda_graphs import step_graphs
from qtrain.train.step.forward import language_forward
from qtrain.train.step.in_backward import OptimizerInBackward
from qtrain.train.step.step import apply_gradients, compute_gradients


def time_training(settings: LanguageSettings, warmup_steps: int) -> dict[str, Any]:
    """Speed over `settings.n_steps` steps after `warmup_steps`, on random tokens: the median time from the end of a
    step to the end of the next; or {"reason": ...}. Of all processes, if a launcher has started several.

    Keys: tok_s, step_ms, sol, mfu, peak_gib, planned_gib, loss.
    """
    try:
        return _time_training(settings, warmup_steps)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = peak_memory(choose_device(settings.device)) / GIB
        return {"reason": f"out of memory, with {peak:.1f} GiB in use"}


def _time_training(settings: LanguageSettings, warmup_steps: int) -> dict[str, Any]:
    # ---- plan, model, quantize, optimizer ----------------------------------------------------------------------------
    checked = check_settings(settings, "train_step")
    architecture = LanguageArchitecture.of(settings, checked.mesh)
    prepared = prepare(checked, architecture, data=())
    device, geometry, plan = prepared.device, prepared.geometry, prepared.plan
    model, quantized = build_quantized(prepared)
    run = assemble(prepared, model, quantized)

    # ---- steps -------------------------------------------------------------------------------------------------------
    forward = language_forward(model, None)
    graphs = step_graphs(run, forward)
    in_backward = OptimizerInBackward(run.optimizer, run.parallel) if settings.optimizer_in_backward else None
    generator = torch.Generator().manual_seed(settings.seed + prepared.mesh.data_rank)
    marks, loss = [_mark(device)], float("nan")
    for step in range(warmup_steps + settings.n_steps):
        batches = [
            random_batch(architecture.vocab_size, geometry.micro_batch_size, settings.seq_len, generator).to(device)
        ]
        batches *= geometry.gradient_accumulation  # the tokens do not affect the speed
        gradients = compute_gradients(
            model, forward, quantized, batches, step, graphs, in_backward, parallel=run.parallel
        )
        apply_gradients(
            run.optimizer,
            quantized,
            gradients,
            lr=settings.lr,
            clip_grad_norm=settings.clip_grad_norm,
            graphs=graphs,
            in_backward=in_backward,
            parallel=run.parallel,
        )
        marks.append(_mark(device))
        loss = gradients.loss
    times = [_seconds(*pair) for pair in itertools.pairwise(marks[warmup_steps:])]
    seconds = statistics.median(times)
    tok_s = plan.tokens_per_step / seconds
    return {
        "tok_s": tok_s,
        "step_ms": 1000 * seconds,
        **plan.efficiency(tok_s),
        "peak_gib": peak_memory(device) / GIB,
        "planned_gib": sum(plan.memory.values()) / GIB,
        "loss": loss,
    }


def random_batch(vocab_size: int, sequences: int, seq_len: int, generator: torch.Generator) -> Batch:
    """Random tokens on the generator's device; every next token is a label."""
    tokens = torch.randint(0, vocab_size, (sequences, seq_len + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _mark(device: torch.device) -> torch.cuda.Event | float:
    """The end of a step. Not waited for, as a training loop does not: the host prepares the next step meanwhile."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _seconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
