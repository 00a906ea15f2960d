"""Vision models of timm, built, run and exported in timm's format. timm is imported only when it is needed."""

import contextlib
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from qtrain.core.errors import UserError, first_line, missing_package, nearest
from qtrain.core.hub import reaching_hub
from qtrain.models.execution import prepare_compiling
from qtrain.models.hf.io import refuse_nonfinite
from qtrain.models.hf.writing import finish_export, writing_export
from qtrain.models.native.recompute import Region, selective_contexts
from qtrain.models.vision_layers import use_kernels
from qtrain.quant.compiled_layers import allow_kinds_of
from qtrain.quant.export import exported_tensors

RESERVED = {
    "pretrained": "--pretrained decides it",
    "num_classes": "the training data decide it",
    "checkpoint_path": "only published weights are loaded",
    "pretrained_cfg": "only published weights are loaded",
    "pretrained_cfg_overlay": "only published weights are loaded",
    "cache_dir": "the hub's own cache is used",
}
"""Keys of --model_kwargs that are not allowed, and why."""


def import_timm(flag: str = "--model") -> ModuleType:
    """The module timm. UserError with the command that installs it if it is missing."""
    try:
        import timm
    except ImportError as error:  # of timm itself, or of torchvision, which it imports
        raise missing_package((error.name or "timm").partition(".")[0], f"{flag}: a vision model") from None
    return timm


def check_vision_model(name: str, kwargs: Mapping[str, Any], pretrained: bool) -> str:
    """timm's name for `name` (`timm/NAME` or NAME). UserError for names, tags and keys that timm does not know."""
    timm = import_timm()
    short = name.removeprefix("timm/").removeprefix("hf-hub:timm/")
    base, _, tag = short.partition(".")
    if not timm.is_model(base):
        close = _nearest_model(base, timm.list_models())
        hint = f" Did you mean {close!r}?" if close else ""
        raise UserError(
            f"--model: timm has no model {short!r}.{hint} It has {len(timm.list_models())}; "
            "print their names with: python -c 'import timm; print(*timm.list_models())'"
        )
    tags = [full.partition(".")[2] for full in timm.list_models(f"{base}.*", pretrained=True)]
    if tag and tag not in tags:
        allowed = f"its tags are {', '.join(tags[:8])}" if tags else "it has no published weights: leave the tag out"
        raise UserError(f"--model: {base!r} has no weights with the tag {tag!r}; {allowed}.")
    if pretrained and not tags:
        raise UserError(f"--pretrained: timm has no published weights of {base!r}; add --no_pretrained.")
    for key in kwargs:
        if key in RESERVED:
            raise UserError(f"--model_kwargs: the key {key!r} is not allowed; {RESERVED[key]}.")
    return short


def _nearest_model(given: str, names: Sequence[str]) -> str | None:
    """The shortest of the names whose first parts are the closest to `given`, which may leave the others out:
    vit_tiny_patch16_224 for vit_tinny, not gcvit_tiny, which as a whole is closer."""
    count = given.count("_") + 1
    by_start: dict[str, list[str]] = {}
    for name in names:
        by_start.setdefault("_".join(name.split("_")[:count]), []).append(name)
    start = nearest(given, by_start)
    return None if start is None else min(by_start[start], key=lambda name: (len(name), name))


