"""Frozen weights are in no checkpoint: the same --model (and --seed, where weights are random) gives them again. A
checkpoint holds their fingerprints, so that a run is not resumed on other ones."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtrain.comm.tensor_group import TensorGroup
from qtrain.core.errors import UserError
from qtrain.parallel.shards import as_bytes, as_shard
from qtrain.tensors.partition import Partition
from qtrain.train.state.state_dict import Master, itself, model_tensors


def fingerprint(model: nn.Module, group: TensorGroup | None = None, master: Master = itself) -> dict[str, str]:
    """Dtype, shape and checksum of every frozen parameter by name; of weights stored in low bits, of codes and scales.

    The checksum is the sum of the bits, read as integers: exact, independent of the order, bound by memory bandwidth.
    group: the ranks that have the other parts of the model, whose sums are added; shapes are those of the whole.
    master: what this rank has of a parameter.
    """
    frozen = model_tensors(model, trains=False, master=master)
    sums = [_sum_of_bits(tensor) for tensor in frozen.values()]
    splits = {name: group and model.partition(name) for name in frozen}
    if sums and group is not None:
        parts = group.gathered(torch.stack(sums)[None])
        sums = [parts[:, i].sum() if splits[name] else sums[i] for i, name in enumerate(frozen)]
    totals = torch.stack(sums).tolist() if sums else []
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {_shape(tensor, splits[name])} {total}"
        for (name, tensor), total in zip(frozen.items(), totals, strict=True)
    }


def _shape(tensor: Tensor, split: Partition | None) -> list[int]:
    return list(split.full_shape(tensor.shape) if split else tensor.shape)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = _bytes(tensor.detach()).flatten()
    wide = flat.numel() % 4 == 0
    return flat.view(torch.int32 if wide else torch.uint8).sum(dtype=torch.int64)


def _bytes(tensor: Tensor) -> Tensor:
    """All of a tensor's bytes; of one that is divided by rows gathered, whatever its dtype."""
    if not isinstance(tensor, DTensor):
        return as_bytes(tensor)
    rows, width = tensor.to_local().contiguous(), tensor.shape[1:].numel() * tensor.element_size()
    own = rows.view(torch.uint8).view(len(rows), width)
    return as_shard(own, tensor.device_mesh, torch.Size((len(tensor), width))).full_tensor()


def check_frozen(saved: dict[str, str] | None, here: dict[str, str], path: Path, source: str) -> None:
    """UserError if the fingerprints `here`, of the frozen weights of --model `source`, are not the `saved` ones of the
    checkpoint `path` (None: it has none)."""
    if not isinstance(saved, dict):
        return
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise UserError(
                f"--resume: {path} was saved on other frozen weights than --model {source} gives: {name} differs. "
                "Resume with the --model, --seed and --dtype of the run that saved it."
            )
