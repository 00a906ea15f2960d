"""Adapters in PEFT's format, saved for and loaded like `peft.PeftModel.from_pretrained`: adapter_config.json and
adapter_model.safetensors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.checks import check_fields, check_value, read_json, user_path
from qtrain.errors import UserError
from qtrain.models.lora import Lora, lora_linears
from qtrain.models.writing import writing_export

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' parameters under PEFT's names."""
    found: dict[str, Tensor] = {}
    for linear in lora_linears(model).values():
        for projection, a, b in zip(linear.adapted, linear.lora_a, linear.lora_b, strict=True):
            found[f"{PREFIX}{projection.hf_name}.lora_A.weight"] = a
            found[f"{PREFIX}{projection.hf_name}.lora_B.weight"] = b
        for projection, magnitude in zip(linear.adapted, linear.magnitude or (), strict=linear.magnitude is not None):
            found[f"{PREFIX}{projection.hf_name}.lora_magnitude_vector"] = magnitude
    return found


def save_adapter(model: nn.Module, lora: Lora, base: str, folder: Path | str) -> None:
    """Write the adapters into `folder`. base: the model that they adapt, a hub id or a folder."""
    from safetensors.torch import save_file

    folder = Path(folder)
    words = {projection.word for linear in lora_linears(model).values() for projection in linear.adapted}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(words),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in adapter_tensors(model).items()}
    with writing_export(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def with_adapter_config(lora: Lora, flag: str = "--lora") -> Lora:
    """`lora` with r, alpha, targets, rslora and dora of the adapter that it continues, if it names one."""
    if lora.adapter is None:
        return lora
    where = f"{flag}.adapter"
    path = user_path(lora.adapter, where)
    if not (path / CONFIG).is_file():
        raise UserError(f"{where}: {lora.adapter} is no adapter: it has no {CONFIG}. Give a folder in PEFT's format.")
    config = read_json(path / CONFIG, where)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise UserError(f"{where}: {path / CONFIG} describes {kind!r}, not a LoRA adapter.")
    unsupported = {"bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
    for key, plain in unsupported.items():
        if config.get(key) not in (plain, None):
            raise UserError(f"{where}: its {key} is {config[key]!r}, which is not supported; only {plain!r} is.")
    targets = config.get("target_modules")
    if isinstance(targets, list) and all(isinstance(t, str) for t in targets):
        targets = tuple(sorted({target.rpartition(".")[2] for target in targets}))
    elif targets != "all-linear":
        raise UserError(f"{where}: its target_modules are {targets!r}; only a list of projections' names is supported.")
    fields = {f.name: f.type for f in dataclasses.fields(Lora)}
    return dataclasses.replace(
        lora,
        r=check_value(f"{where}: r", config.get("r"), fields["r"]),
        alpha=check_value(f"{where}: lora_alpha", config.get("lora_alpha"), fields["alpha"]),
        rslora=bool(config.get("use_rslora", False)),
        dora=bool(config.get("use_dora", False)),
        targets=targets,
    )


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str, flag: str = "--lora") -> None:
    """Fill the adapters of `model` from a folder. UserError for adapters of another model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = f"{flag}.adapter"
    path = user_path(folder, where) / WEIGHTS
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: {path} cannot be read as safetensors: {error}") from None
    wanted = adapter_tensors(model)
    for name in [*sorted(saved.keys() - wanted.keys()), *sorted(wanted.keys() - saved.keys())]:
        what = "has no place in this model" if name in saved else "is missing"
        raise UserError(f"{where}: {folder} is an adapter of another model: {name} {what}.")
    for name, target in wanted.items():
        if saved[name].shape != target.shape:
            shapes = f"{list(saved[name].shape)}, here it is {list(target.shape)}"
            raise UserError(f"{where}: {folder} is an adapter of another model: {name} has the shape {shapes}.")
        target.copy_(saved[name])


def as_lora(values: dict[str, Any], flag: str = "--lora") -> Lora:
    """The checked options of --lora, with those of the adapter that it names. UserError where the two contradict."""
    given = Lora(**check_fields(Lora, values, flag))
    lora = with_adapter_config(given, flag)
    for key in values:
        asked, saved = (sorted(v) if isinstance(v := getattr(of, key), tuple) else v for of in (given, lora))
        if asked != saved:
            raise UserError(
                f"{flag}.{key}: {asked!r} contradicts the adapter {lora.adapter}, which has {saved!r}. Leave it out to "
                "continue the adapter as it is, or leave out adapter to start a new one."
            )
    return lora