def constructor_kwargs(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` as the model's constructor takes them: without img_size where it has no such argument, as of models of
    convolutions, which take images of any size. Then img_size is that of the images alone."""
    without = {key: value for key, value in kwargs.items() if key != "img_size"}
    if "img_size" in kwargs:
        try:
            with torch.device("meta"), warnings.catch_warnings(action="ignore"):
                import_timm().create_model(name, num_classes=1, **kwargs)
        except TypeError as error:
            return without if "argument 'img_size'" in str(error) else dict(kwargs)
        except Exception:  # `empty_vision_model` says what is wrong
            return dict(kwargs)
    return dict(kwargs)


def empty_vision_model(name: str, kwargs: Mapping[str, Any], classes: int) -> nn.Module:
    """The model on the meta device: shapes without memory. UserError for `kwargs` that it does not take."""
    timm = import_timm()
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = timm.create_model(name, num_classes=classes, **kwargs)
            model.get_classifier()  # a model of features, which some keys give, has none
            use_kernels(model)
            return model
    except Exception as error:  # a model's constructor may raise anything
        reason = first_line(error)
        raise UserError(f"--model_kwargs: {name} cannot be built with {json.dumps(dict(kwargs))}: {reason}.") from None


def build_vision_model(
    name: str, kwargs: Mapping[str, Any], classes: int, *, pretrained: bool, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """The model on `device`, with published weights or random ones from torch's global generator, and a new head."""
    timm = import_timm()
    fix = "Train from random weights with --no_pretrained."
    reach = reaching_hub("--pretrained", f"the checkpoint of {name!r}", fix) if pretrained else contextlib.nullcontext()
    with reach, device:
        model = timm.create_model(name, pretrained=pretrained, num_classes=classes, **kwargs)
    if pretrained:
        for tensor_name, tensor in model.named_parameters():
            refuse_nonfinite(f"--pretrained ({name})", tensor_name, tensor)
    use_kernels(model)
    for module in model.modules():  # `parameter_groups` reads it
        qkv = getattr(module, "qkv", None)
        if isinstance(qkv, nn.Linear) and qkv.out_features == 3 * qkv.in_features:
            module.projections = {"qkv": (qkv.in_features,) * 3}
    return model.to(device=device, dtype=dtype)


def image_config(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The model's input: `input_size` (channels, height, width), mean, std, interpolation, crop_pct and crop_mode."""
    from timm.data import resolve_data_config

    known: Any = model.pretrained_cfg
    size = kwargs.get("img_size") or tuple(known.get("input_size") or (3, 224, 224))[1:]
    height, width = (size, size) if isinstance(size, int) else size
    channels = kwargs.get("in_chans", 3)
    if channels not in (1, 3):
        raise UserError(f"--model_kwargs.in_chans: {channels} is not allowed; images have 1 channel (gray) or 3 (RGB).")
    wanted: dict[str, Any] = {"input_size": (channels, height, width)}
    if channels == 1:
        wanted |= {key: (sum(known[key]) / len(known[key]),) for key in ("mean", "std") if known.get(key)}
    config = resolve_data_config(wanted, pretrained_cfg=known)
    if channels == 1:
        config |= {key: config[key][:1] for key in ("mean", "std")}
    return config


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats, in order, found by timm's name for them; empty if there are none."""
    return [
        block
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "blocks" and isinstance(module, nn.Sequential | nn.ModuleList)
        for block in module
    ]


def recompute_blocks(model: nn.Module, mode: str) -> None:
    """Set what backward recomputes (`recompute.SETS`) in each repeated block. UserError if there are none."""
    if mode == "none":
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise UserError(f"--activation_checkpointing: {type(model).__name__} has no repeated blocks; use none.")
    region = Region(selective_contexts if mode == "selective" else None, random=True)
    for block in blocks:
        block.forward = functools.partial(region, block.forward)


def compile_vision(model: nn.Module) -> None:
    """Compile the repeated blocks in place, which share their code, or the whole model if it has none."""
    prepare_compiling()
    allow_kinds_of(repeated_blocks(model))
    for module in repeated_blocks(model) or [model]:
        module.compile()


def export_timm(
    model: nn.Module,
    folder: Path,
    *,
    name: str,
    kwargs: Mapping[str, Any],
    classes: Sequence[str],
    image: Mapping[str, Any],
) -> None:
    """Write model.safetensors and config.json in timm's format, for `timm.create_model(name, checkpoint_path=...)` and
    `timm.create_model("local-dir:FOLDER")`."""
    values = {
        key.replace("_orig_mod.", ""): make().detach().cpu().contiguous().clone()
        for key, make in exported_tensors(model).items()
    }
    cfg: Any = model.pretrained_cfg
    known = ("first_conv", "classifier", "pool_size", "fixed_input_size")
    pretrained_cfg = {**{key: cfg[key] for key in known if key in cfg}, **image, "num_classes": len(classes)}
    config = {
        "architecture": name.partition(".")[0],
        "num_classes": len(classes),
        "num_features": model.num_features,
        "model_args": dict(kwargs),
        "label_names": list(classes),
        "pretrained_cfg": pretrained_cfg,
    }
    with writing_export(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        finish_export(folder, ["config.json", "model.safetensors"])
