"""The message of a run that has no memory left: what was planned, what was taken, and settings that take less."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from qtrain.comm.ranks import rank, world
from qtrain.core.errors import Restart, TrainingStopped
from qtrain.core.hardware.memory import peak_memory
from qtrain.core.process import can_restart
from qtrain.train.log.failures import is_out_of_memory
from qtrain.train.plan.memory_advice import memory_advice
from qtrain.train.plan.plan import GIB, Plan
from qtrain.train.settings.settings import TrainSettings

LESS_MEMORY = 0.94
"""Of what was planned, or is there, what a run that ran out of memory is advised to take."""


def out_of_memory(
    step: int, plan: Plan, settings: TrainSettings, peak: int, checkpoint: Path | None = None
) -> TrainingStopped:
    """The error for exhausted memory: the plan, the measured peak, and what to change. With --fit auto a `Restart` in
    less memory, from `checkpoint` if there is one.

    peak: bytes of the device.
    """
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in plan.memory.items())
    capacity = plan.hardware.memory_bytes
    of = f" of {capacity / GIB:.1f}" if capacity else ""
    where = f" on rank {rank()}" if world() > 1 else ""
    message = (
        f"step {step}: out of memory{where}. The plan was {plan.memory_taken / GIB:.1f} GiB ({kinds}); "
        f"the peak so far was {peak / GIB:.1f}{of} GiB."
    )
    less = LESS_MEMORY * min(plan.memory_taken, capacity or plan.memory_taken)
    smaller = plan.within(less)
    if smaller and getattr(settings, "fit", "off") == "auto" and can_restart():
        flags = ("--memory_limit", f"{less / GIB:.2f}", *(("--resume", str(checkpoint)) if checkpoint else ()))
        return Restart(f"{message} --fit auto starts again with {' '.join(flags)}.", flags)
    lines = [message]
    if smaller:
        lines.append(f"The fastest setting that takes {less / GIB:.1f} GiB by the plan: {smaller}")
    # Advice starts from the sizes in force, not from the zeros that stand for defaults.
    advice = memory_advice(plan.settings_in_force(settings))
    if not advice:
        return TrainingStopped(message + " Every setting that saves memory is at its limit: take a smaller --model.")
    lines += ["Change one of these, in this order:", *(f"  {n}. {line}" for n, line in enumerate(advice, 1))]
    return TrainingStopped("\n".join(lines))


@contextlib.contextmanager
def explain_out_of_memory(
    plan: Plan,
    settings: TrainSettings,
    device: torch.device,
    step: Callable[[], int] = lambda: 0,
    checkpoint: Callable[[], Path | None] = lambda: None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside into TrainingStopped: the plan, the peak, and which flags to change.

    step: the step that is running. checkpoint: the newest, from which --fit auto goes on."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(step(), plan, settings, peak_memory(device), checkpoint()) from None
