"""Which parameters of a model are sharded how: dense ones, experts, those in host memory, frozen ones of units."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from qtrain.models.native.decoder import Decoder
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.full_shard import Unit
from qtrain.parallel.sharding.model_weights import weights_as_codes
from qtrain.parallel.sharding.part_masters import keep_in_order, on_expert_mesh, shard_experts
from qtrain.parallel.sharding.shards import Sharded, offload_parameters, shard_frozen, shard_parameters
from qtrain.quant import QuantizedModel
from qtrain.quant.choices import shared_weights
from qtrain.tensors.lazy import materialize


class ShardedModel(NamedTuple):
    """The parameters of a model with what this rank has of each."""

    trained: list[Sharded]
    frozen: list[Sharded]
    """Weights of fully sharded units that do not train."""


def shard_model(
    model: nn.Module,
    quantized: QuantizedModel,
    mesh: Mesh,
    needs_whole: Callable[[nn.Parameter], bool],
    units: Sequence[Unit],
    *,
    deterministic: bool,
    keep_full_weights: bool,
    host_weights: bool,
) -> ShardedModel:
    """Shard the parameters of `model`, and give memory to those that stay in full; arguments as of `DataParallel`.
    host_weights: matrices of units that train are in host memory, of one process."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    in_units = {id(p) for unit in units for p in unit.holder.parameters()}  # their memory comes and goes
    dropped = set() if keep_full_weights or mesh.shard == 1 else weights_as_codes(model, quantized)
    for p in model.parameters():
        if id(p) not in in_units | dropped:
            materialize(p)
    split = {name for name, _ in trained if on_expert_mesh(name, mesh)}
    # Experts have a mesh of their own: the ranks that hold the same ones.
    dense, experts = ([(n, p) for n, p in trained if (n in split) == kind] for kind in (False, True))
    how = mesh, needs_whole, lambda p: id(p) in in_units
    moved = _matrices(model, units, train=True) if host_weights else []
    names, place = {name for name, _ in moved}, {name: place for place, (name, _) in enumerate(trained)}
    parameters = shard_parameters([(n, p) for n, p in dense if n not in names], *how)
    parameters += offload_parameters(moved, mesh)
    # With --tp no order of additions is that of one process.
    in_order = deterministic and mesh.expert_mesh is not None and mesh.tp == 1
    terms = keep_in_order(model) if in_order else {}
    if split:
        parameters += shard_experts(as_decoder(model), experts, *how, terms)
    elif moved:
        parameters.sort(key=lambda sharded: place[sharded.name])
    return ShardedModel(parameters, _shard_frozen(_matrices(model, units, train=False), mesh) if units else [])


def as_decoder(model: nn.Module) -> Decoder:
    """The model, of which ranks have parts."""
    assert isinstance(model, Decoder), "ranks have parts of qtrain's own decoder alone"
    return model


def _shard_frozen(named: Sequence[tuple[str, nn.Parameter]], mesh: Mesh) -> list[Sharded]:
    """Frozen matrices of units; of experts over the ranks that hold the same ones. Those that no other rank holds stay
    in full."""
    expert_mesh = mesh.expert_mesh
    if expert_mesh is None:
        return shard_frozen(named, mesh)
    experts = [(name, p) for name, p in named if on_expert_mesh(name, mesh)]
    found = shard_frozen([(name, p) for name, p in named if not on_expert_mesh(name, mesh)], mesh)
    if expert_mesh.shard > 1:
        return found + shard_frozen(experts, expert_mesh)
    for _, p in experts:
        materialize(p)
    return found


def _matrices(model: nn.Module, units: Iterable[Unit], *, train: bool) -> list[tuple[str, nn.Parameter]]:
    """Those of `units` that train, or that do not, without what other modules hold too."""
    elsewhere = shared_weights(model)
    in_units = {id(p) for unit in units for p in unit.holder.parameters() if p.ndim > 1} - elsewhere
    return [(name, p) for name, p in model.named_parameters() if id(p) in in_units and p.requires_grad == train]
