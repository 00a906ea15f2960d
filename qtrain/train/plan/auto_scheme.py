"""`--quantize auto` made definite before a run: timed, or, where the run goes on, as it was chosen when it began."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from qtrain.checks import check_fields
from qtrain.quant import Auto, PerShape, Scheme, choose_per_shape, linear_shapes
from qtrain.train.settings import BatchGeometry, TrainSettings
from qtrain.train.state.checkpoint import read_meta

Settings = TypeVar("Settings", bound=TrainSettings)


def resolve_auto_scheme(
    settings: Settings,
    scheme: Scheme,
    shape_of_model: Callable[[], nn.Module],
    *,
    tokens: int,
    geometry: BatchGeometry,
    dtype: torch.dtype,
    device: torch.device,
    resumed_from: Path | None,
    head: Callable[[nn.Module], nn.Module | None] = lambda model: getattr(model, "lm_head", None),
) -> tuple[Settings, Scheme, list[str]]:
    """(settings, scheme, lines for the plan), unchanged and none but for `auto`.

    shape_of_model: builds the model on the meta device; head: finds its output head. tokens: of a micro-batch. The
    choice goes into the settings' `quantize_kwargs.chosen`, and so into config.json and every checkpoint.
    """
    if not isinstance(scheme, Auto):
        return settings, scheme, []
    saved = (read_meta(resumed_from).get("quantize_kwargs") or {}) if resumed_from else {}
    if "chosen" in saved:
        scheme = dataclasses.replace(scheme, **check_fields(Auto, {"chosen": saved["chosen"]}, "--resume"))
    model = shape_of_model()
    leave = None if settings.quantize_lm_head else head(model)
    counts = linear_shapes(model, leave, settings.quantize_min_size)
    accumulation = geometry.gradient_accumulation
    definite, lines = choose_per_shape(
        scheme, counts, tokens=tokens, accumulation=accumulation, dtype=dtype, device=device
    )
    if device.type == "cuda":  # what was tried is no part of the run's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return dataclasses.replace(settings, quantize_kwargs=_recorded(scheme, definite)), definite, lines


def _recorded(scheme: Auto, definite: PerShape) -> dict:
    return {"candidates": list(scheme.candidates), "chosen": definite.as_json()}
