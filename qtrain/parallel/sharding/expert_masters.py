"""The parameters of a rank's experts, sharded over the ranks that hold the same ones."""

import dataclasses
from collections.abc import Callable, Iterable

from torch import nn

from qtrain.comm.rank_group import RANK_RNG_OFFSET
from qtrain.models import Decoder
from qtrain.parallel.layers.experts import EPExperts
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.shards import Sharded, shard_parameters
from qtrain.tensors.partition import Placement
from qtrain.tensors.stored_weight import StoredWeight


def shard_experts(
    model: Decoder,
    named: Iterable[tuple[str, nn.Parameter]],
    mesh: Mesh,
    needs_whole: Callable[[nn.Parameter], bool],
    freed: Callable[[nn.Parameter], bool],
    *,
    in_order: bool,
) -> list[Sharded]:
    """The parameters of this rank's experts, divided over the ranks that hold the same ones. needs_whole, freed: as for
    `shard_parameters`; in_order: compute as one process with all experts would, bit for bit."""
    terms = {}
    for module in model.modules() if in_order else ():
        if isinstance(module, EPExperts):
            terms |= module.keep_in_order()
    found = []
    for sharded in shard_parameters(named, mesh.expert_mesh, needs_whole, freed):
        split, parameter = model.partition(sharded.name), sharded.parameter
        stored = isinstance(parameter.data, StoredWeight)  # its update draws bits without regard to the first element
        placement = Placement(
            split.full_shape(parameter.shape),
            split.ranges[0][0] * parameter.shape[1],
            mesh.expert_mesh.tp_rank * RANK_RNG_OFFSET if stored else 0,
        )
        found.append(dataclasses.replace(sharded, terms=terms.get(id(parameter)), placement=placement))
    return found
