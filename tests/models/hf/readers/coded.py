"""Tiny checkpoints in codes, written as their formats are specified, and changed tensor by tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtrain.kernels.numerics.formats import NF4_VALUES
from qtrain.models import EXPORT_FORMATS, Decoder, ModelSource, build_model, export_hf, read_model_source
from qtrain.models.config.hf_layout import layout
from qtrain.models.hf.quantized_export import export_quantized
from qtrain.quant.choices import find_linears
from tests.models.hf.test_quantized_export import FAMILIES, TRAINED_IN

FORMATS = [*(fmt for fmt in TRAINED_IN if not fmt.startswith("torchao")), "nf4", "nf4_double"]
"""Those of exports that load as --model again, which torchao's do not, and those of bitsandbytes."""


def source_of(family: str = "llama", **changes: Any) -> ModelSource:
    return ModelSource(family, {**FAMILIES[family], **changes}, "--model")


def plain_model(family: str = "llama", *, ternary: bool = False, **changes: Any) -> Decoder:
    """A model with weights of different sizes in every row."""
    model = build_model(source_of(family, **changes), seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for linear in find_linears(model):
            weight = linear.weight
            if ternary:
                weight.copy_(torch.randint(-1, 2, weight.shape, generator=generator) * 0.05)
            else:
                weight.mul_(torch.rand(len(weight), 1, generator=generator) + 0.5)
    return model


def write_coded(folder: Path, fmt: str, family: str = "llama", **changes: Any) -> ModelSource:
    """A folder in one of FORMATS."""
    source, model = source_of(family, **changes), plain_model(family, ternary=fmt == "bitnet", **changes)
    if fmt in TRAINED_IN:
        export_quantized(model, source, folder, EXPORT_FORMATS.make(fmt, {}, ""))
    else:
        export_hf(model, source, folder)
        write_nf4(folder, nested=fmt == "nf4_double")
    return read_model_source(str(folder))


def matrices(model: Decoder) -> list[tuple[str, Tensor]]:
    """(module in the checkpoint, value [n, k]) of the linears but the head."""
    linears = {name for names in find_linears(model).values() for name in names}
    values = dict(model.named_parameters(remove_duplicate=False))
    return [
        (entry.hf_name.removesuffix(".weight"), entry.of(values[entry.name]).detach())
        for entry in layout(model.config)
        if entry.name is not None and entry.name.removesuffix(".weight") in linears - {"lm_head"}
    ]


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], Any] | None = None, **config: Any) -> None:
    """Change the tensors of a folder with one file in place, and keys of its quantization_config."""
    (folder / "checksums.json").unlink(missing_ok=True)
    file = folder / "model.safetensors"
    if tensors is not None:
        found = load_file(file)
        tensors(found)
        save_file({name: t.contiguous() for name, t in found.items()}, file, metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {**values.get("quantization_config", {}), **config}
    (folder / "config.json").write_text(json.dumps(values))


def split(folder: Path) -> None:
    """Spread the tensors of a folder over three files, those of a matrix too."""
    tensors = load_file(folder / "model.safetensors")
    names, where = sorted(tensors), {}
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names[i::3], file)
    (folder / "model.safetensors").unlink()
    (folder / "checksums.json").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


# ---- bitsandbytes ----------------------------------------------------------------------------------------------------


def nf4_tensors(value: Tensor, nested: bool, block: int = 64) -> dict[str, Tensor]:
    """The tensors of a matrix as bitsandbytes 0.50 stores them, with a map of its own for scales."""
    (n, k), table = value.shape, torch.tensor(NF4_VALUES)
    blocks = value.float().flatten().view(-1, block)
    absmax = blocks.abs().amax(1)
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).flatten().to(torch.uint8)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [n, k]}
    found = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": table}
    if nested:
        offset = absmax.mean().item()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        levels = torch.linspace(-1, 1, 256) ** 3
        rest = absmax - offset
        groups = torch.nn.functional.pad(rest, (0, -len(rest) % 256)).view(-1, 256)
        largest = groups.abs().amax(1)
        picked = ((groups / largest[:, None])[..., None] - levels).abs().argmin(-1).flatten()[: len(rest)]
        found |= {"weight.absmax": picked.to(torch.uint8), "weight.nested_absmax": largest}
        found["weight.nested_quant_map"] = levels
    else:
        found["weight.absmax"] = absmax
    found["weight.quant_state.bitsandbytes__nf4"] = as_bytes(state)
    return found


def as_bytes(state: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def write_nf4(folder: Path, nested: bool, block: int = 64) -> None:
    """Turn a dense folder into one of bitsandbytes."""

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("proj.weight")]:
            for part, tensor in nf4_tensors(tensors.pop(name), nested, block).items():
                tensors[f"{name.removesuffix('weight')}{part}"] = tensor

    change(folder, turn, quant_method="bitsandbytes", bnb_4bit_quant_type="nf4", load_in_4bit=True,
           bnb_4bit_use_double_quant=nested, llm_int8_skip_modules=None, bnb_4bit_quant_storage="uint8")  # fmt: skip


def read_nf4(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The values of a matrix as its specification says."""
    own = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.weight")}
    state = json.loads(bytes(own["weight.quant_state.bitsandbytes__nf4"].tolist()))
    absmax = own["weight.absmax"]
    if absmax.dtype == torch.uint8:
        nested = own["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(absmax)]
        absmax = own["weight.nested_quant_map"][absmax.long()] * nested + state["nested_offset"]
    packed = own["weight"].flatten().long()
    values = own["weight.quant_map"][torch.stack([packed >> 4, packed & 15], 1).flatten()]
    return (values.view(-1, state["blocksize"]) * absmax[:, None]).view(state["shape"])
