"""The state of a run with --tp or --ep as whole tensors: of a checkpoint, that runs with any of them resume, and of the
export.

What is stored by blocks along a row (optimizer states in 8 and 4 bits, weights stored in low bits) is cut where ranks'
columns are. A cut that is not between two blocks leaves scales that a whole row does not have: such a checkpoint, which
names them in its meta, is for the same --tp only.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtrain.comm.ranks import all_gather
from qtrain.core.errors import UserError
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES
from qtrain.kernels.optim.state_formats import parse_format
from qtrain.models import Decoder
from qtrain.optim.registry import hidden_matrices
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.split_tensor import SplitTensor
from qtrain.quant import exported_tensors
from qtrain.tensors.partition import Partition
from qtrain.tensors.stored_weight import STORED_FORMATS, StoredWeight

States = dict[str, dict[str, Tensor]]

_OF_PROJECTION = re.compile(r"([^.]*_)(\d+)((?:\..*)?)")
"""Keys of states that each projection fused in a parameter has of its own (`MatrixOptimizer`)."""


class _Projection(NamedTuple):
    """The key of such a state in parts. count: projections of the parameter on each rank."""

    state: str
    index: int
    format: str
    count: int

    def on_rank(self, rank: int) -> str:
        """The key of the projection that is as far from this one as the first one of `rank` is from that of rank 0."""
        return f"{self.state}{self.index + rank * self.count}{self.format}"


class ModelParallelState:
    """Converts between a rank's tensors and whole ones. model: its part of a decoder."""

    def __init__(self, model: Decoder):
        assert isinstance(model.parts, ModelParallel)
        self._ranks_of, self._inexact = model.parts.group_of, set()
        named = dict(model.named_parameters())
        self._splits = {name: split for name in named if (split := model.partition(name))}
        self._shapes = {name: named[name].shape for name in self._splits}
        self._stored = {name: p.data.format for name, p in named.items() if isinstance(p.data, StoredWeight)}
        # With tensor parallelism a rank has a part of every projection; of experts it has some, whose rows all have.
        fused, experts = hidden_matrices(model), [name for name in self._splits if ".experts." in name]
        ranks = model.parts.expert_group.ranks if experts else 1
        self._projections = {n: len(fused[id(named[n])]) // ranks for n in experts if id(named[n]) in fused}

    def model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of `model_tensors`."""
        return {name: self._whole_entry(name, tensor) for name, tensor in tensors.items()}

    def _whole_entry(self, name: str, tensor: Tensor) -> Tensor:
        owner, _, part = name.rpartition(".")
        if owner not in self._stored or part not in ("codes", "scale"):
            return self._whole(name, name, tensor, 1)
        stored = STORED_FORMATS[self._stored[owner]]
        columns = GRANULARITIES[stored.granularity][1]
        return self._whole(name, owner, tensor, FORMATS[stored.fmt].packing if part == "codes" else columns)

    def states(self, states: States) -> States:
        """The tensors of `optimizer_tensors`."""
        found: States = {}
        for name, entries in states.items():
            whole = found.setdefault(name, {})
            for key, tensor in entries.items():
                if own := self._projection(name, key):
                    whole[own.on_rank(self._ranks_of(name).rank)] = tensor
                else:
                    whole[key] = self._whole(f"{name}.{key}", name, tensor, _unit(key))
        return found

    def _projection(self, name: str, key: str) -> "_Projection | None":
        """The projection that the state `key` belongs to, where ranks have other ones of the parameter `name`."""
        if name not in self._projections or not (named := _OF_PROJECTION.fullmatch(key)):
            return None
        return _Projection(named[1], int(named[2]), named[3], self._projections[name])

    def _whole(self, entry: str, name: str, tensor: Tensor, unit: int | None) -> Tensor:
        """A tensor of the parameter `name`, of whose row `unit` elements share an element; None: all of it."""
        if name not in self._splits or not tensor.ndim:
            return tensor
        return SplitTensor.of(tensor, self._split(entry, name, unit, tensor.shape[-1]))

    def _split(self, entry: str, name: str, unit: int | None, width: int) -> Partition:
        """How a tensor of the parameter `name` is split. width: the length of its rows on this rank."""
        split, group = self._splits[name], self._ranks_of(name)
        if split.dim == 0 or unit == 1:  # rows are never cut, single elements need no alignment
            return split
        if unit is None or self._shapes[name][1] % unit:
            # A block is cut between ranks: its scale belongs to a part of it, which no other division has.
            self._inexact.add(entry)
            dim = 0 if unit is None else 1
            # Parts end to end, as if the blocks were the whole's: right for this --tp, and named as such.
            return Partition.evenly(dim, (width * group.ranks,), group.ranks, group.rank)
        ranges = tuple((start // unit, stop // unit) for start, stop in split.ranges)
        return dataclasses.replace(split, full=split.full // unit, ranges=ranges)

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
            name: {
                new: self._shape(name, key, described, to_whole)
                for key, described in entries.items()
                for new in self._keys(name, key, to_whole)
            }
            for name, entries in meta["states"].items()
        }
        return {**meta, "states": states, "groups": [self._group_of(group, to_whole) for group in meta["groups"]]}

    def _group_of(self, described: Mapping[str, Any], to_whole: bool) -> Mapping[str, Any]:
        """A parameter group with the rows of fused projections that the whole has, or this rank."""
        parts, split = described["options"].get("parts"), self._splits.keys() - self._projections.keys()
        name = next((name for name in described["params"] if name in split), None)
        if not parts or name is None:
            return described
        ranks = self._ranks_of(name).ranks
        parts = [n * ranks if to_whole else n // ranks for n in parts]  # rows of q, k, v or of gate, up
        return {**described, "options": {**described["options"], "parts": parts}}

    def _keys(self, name: str, key: str, to_whole: bool) -> list[str]:
        """The keys in the whole of a state of every rank; or the key on this rank of one of the whole, if it has it."""
        projection = self._projection(name, key)
        if projection is None:
            return [key]
        group = self._ranks_of(name)
        if to_whole:
            return [projection.on_rank(rank) for rank in range(group.ranks)]
        own = projection.on_rank(-group.rank)
        return [own] if 0 <= projection.index - group.rank * projection.count < projection.count else []

    def _shape(self, name: str, key: str, described: dict[str, Any], to_whole: bool) -> dict[str, Any]:
        if name not in self._splits or not described.get("shape") or self._projection(name, key):
            return described
        own = list(self._shapes[name])
        if "." in key:
            _, id, kind = key.split(".")
            own = list(parse_format(id).parts(torch.Size(own))[kind][0])
        split = self._split(f"{name}.{key}", name, _unit(key), own[-1])
        whole = list(split.full_shape(own))
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


# ---- the export ------------------------------------------------------------------------------------------------------


def holds_exported_part(mesh: Mesh) -> bool:
    """Whether rank 0 gathers the part of the model that this rank has; else another rank has the same part."""
    return mesh.model_group is not None and not (mesh.expert_mesh or mesh).dp_rank


@torch.no_grad()
def gather_whole_model(model: Decoder, mesh: Mesh) -> nn.Module | None:
    """On rank 0 the decoder of which `model` is a part, dense and in its dtype, one parameter gathered at a time; None
    on the others. Every rank calls it."""
    if not holds_exported_part(mesh):
        return None
    config, parts, device = model.config, model.parts, model.norm.weight.device
    assert isinstance(parts, ModelParallel), "one process has the whole model"
    whole = None
    if mesh.rank == 0:
        with torch.device("meta"):
            whole = Decoder(config)
        whole = whole.to(model.norm.weight.dtype).to_empty(device="cpu")
        whole.tie()
    targets = whole.state_dict() if whole is not None else {}
    for name, exported in exported_tensors(model).items():
        group = parts.group_of(name)
        ranks = 0 if group is None else group.ranks
        splits = [split for rank in range(ranks) if (split := parts.partition_of(name, ranks, rank)) is not None]
        if not splits:  # every rank has all of it, but for full sharding, where only rank 0 may
            if whole is not None:
                targets[name].copy_(exported())
            continue
        if group == mesh.tp_group and mesh.dp_rank:  # among several tensor groups that have the experts
            continue
        own = exported()
        shapes = [[*own.shape[: s.dim], s.length, *own.shape[s.dim + 1 :]] for s in splits]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        # Flat, because ranks' parts differ in length: rows of the vocabulary do.
        flat = group.all_gather_ragged(own.to(device).contiguous().flatten(), sizes, "exported weights")
        if whole is not None:
            for split, row, shape in zip(splits, flat, shapes, strict=True):
                split.put(targets[name], row.view(shape))
    return whole
