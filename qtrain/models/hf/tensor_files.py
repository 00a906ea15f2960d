"""Tensors into safetensors: one file or, above a size, several with an index."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"


def write_tensors(
    names: Iterable[str],
    on: Callable[[str, str], Tensor],
    folder: Path,
    max_bytes: int,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the tensors `names` in this order. on(device, name): a tensor in new memory of "cpu"; on "meta" only its
    shape and dtype matter. metadata: for the header of each file. One file's tensors are in memory at a time."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    plan = split_state_dict_into_shards_factory(
        {name: on("meta", name) for name in names},
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        get_storage_id=lambda tensor: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    for file, members in plan.filename_to_tensors.items():
        save_file({name: on("cpu", name) for name in members}, folder / file, metadata={"format": "pt", **metadata})
    if plan.is_sharded:
        dump_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})


def dump_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
