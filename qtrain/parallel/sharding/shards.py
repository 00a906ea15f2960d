"""Trained parameters sharded over the ranks of a mesh: each rank updates its shard of the master weights (ZeRO).

The model computes with `parameter`, of full shape. The optimizer updates `master`:

    rows    a DTensor sharded along its rows, for optimizers that update element by element
    whole   the entire tensor on one rank, its owner, for optimizers that work on whole matrices, for weights that are
            stored in low bits, and for those whose rows cannot be sharded at multiples of ALIGNMENT; on the other
            ranks a placeholder of no elements, which gets no gradient

Where the mesh does not shard, the master is the parameter itself. Frozen weights, which nothing updates, are sharded by
rows whatever they are: of one that is stored in low bits the rows of its codes and of its scales.

One process shards nothing. Of a matrix that comes and goes with its block the master is all of it, in host memory.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf

from qtrain.core.hardware.host_memory import host_tensor_like
from qtrain.parallel.mesh import Mesh
from qtrain.tensors.lazy import drop_initializer, initial_value, is_lazy, materialize, plain_tensors
from qtrain.tensors.partition import Placement
from qtrain.tensors.stored_weight import StoredWeight

T = TypeVar("T")

ALIGNMENT = 64
"""Elements: a parameter is sharded by rows only where each rank's begin at a multiple of this. Vectorized updates treat
the last elements of a tensor in another way, with other rounding: they must be the same ones on any mesh."""


@dataclass(frozen=True)
class Sharded:
    """A parameter and its master on a mesh. bounds: shard rank s holds the elements [bounds[s], bounds[s + 1]).
    terms: where one rank computes several ranks' micro-batches and keeps their gradients apart, what receives them in
    place of the parameter, [micro-batches, *shape]. placement: of the master, if it is a part of a larger parameter, or
    in host memory."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    bounds: tuple[int, ...]
    mesh: Mesh
    terms: Tensor | None = None
    placement: Placement | None = None

    @property
    def rows(self) -> int:
        return self.parameter.shape[0] if self.parameter.ndim else 1

    @property
    def receiver(self) -> Tensor:
        """What has the gradients of a backward pass as its `.grad`."""
        return self.parameter if self.terms is None else self.terms

    @property
    def on_host(self) -> bool:
        """Whether the master, which trains, and its gradient are in host memory."""
        return self.placement is not None and self.placement.device is not None

    def set_gradient(self, flat: Tensor) -> None:
        """Give the master its gradient. flat: the elements of this rank's shard."""
        if isinstance(self.master, DTensor):
            # `DTensor.from_local` takes as long as everything else that a small parameter costs in a step.
            local = flat.view(self.master._local_tensor.shape)
            self.master.grad = DTensor(local, self.master._spec, requires_grad=False)
        elif not is_placeholder(self.master):
            self.master.grad = flat.view(self.parameter.shape)


def by_mesh(items: Iterable[T], sharded: Callable[[T], Sharded]) -> list[tuple[Mesh, list[T]]]:
    """The items whose parameters are sharded over the same mesh, for each mesh; sharded: the parameter of an item."""
    found: dict[int, tuple[Mesh, list[T]]] = {}
    for item in items:
        mesh = sharded(item).mesh
        found.setdefault(id(mesh), (mesh, []))[1].append(item)
    return list(found.values())


def is_placeholder(master: Tensor) -> bool:
    """Whether another rank owns the whole parameter."""
    return not isinstance(master, DTensor) and master.numel() == 0


def as_shard(local: Tensor, device_mesh, shape: torch.Size) -> DTensor:
    """This rank's rows of a tensor of `shape` as a DTensor."""
    stride = torch.empty(shape, device="meta").stride()
    placements = (Replicate(), ShardOf(0))
    return DTensor.from_local(local, device_mesh, placements, run_check=False, shape=shape, stride=stride)


def shard_parameters(
    named: Iterable[tuple[str, nn.Parameter]],
    mesh: Mesh,
    needs_whole: Callable[[nn.Parameter], bool],
    freed: Callable[[nn.Parameter], bool] = lambda p: False,
) -> list[Sharded]:
    """Shard parameters over the shard dimension of the mesh. needs_whole: whether the optimizer needs all of one;
    freed: whether its memory is freed between uses, so that its owner's master cannot be the same memory."""
    parameters = list(named)
    if mesh.shard == 1:
        for _, p in parameters:
            materialize(p)
        # The master is the parameter: a mesh that does not shard costs nothing.
        return [Sharded(name, p, p, (0, p.numel()), mesh) for name, p in parameters]
    whole = {
        id(p)
        for _, p in parameters
        if isinstance(p.data, StoredWeight) or needs_whole(p) or not _divides_by_rows(p, mesh.shard)
    }
    # Whole matrices are dealt out by size: a rank's work and memory are those of its owned ones.
    owners = _balanced_owners([p for _, p in parameters if id(p) in whole], mesh.shard)
    sharded = [
        _owned(name, p, owners[id(p)], mesh, freed(p)) if id(p) in whole else _by_rows(name, p, mesh)
        for name, p in parameters
    ]
    for _, p in parameters:
        drop_initializer(p)
    return sharded


