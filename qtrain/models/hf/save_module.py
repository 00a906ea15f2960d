"""`qtrain.save_quantized`: a model of one's own in a low-bit format, with the codes that training multiplied with.

A run of qtrain is exported by its scripts, which know more: fused tensors, tokenizer, model card. Here each linear is a
tensor of the state dict, whose names are those of transformers' checkpoints where the model is transformers' own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from qtrain.core.errors import UserError
from qtrain.models.hf.formats.format import EXPORT_FORMATS, SafetensorsFormat
from qtrain.models.hf.io import MAX_SHARD_BYTES
from qtrain.models.hf.tensor_files import dump_json, write_tensors
from qtrain.quant.export import exported_tensors
from qtrain.quant.export_codes import Rows, check_ternary, held_codes, new_codes, trained_codes, why_new
from qtrain.quant.linear import LowBitLinear

FLAG = "save_quantized"


def save_quantized(model: nn.Module, folder: str | Path, format: str) -> dict[str, str | None]:
    """Write the weights of a model that `qtrain.quantize` has changed into a new or empty folder.

    format: a name of `--export_format` with codes, such as "fp8_block" or "ct_int8". Linears that run in low bits are
    written in codes, those of training where the format can hold them; all else in its own dtype. A model with a
    `config`, as transformers' have, gets config.json and loads with `from_pretrained`; any other one gets the
    `quantization_config` alone.

    Returns each matrix in codes -> None where the codes are those that training multiplied with, else why they are new.
    Raises UserError, before anything is written, for a folder that is not empty and a format that cannot hold a weight.
    """
    fmt, folder = EXPORT_FORMATS.make(format, {}, FLAG), Path(folder)
    if not isinstance(fmt, SafetensorsFormat):
        raise UserError(f"{FLAG}: {format!r} has no codes in safetensors; python llm_pretrain.py --list shows formats.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{FLAG}: {folder} exists already; give a new folder, or empty this one.")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, LowBitLinear)}
    if not linears:
        raise UserError(f"{FLAG}: no linear of this {type(model).__name__} is in low bits; call qtrain.quantize first.")
    for name, linear in linears.items():
        if why := fmt.refusal(*linear.weight.shape):
            raise UserError(f"{FLAG}: {format!r} cannot hold {name}: {why}; use another format.")
    # A parameter [E, N, K] is a stack of experts.
    if hasattr(model, "config") and any(parameter.ndim == 3 for parameter in model.parameters()):
        raise UserError(
            f"{FLAG}: transformers saves the experts of {type(model).__name__} under other names than it trains; train "
            "it by llm_pretrain.py or llm_finetune.py, whose --export_format knows them."
        )
    values, held, tensors = exported_tensors(model), {}, {}
    columns: dict[str, int | None] = dict.fromkeys(_untied(model))  # a tied matrix is saved once, by its first name
    for name in columns:
        linear = linears.get(name.removesuffix(".weight"))
        if linear is None or not name.endswith(".weight"):
            tensors[name] = values[name]()
            continue
        trained, held[name] = trained_codes(linear), None
        codes = held_codes(trained, Rows(0, *linear.weight.shape), fmt.weight)
        if codes is None:
            held[name], value = why_new(trained, fmt.weight), values[name]()
            check_ternary(value, fmt.weight, f"{FLAG}: {format!r}", name)
            codes = new_codes(value, fmt.weight)
        columns[name] = linear.weight.shape[1]
        made = fmt.tensors(codes, linear.weight.shape[1])
        tensors |= {f"{name.removesuffix('weight')}{part}": tensor.cpu() for part, tensor in made.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(
        tensors,
        lambda device, name: tensors[name].detach().to(device, copy=True).contiguous(),
        folder,
        MAX_SHARD_BYTES,
        fmt.metadata(columns, next(model.parameters()).dtype),
    )
    left = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    _write_config(model, folder, fmt.quantization_config(left))
    return held


def _untied(model: nn.Module) -> list[str]:
    """The names of the state dict, without those of a tensor that an earlier name has."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        # Tensors without elements share the address 0, so they are told apart by name.
        first.setdefault((tensor.device, tensor.data_ptr(), tensor.shape) if tensor.numel() else (name,), name)
    return list(first.values())


def _write_config(model: nn.Module, folder: Path, quantization: Mapping[str, Any]) -> None:
    """config.json, of a transformers model all of it."""
    path = folder / "config.json"
    config = getattr(model, "config", None)
    if callable(save := getattr(config, "save_pretrained", None)):
        save(folder)
        if callable(save := getattr(getattr(model, "generation_config", None), "save_pretrained", None)):
            save(folder)
    # What `save_pretrained` has just written stays in the file.
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    dump_json(path, {**known, "quantization_config": dict(quantization)})
