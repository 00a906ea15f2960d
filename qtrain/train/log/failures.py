"""Why a run stops by itself: a non-finite value, or no memory left (`plan/out_of_memory.py` has that message)."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(at_most, 0, -1) if number % d == 0)


def _recompute_advice(settings: Mapping[str, Any]) -> list[str]:
    """--recompute, where it is given, with more kinds; else the sets that --activation_checkpointing names."""
    given, named = settings.get("recompute"), settings.get("activation_checkpointing")
    if not given:
        rungs = {"selective": "a little slower", "full": "about a quarter slower"}
        now = list(rungs).index(named) if named in rungs else -1
        return [
            f"--activation_checkpointing {name} (now {named}; {cost})"
            for number, (name, cost) in enumerate(rungs.items())
            if named is not None and number > now
        ]
    if "block" in given:
        return []
    more = {("norm", "swiglu"): "a little slower", ("ffn",): "about a sixth slower"}
    found = {(*given, *(kind for kind in kinds if kind not in given)): cost for kinds, cost in more.items()}
    found |= {("block",): "about a quarter slower"}
    return [
        f"--recompute '{json.dumps(kinds, separators=(',', ':'))}' (now {json.dumps(given)}; {cost})"
        for kinds, cost in found.items()
        if kinds != tuple(given)
    ]


def _8bit_advice(settings: Mapping[str, Any]) -> list[str]:
    """--keep_8bit, where it goes with what is recomputed (as the table of exclusions has it)."""
    named = {"selective": ("norm", "swiglu"), "full": ("block",)}.get(settings.get("activation_checkpointing"), ())
    kinds = set(settings.get("recompute") or named)
    again = {"ffn", "block"} | ({"norm"} if not settings.get("compile") else set())
    again |= {"norm", "swiglu"} if settings.get("lora") else set()
    if settings.get("keep_8bit") != () or kinds & again or settings.get("model_impl") == "hf":
        return []
    return ["""--keep_8bit '["gate_up"]' (now []; half of the MLP's largest tensor; rounds gradients)"""]


def memory_advice(settings: Mapping[str, Any], optimizers: Iterable[str] = ()) -> list[str]:
    """Flags to change when memory runs out, the cheapest first; the global batch stays the same.

    settings: the values in force (micro_batch_size not 0); flags that are missing in it, or at their limit, are left
    out. optimizers: the names that --optim takes; one with 8-bit states is advised.
    """
    advice, names = [], list(optimizers)
    micro = settings.get("micro_batch_size", 1)
    # The cheapest first: smaller micro-batches change neither the result nor, by much, the speed.
    if micro > 1 and not settings.get("optimizer_in_backward"):  # it cannot accumulate
        smaller = _largest_divisor(micro, micro // 2)
        accumulation = settings.get("gradient_accumulation", 0) * micro // smaller
        also = f" --gradient_accumulation {accumulation}" if accumulation else ""
        advice.append(f"--micro_batch_size {smaller}{also} (now {micro}; the batch and the result stay the same)")
    advice += _recompute_advice(settings)
    # As the table of exclusions: not with --tp, --ep, --deterministic or accumulation.
    own, one_pass = settings.get("optim") in names, settings.get("gradient_accumulation") == 1
    parts = settings.get("tp", 1) > 1 or settings.get("ep", 1) > 1
    if own and one_pass and not (parts or settings.get("deterministic") or settings.get("optimizer_in_backward")):
        advice.append("--optimizer_in_backward --clip_grad_norm 0 (gradients of one layer at a time; no clipping)")
    chunks = settings.get("loss_chunks")
    if chunks is not None and chunks < 64:
        advice.append(f"--loss_chunks {max(2, chunks * 4)} (now {chunks}; smaller chunks of logits)")
    advice += _8bit_advice(settings)  # what follows changes values
    optim = settings.get("optim")
    # States in host memory take none of the GPU's.
    on_host = (settings.get("optim_kwargs") or {}).get("offload") or "m" in (settings.get("offload") or ())
    if optim is not None and not on_host and not any(bits in optim for bits in ("8bit", "4bit")):
        lighter = sorted(name for name in names if "8bit" in name)
        advice += [f"--optim {name} (now {optim}; states of one byte a value)" for name in lighter[:1]]
    if settings.get("seq_len", 0) >= 256:
        advice.append(f"--seq_len {settings['seq_len'] // 2} (now {settings['seq_len']}; shorter context)")
    return advice
