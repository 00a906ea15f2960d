"""Export formats read as they are specified, with nothing of the package: codes as fp32 numbers, and scales."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Read(NamedTuple):
    """A matrix: value = codes * scale."""

    codes: Tensor
    """fp32 [N, K]."""
    scale: Tensor
    """fp32 [N, K]."""

    @property
    def value(self) -> Tensor:
        return self.codes * self.scale


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, of one file or of several."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_file(folder / file)
    return found


def read_matrix(tensors: dict[str, Tensor], module: str, config: dict) -> Read:
    """The weight of `module`, given the `quantization_config`."""
    own = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.weight")}
    method = config["quant_method"]
    if method in ("fp8", "mxfp8"):
        assert own.keys() == {"weight", "weight_scale_inv"} and own["weight"].dtype == torch.float8_e4m3fn
        return _blocks(own["weight"].float(), _numbers(own["weight_scale_inv"]), *config["weight_block_size"])
    if method == "bitnet":
        packed = own["weight"]  # row r of quarter i has its two bits at 2 * i
        fields = torch.cat([(packed >> 2 * i) & 3 for i in range(4)]).float() - 1
        return Read(fields, (1 / own["weight_scale"].float()).expand(fields.shape))
    if method == "torchao":
        own = {
            n.removeprefix(f"{module}._weight_"): t for n, t in tensors.items() if n.startswith(f"{module}._weight_")
        }
        assert not own.get("zero_point", torch.zeros(1)).any() and own["scale"].shape == (len(own["qdata"]), 1)
        return Read(own["qdata"].float(), own["scale"].expand(own["qdata"].shape))
    layout = config["format"]
    (group,) = config["config_groups"].values()
    if layout in ("float-quantized", "int-quantized", "mxfp8-quantized"):
        dtype = torch.int8 if layout.startswith("int") else torch.float8_e4m3fn
        assert own.keys() == {"weight", "weight_scale"} and own["weight"].dtype == dtype
        return _spread(own["weight"].float(), _numbers(own["weight_scale"]), group["weights"])
    if layout == "pack-quantized":
        words, (n, k) = own["weight_packed"], own["weight_shape"].tolist()
        codes = torch.stack([(words >> 4 * i) & 15 for i in range(8)], dim=2).view(n, k).float() - 8
        return _spread(codes, own["weight_scale"], group["weights"])
    assert layout == "nvfp4-pack-quantized"
    packed, scale = own["weight_packed"], own["weight_scale"].float()
    codes = E2M1[torch.stack([packed & 15, packed >> 4], dim=2).flatten(1).long()]
    return _spread(codes, scale / own["weight_global_scale"], group["weights"])


def _numbers(scale: Tensor) -> Tensor:
    """Scales as numbers; a byte is an exponent."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale


def _spread(codes: Tensor, scale: Tensor, args: dict) -> Read:
    if args["strategy"] == "channel":
        assert scale.shape == (len(codes), 1)
        return Read(codes, scale.expand(codes.shape))
    rows, columns = args.get("block_structure") or (1, args["group_size"])
    return _blocks(codes, scale, rows, columns)


def _blocks(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Read:
    n, k = codes.shape
    assert scale.shape == (-(-n // rows), -(-k // columns))
    return Read(codes, scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k])


def equal_numbers(a: Tensor, b: Tensor) -> int:
    return int(np.count_nonzero(a.numpy() == b.numpy()))
