"""Why a run stops by itself: a non-finite value, or no memory left (`plan/out_of_memory.py` has that message)."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from qtrain.core.errors import TrainingStopped


def _count_nonfinite(tensor: Tensor | None) -> str | None:
    """How many values of `tensor` (of the local shard of a DTensor) are NaN or Inf; None if all are finite."""
    if tensor is None or not tensor.dtype.is_floating_point:
        return None
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    local = local.detach().float()  # the 8-bit floats have no isfinite
    if bool(torch.isfinite(local).all()):
        return None
    nans, infs = int(local.isnan().sum()), int(local.isinf().sum())
    return f"{nans:,} NaN and {infs:,} Inf among {local.numel():,} values"


@torch.no_grad()
def first_nonfinite_tensor(parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first of these named parameters whose weight or else whose gradient has a NaN or Inf; None if all are finite.
    Weights come first because one non-finite weight makes all gradients non-finite.

    Meant for the moment of failure: it synchronizes once per tensor.
    """
    parameters = list(parameters)
    weights = [("weight", name, parameter) for name, parameter in parameters]
    gradients = [("gradient", name, parameter.grad) for name, parameter in parameters]
    for kind, name, tensor in weights + gradients:
        if found := _count_nonfinite(tensor):
            return f"the {kind} of {name} ({found})"
    return None


def nonfinite(
    step: int, what: str, value: float, tensor: str | None, last_good: Path | None, *, updated: bool = False
) -> TrainingStopped:
    """The error for `what` ("loss", "gradient norm") being NaN or Inf at `step`. tensor: from first_nonfinite_tensor.

    updated: the weights have been updated with it already (--optimizer_in_backward).
    """
    where = f"First non-finite tensor: {tensor}." if tensor else "All weights and gradients are finite."
    clip = "a smaller --clip_grad_norm"
    if updated:
        where = f"First non-finite tensor: {tensor}." if tensor else "All gradients are finite."
        where += " The weights have been updated with it; nothing of this step is saved."
        clip = "--clip_grad_norm 1 without --optimizer_in_backward"
    resume = f"The last good checkpoint is {last_good} (--resume {last_good})." if last_good else "No checkpoint yet."
    return TrainingStopped(
        f"step {step}: the {what} is {value}. {where} {resume} "
        f"Try a lower --lr, a longer warmup (--lr_schedule_kwargs) or {clip}; "
        "--quantize bf16 shows whether the scheme is the cause."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the memory of the device or of the host is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # CUDA's allocator has a type of its own; the host's, and cuBLAS's workspace, only a text.
    messages = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
