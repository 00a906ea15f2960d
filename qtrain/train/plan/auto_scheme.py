"""`--quantize auto` resolved before a run: timed here or, where the run resumes, as its checkpoint has it.

Of several processes rank 0 chooses for all: times differ from one to the next, and weights and codes that ranks divide
must be of one scheme.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from qtrain.comm.ranks import from_rank_0
from qtrain.core.checks import check_fields
from qtrain.quant.schemes.auto import Auto, PerShape, choose_per_shape, linear_shapes
from qtrain.train.checked_settings import CheckedSettings
from qtrain.train.state.checkpoint import read_meta


def resolve_auto_scheme(
    checked: CheckedSettings, model: nn.Module, head: nn.Module | None, tokens: int
) -> tuple[CheckedSettings, list[str]]:
    """(`checked` with the scheme of each shape of linear, lines for the plan); unchanged and none but for `auto`.

    model: on the meta device; head: its output head; tokens: of a micro-batch. The choice goes into the settings'
    `quantize_kwargs.chosen`, and so into config.json and every checkpoint.
    """
    scheme, settings, resumed_from = checked.scheme, checked.settings, checked.folder.resumed_from
    if not isinstance(scheme, Auto):
        return checked, []
    saved = (read_meta(resumed_from).get("quantize_kwargs") or {}) if resumed_from else {}
    if "chosen" in saved:
        scheme = dataclasses.replace(scheme, **check_fields(Auto, {"chosen": saved["chosen"]}, "--resume"))
    per_shape, lines = from_rank_0(
        lambda: choose_per_shape(
            scheme,
            linear_shapes(model, None if settings.quantize_lm_head else head, settings.quantize_min_size),
            tokens=tokens,
            accumulation=checked.geometry.gradient_accumulation,
            dtype=checked.dtype,
            device=checked.device,
        )
    )
    if checked.device.type == "cuda":  # the timed linears do not count into the run's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(checked.device)
    settings = dataclasses.replace(settings, quantize_kwargs=_recorded(scheme, per_shape))
    return dataclasses.replace(checked, settings=settings, scheme=per_shape), lines


def _recorded(scheme: Auto, per_shape: PerShape) -> dict[str, Any]:
    return {"candidates": list(scheme.candidates), "chosen": per_shape.as_json()}
