"""Flags to change where memory has run out: the cheapest first, and none that the table of exclusions refuses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS
from qtrain.train.settings.exclusion import Exclusion
from qtrain.train.settings.exclusions import RUN_EXCLUSIONS
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import TrainSettings

MOST_CHUNKS = 64
"""Of the loss: more save nothing that counts."""

Change = tuple[dict[str, Any], str]
"""Settings by name, and the line that advises them: flags (why)."""


def memory_advice(settings: TrainSettings) -> list[str]:
    """Lines that name flags and their cost; the global batch stays the same. Flags at their limit are left out.

    settings: the values in force (micro_batch_size and gradient_accumulation not 0).
    """
    present = _refused(settings)
    # What an earlier check has let through, as part of a script, is no reason against a change.
    return [line for change, line in _changes(settings) if _refused(replace(settings, **change)) <= present]


def _refused(settings: TrainSettings) -> set[Exclusion | None]:
    """The rows that refuse the settings; None: what follows from them cannot be worked out."""
    options = Options(settings)
    try:
        return {row for row in RUN_EXCLUSIONS if row.refused and row.applies(options)}
    except UserError:
        return {None}


def _changes(settings: TrainSettings) -> Iterator[Change]:
    # The cheapest first: smaller micro-batches change neither the result nor, by much, the speed.
    if settings.micro_batch_size > 1:
        yield _smaller_micro_batch(settings.micro_batch_size, settings.gradient_accumulation)
    yield from _recompute(settings)
    if not settings.optimizer_in_backward:
        flags = "--optimizer_in_backward --clip_grad_norm 0"
        change = {"optimizer_in_backward": True, "clip_grad_norm": 0.0}
        yield change, f"{flags} (gradients of one layer at a time; no clipping)"
    chunks = getattr(settings, "loss_chunks", MOST_CHUNKS)
    if chunks < MOST_CHUNKS:
        more = max(2, chunks * 4)
        yield {"loss_chunks": more}, f"--loss_chunks {more} (now {chunks}; smaller chunks of logits)"
    # What follows changes values.
    if getattr(settings, "keep_8bit", None) == ():
        line = """--keep_8bit '["gate_up"]' (now []; half of the MLP's largest tensor; rounds gradients)"""
        yield {"keep_8bit": ("gate_up",)}, line
    # States in host memory take none of the GPU's.
    on_host = (settings.optim_kwargs or {}).get("offload") or "m" in (settings.offload or ())
    if not on_host and not any(bits in settings.optim for bits in ("8bit", "4bit")):
        lighter = next(name for name in OPTIMIZERS.names() if "8bit" in name)
        line = f"--optim {lighter} (now {settings.optim}; states of one byte a value)"
        yield {"optim": lighter, "optim_kwargs": None}, line
    if (length := getattr(settings, "seq_len", 0)) >= 256:
        yield {"seq_len": length // 2}, f"--seq_len {length // 2} (now {length}; shorter context)"


def _smaller_micro_batch(micro: int, accumulation: int) -> Change:
    smaller = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
    change = {"micro_batch_size": smaller, "gradient_accumulation": accumulation * micro // smaller}
    flags = " ".join(f"--{name} {value}" for name, value in change.items())
    return change, f"{flags} (now {micro}; the batch and the result stay the same)"


def _recompute(settings: TrainSettings) -> Iterator[Change]:
    """--recompute, where it is given, with more kinds; else the sets that --activation_checkpointing names."""
    given, named = getattr(settings, "recompute", ()), settings.activation_checkpointing
    if not given:
        rungs = {"selective": "a little slower", "full": "about a quarter slower"}
        now = list(rungs).index(named) if named in rungs else -1
        for name, cost in list(rungs.items())[now + 1 :]:
            yield {"activation_checkpointing": name}, f"--activation_checkpointing {name} (now {named}; {cost})"
        return
    if "block" in given:
        return
    more = {("norm", "swiglu"): "a little slower", ("ffn",): "about a sixth slower"}
    found = {(*given, *(kind for kind in kinds if kind not in given)): cost for kinds, cost in more.items()}
    found |= {("block",): "about a quarter slower"}
    for kinds, cost in found.items():
        if kinds != tuple(given):
            names = json.dumps(kinds, separators=(",", ":"))
            yield {"recompute": kinds}, f"--recompute '{names}' (now {json.dumps(given)}; {cost})"