def shard_frozen(named: Iterable[tuple[str, nn.Parameter]], mesh: Mesh) -> list[Sharded]:
    """Shard frozen matrices by rows over the shard dimension of the mesh; where it does not shard, the whole matrices
    are in host memory."""
    return _shard_each(named, mesh, _frozen_rows if mesh.shard > 1 else _on_host)


def offload_parameters(named: Iterable[tuple[str, nn.Parameter]], mesh: Mesh) -> list[Sharded]:
    """The masters of matrices that train in the host memory of one process, one made after the other."""
    return _shard_each(named, mesh, _trained_on_host)


def _shard_each(
    named: Iterable[tuple[str, nn.Parameter]], mesh: Mesh, shard_one: Callable[[str, nn.Parameter, Mesh], Sharded]
) -> list[Sharded]:
    parameters = list(named)
    sharded = [shard_one(name, p, mesh) for name, p in parameters]
    for _, p in parameters:
        drop_initializer(p)
    return sharded


def _frozen_rows(name: str, p: nn.Parameter, mesh: Mesh) -> Sharded:
    cuts, width, value = _row_cuts(p, mesh.shard), p.shape[1:].numel(), initial_value(p)
    own = slice(cuts[mesh.shard_rank], cuts[mesh.shard_rank + 1])
    rows = [as_shard(t[own].clone(), mesh.device_mesh, t.shape) for t in plain_tensors(value)]
    master = value.with_tensors(rows) if isinstance(value, StoredWeight) else rows[0]
    return Sharded(name, p, master, tuple(cut * width for cut in cuts), mesh)


def _on_host(name: str, p: nn.Parameter, mesh: Mesh) -> Sharded:
    value = initial_value(p)
    tensors = [host_tensor_like(t, p.device).copy_(t) for t in plain_tensors(value)]
    master = value.with_tensors(tensors) if isinstance(value, StoredWeight) else tensors[0]
    return Sharded(name, p, master, (0, p.numel()), mesh)


def _trained_on_host(name: str, p: nn.Parameter, mesh: Mesh) -> Sharded:
    master = nn.Parameter(_on_host(name, p, mesh).master)
    return Sharded(name, p, master, (0, p.numel()), mesh, placement=Placement(device=p.device))


def _divides_by_rows(p: nn.Parameter, ranks: int) -> bool:
    return p.ndim > 0 and all(cut * p.shape[1:].numel() % ALIGNMENT == 0 for cut in _row_cuts(p, ranks)[:-1])


def _row_cuts(p: nn.Parameter, ranks: int) -> list[int]:
    """The first row of every rank, and the number of rows; as torch.chunk and DTensor shard."""
    rows, per_rank = p.shape[0], -(-p.shape[0] // ranks)  # the last ranks may have fewer, or none
    return [min(rank * per_rank, rows) for rank in range(ranks + 1)]


def _balanced_owners(parameters: Sequence[nn.Parameter], ranks: int) -> dict[int, int]:
    """id of a parameter -> the rank that owns it: the largest first, each to the rank that has least."""
    load, owners = [0] * ranks, {}
    # Greedy, longest first: within 4/3 of the best balance, and the same on all ranks without a message.
    for p in sorted(parameters, key=lambda p: -p.numel()):  # stable: equal on all ranks
        owner = load.index(min(load))
        owners[id(p)], load[owner] = owner, load[owner] + p.numel()
    return owners


def _owned(name: str, p: nn.Parameter, owner: int, mesh: Mesh, copy: bool) -> Sharded:
    bounds = tuple(p.numel() * (s > owner) for s in range(mesh.shard + 1))  # all elements are the owner's
    if mesh.shard_rank == owner:
        value = initial_value(p)
        # The value of a lazy parameter is new memory already.
        return Sharded(name, p, nn.Parameter(value.clone() if copy and not is_lazy(p) else value), bounds, mesh)
    return Sharded(name, p, nn.Parameter(p.new_empty(0, *p.shape[1:])), bounds, mesh)


def _by_rows(name: str, p: nn.Parameter, mesh: Mesh) -> Sharded:
    cuts, width = _row_cuts(p, mesh.shard), p.shape[1:].numel()
    # A copy: a view would keep the whole initial value in memory.
    own = initial_value(p)[cuts[mesh.shard_rank] : cuts[mesh.shard_rank + 1]].clone()
    master = nn.Parameter(as_shard(own, mesh.device_mesh, p.shape))
    return Sharded(name, p, master, tuple(cut * width for cut in cuts), mesh)


def local_tensors(master: Tensor) -> list[Tensor]:
    """What this rank holds of a master."""
    if isinstance(master, DTensor):
        return [master._local_tensor.detach()]
    if isinstance(master.data, StoredWeight):
        return [getattr(tensor, "_local_tensor", tensor) for tensor in plain_tensors(master)]
    return [] if is_placeholder(master) else [master.data]


def byte_slices(tensor: Tensor, sharded: Sharded) -> list[tuple[int, int]]:
    """For each shard rank, which bytes of a full tensor of the parameter it holds."""
    elements = sharded.parameter.numel()
    size = tensor.numel() * tensor.element_size()
    # In proportion: packed codes and scales have other sizes than the parameter, but the same rows.
    return [(low * size // elements, high * size // elements) for low, high in pairwise(sharded.bounds)]


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a flat view of its bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)
