"""Why a run stops by itself: a value that is no longer finite, or memory that ran out. One message, no traceback."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.errors import TrainingStopped

GIB = 1024**3


def _bad_values(tensor: Tensor | None) -> str | None:
    """How many values of `tensor` (of its local shard, if sharded) are NaN or Inf; None if there are none."""
    if tensor is None or not tensor.dtype.is_floating_point:
        return None
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach().float()  # the 8-bit floats have no isfinite
    if bool(torch.isfinite(local).all()):
        return None
    nans, infs = int(local.isnan().sum()), int(local.isinf().sum())
    return f"{nans:,} NaN and {infs:,} Inf among {local.numel():,} values"


@torch.no_grad()
def first_bad_tensor(model: nn.Module) -> str | None:
    """The first parameter, in the model's order, whose weight, or else whose gradient, has a NaN or Inf; None if all
    are finite. Weights come first because one bad weight makes all gradients bad.

    Meant for the moment of failure: it waits for the device once per tensor.
    """
    parameters = list(model.named_parameters())
    weights = [("weight", name, parameter) for name, parameter in parameters]
    gradients = [("gradient", name, parameter.grad) for name, parameter in parameters]
    for kind, name, tensor in weights + gradients:
        if found := _bad_values(tensor):
            return f"the {kind} of {name} ({found})"
    return None


def not_finite(
    step: int, what: str, value: float, bad: str | None, last_good: Path | None, *, updated: bool = False
) -> TrainingStopped:
    """The stop for `what` ("loss", "gradient norm") being NaN or Inf at `step`; `bad` is from first_bad_tensor.

    updated: the weights have been updated with it already (--optimizer_in_backward).
    """
    where = f"First bad tensor: {bad}." if bad else "All weights and gradients are finite."
    clip = "a smaller --clip_grad_norm"
    if updated:
        where = f"First bad tensor: {bad}." if bad else "All gradients are finite."
        where += " The weights have taken this step and are not to be trusted; nothing of it is saved."
        clip = "--clip_grad_norm 1 without --optimizer_in_backward"
    again = f"The last good checkpoint is {last_good} (--resume {last_good})." if last_good else "No checkpoint yet."
    return TrainingStopped(
        f"step {step}: the {what} is {value}. {where} {again} "
        f"Try a lower --lr, a longer warmup (--lr_schedule_kwargs) or {clip}; "
        "--quantize bf16 tells whether the scheme is the cause."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device's, or the host's, memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    says = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in says)


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(at_most, 0, -1) if number % d == 0)


def memory_advice(settings: Mapping[str, Any], optimizers: Iterable[str] = ()) -> list[str]:
    """Flags to change when memory runs out, the cheapest first; what is already at its limit is left out.

    `settings` holds the values in force (micro_batch_size worked out, not 0); a flag that is not in it is not advised.
    `optimizers` are the names that --optim takes: those with low-bit states are advised. The global batch stays.
    """
    advice, names = [], list(optimizers)
    micro = settings.get("micro_batch_size", 1)
    if micro > 1 and not settings.get("optimizer_in_backward"):  # which cannot accumulate
        smaller = _largest_divisor(micro, micro // 2)
        accumulation = settings.get("gradient_accumulation", 0) * micro // smaller
        also = f" --gradient_accumulation {accumulation}" if accumulation else ""
        advice.append(f"--micro_batch_size {smaller}{also} (now {micro}; the batch and the result stay the same)")
    kept = settings.get("activation_checkpointing")
    if kept == "none":
        advice.append("--activation_checkpointing selective (now none; some slower)")
    if kept in ("none", "selective"):
        advice.append(f"--activation_checkpointing full (now {kept}; about a quarter slower)")
    own, one_pass = settings.get("optim") in names, settings.get("gradient_accumulation") == 1
    if own and one_pass and not settings.get("optimizer_in_backward"):
        advice.append("--optimizer_in_backward --clip_grad_norm 0 (gradients of one layer at a time; no clipping)")
    chunks = settings.get("loss_chunks")
    if chunks is not None and chunks < 64:
        advice.append(f"--loss_chunks {max(2, chunks * 4)} (now {chunks}; smaller pieces of the logits)")
    optim = settings.get("optim")
    if optim is not None and not any(bits in optim for bits in ("8bit", "4bit")):
        lighter = sorted(name for name in names if "8bit" in name)
        advice += [f"--optim {name} (now {optim}; states of one byte a value)" for name in lighter[:1]]
    if settings.get("seq_len", 0) >= 256:
        advice.append(f"--seq_len {settings['seq_len'] // 2} (now {settings['seq_len']}; shorter context)")
    return advice


def out_of_memory(
    step: int,
    settings: Mapping[str, Any],
    estimate: Mapping[str, float],
    peak: int,
    capacity: int | None,
    optimizers: Iterable[str] = (),
) -> TrainingStopped:
    """The stop for exhausted memory: the plan's estimate by kind, the measured peak, and what to change, in order.

    `estimate` maps a kind ("weights", "activations", ...) to bytes; `peak` and `capacity` are bytes of the device.
    """
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in estimate.items())
    of = f" of {capacity / GIB:.1f}" if capacity else ""
    lines = [
        f"step {step}: out of memory. The plan was {sum(estimate.values()) / GIB:.1f} GiB ({kinds}); "
        f"the peak so far was {peak / GIB:.1f}{of} GiB."
    ]
    advice = memory_advice(settings, optimizers)
    if not advice:
        return TrainingStopped(lines[0] + " Every setting that saves memory is at its limit: take a smaller --model.")
    lines += ["Change one of these, in this order:", *(f"  {n}. {line}" for n, line in enumerate(advice, 1))]
    return TrainingStopped("\n".join(lines))
