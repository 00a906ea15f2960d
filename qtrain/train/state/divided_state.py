"""The state of a run with --tp or --ep as a checkpoint holds it: whole tensors, that runs with any of them resume.

What is stored by blocks along a row (optimizer states in 8 and 4 bits, weights stored in low bits) is cut where ranks'
columns are. A cut that is not between two blocks leaves scales that a whole row does not have: such a checkpoint, which
names them in its meta, is for the same --tp only.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.distributed.ranks import all_gather
from qtrain.distributed.split import Split
from qtrain.distributed.split_tensor import SplitTensor
from qtrain.distributed.tensor_group import TensorGroup
from qtrain.errors import UserError
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES
from qtrain.kernels.optim.state_formats import parse_format
from qtrain.tensors.stored_weight import STORED_FORMATS, StoredWeight

States = dict[str, dict[str, Tensor]]


class DividedState:
    """Converts between a rank's tensors and whole ones. model: its part of a decoder; group: the ranks of all parts."""

    def __init__(self, model: nn.Module, group: TensorGroup):
        self._group, self._inexact = group, set()
        # With tensor parallelism a rank has a part of every projection; of experts it has some, whose rows all have.
        self._parts_of_rows = group.ranks if model.tensor is not None else 1
        named = dict(model.named_parameters())
        self._splits = {name: split for name in named if (split := model.split(name))}
        self._shapes = {name: named[name].shape for name in self._splits}
        self._stored = {name: p.data.format for name, p in named.items() if isinstance(p.data, StoredWeight)}

    def model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of `model_tensors`."""
        return {name: self._divided(name, tensor) for name, tensor in tensors.items()}

    def _divided(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, part = name.rpartition(".")
        if owner not in self._stored or part not in ("codes", "scale"):
            return self._whole(name, name, tensor, 1)
        columns = GRANULARITIES[STORED_FORMATS[self._stored[owner]].granularity][1]
        return self._whole(name, owner, tensor, FORMATS[self._stored[owner]].packing if part == "codes" else columns)

    def states(self, states: States) -> States:
        """The tensors of `optimizer_tensors`."""
        return {
            name: {key: self._whole(f"{name}.{key}", name, tensor, _unit(key)) for key, tensor in of_name.items()}
            for name, of_name in states.items()
        }

    def _whole(self, entry: str, name: str, tensor: Tensor, unit: int | None) -> Tensor:
        """A tensor of the parameter `name`, of whose row `unit` elements share an element; None: all of it."""
        if name not in self._splits or not tensor.ndim:
            return tensor
        return SplitTensor.of(tensor, self._split(entry, name, unit, tensor.shape[-1]))

    def _split(self, entry: str, name: str, unit: int | None, width: int) -> Split:
        """How a tensor of the parameter `name` is split. width: the length of its rows on this rank."""
        split, ranks = self._splits[name], self._group.ranks
        if split.dim == 0 or unit == 1:
            return split
        if unit is None or self._shapes[name][1] % unit:
            self._inexact.add(entry)
            dim = 0 if unit is None else 1
            return Split.evenly(dim, (width * ranks,), ranks, self._group.rank)
        ranges = tuple((start // unit, stop // unit) for start, stop in split.ranges)
        return dataclasses.replace(split, whole=split.whole // unit, ranges=ranges)

    def whole_meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The description that `optimizer_tensors` returns, with the shapes and fused rows of the whole."""
        return self._described(meta, to_whole=True)

    def own_meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse, of a checkpoint's description. UserError for one that is damaged or does not fit."""
        try:
            return self._described(meta, to_whole=False)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"--resume: the checkpoint's optimizer entry cannot be read ({error!r}).") from None

    def _described(self, meta: Mapping[str, Any], to_whole: bool) -> dict[str, Any]:
        states = {
            name: {key: self._shape(name, key, described, to_whole) for key, described in of_name.items()}
            for name, of_name in meta["states"].items()
        }
        ranks = self._parts_of_rows
        groups = [
            {**group, "options": {**group["options"], "parts": [n * ranks if to_whole else n // ranks for n in parts]}}
            if (parts := group["options"].get("parts"))
            else group
            for group in meta["groups"]
        ]
        return {**meta, "states": states, "groups": groups}

    def _shape(self, name: str, key: str, described: dict[str, Any], to_whole: bool) -> dict[str, Any]:
        if name not in self._splits or not described.get("shape"):
            return described
        own = list(self._shapes[name])
        if "." in key:
            _, id, kind = key.split(".")
            own = list(parse_format(id).parts(torch.Size(own))[kind][0])
        split = self._split(f"{name}.{key}", name, _unit(key), own[-1])
        whole = list(split.whole_shape(own))
        if not to_whole and described["shape"] != whole and f"{name}.{key}" not in self._inexact:
            raise ValueError(f"{name}.{key} has shape {described['shape']}, not {whole}")
        return {**described, "shape": whole if to_whole else own}

    def inexact(self) -> list[str]:
        """The entries so far whose scales no other --tp has. Every rank calls it."""
        return sorted(set().union(*all_gather(self._inexact)))


def _unit(key: str) -> int:
    """Elements of a row that share one of the state `key`."""
    if "." not in key:
        return 1
    _, id, kind = key.split(".")
    format = parse_format(id)
    return format.block if kind == "scale" else 2 if format.name == "int4" else 1


def refuse_other_tp(saved_tp: int, inexact: list[str], tp: int, path: Any) -> None:
    """UserError where states with scales of one --tp only would be resumed with another. inexact: their names, of the
    checkpoint or of this run."""
    if saved_tp != tp and inexact:
        raise UserError(
            f"--tp: {path} was saved with --tp {saved_tp}, and cannot be resumed with --tp {tp}: {inexact[0]} has "
            f"scales of blocks that the columns of {max(saved_tp, tp)} processes cut. Resume with --tp {saved_tp}."
        )
