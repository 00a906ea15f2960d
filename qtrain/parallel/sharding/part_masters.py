"""The parameters of a rank that holds a part of the model: of its tensor rank, and of its experts."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from qtrain.comm.rank_group import RANK_RNG_OFFSET
from qtrain.models import Decoder
from qtrain.parallel.layers.experts import EPExperts
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.shards import Sharded, shard_parameters
from qtrain.tensors.partition import Placement
from qtrain.tensors.stored_weight import StoredWeight


class TensorParts:
    """The parameters of a rank's part of the model, in the groups whose gradients are reduced together. counted: those
    of which this rank adds the squared gradients to the norm: of a parameter that all ranks of its tensor group have,
    the first one does."""

    def __init__(self, model: Decoder, groups: Sequence[Sequence[Sharded]], mesh: Mesh):
        parameters = [s for group in groups for s in group]
        parts, self._group = model.parts, mesh.tp_group
        assert parts is not None
        splits = {s.name: parts.partition(s.name) for s in parameters}
        offset = mesh.tp_rank * RANK_RNG_OFFSET  # Philox numbers: ranks hold different elements
        self.placements = {
            s.master: Placement(split.full_shape(s.parameter.shape), rng_offset=offset)
            for s in parameters
            if s.mesh is mesh and (split := splits[s.name])  # experts of --ep have a placement of their own
        }
        self.counted = [s for s in parameters if splits[s.name] or mesh.tp_rank == 0]
        self._terms = [[s.parameter for s in group if parts.has_partial_gradient(s.name)] for group in groups]
        # Added by rank 0 for all: they stay zero on the others, where their gradients are those of the sum, too.
        zeros = {name for name, split in splits.items() if split and not split.held}
        self._zeros = [[s.parameter for s in group if s.name in zeros] for group in groups]

    @torch.no_grad()
    def complete_gradients(self, index: int) -> None:
        """Sum those gradients of a group of which every rank has a term."""
        terms = [p.grad for p in self._terms[index] if p.grad is not None]
        if terms:
            # Small ones, of norms and routers: one message for all of a group.
            total = self._group.all_reduce_no_grad(torch.cat([g.flatten() for g in terms]), "gradients of norms")
            torch._foreach_copy_([g.view(-1) for g in terms], list(total.split([g.numel() for g in terms])))
        for p in self._zeros[index]:
            if p.grad is not None:
                p.grad.zero_()


def keep_in_order(model: nn.Module) -> dict[int, Tensor]:
    """Have experts that are split over ranks compute as one process with all of them would, bit for bit, whether they
    train or not. Returns what receives the gradients of those that do, by id of a parameter."""
    terms = {}
    for module in model.modules():
        if isinstance(module, EPExperts):
            terms |= module.keep_in_order()
    return terms


def on_expert_mesh(name: str, mesh: Mesh) -> bool:
    """Whether a parameter is sharded over the ranks that hold the same experts, not over all data-parallel ones."""
    return mesh.expert_mesh is not None and ".experts." in name


def shard_experts(
    model: Decoder,
    named: Iterable[tuple[str, nn.Parameter]],
    mesh: Mesh,
    needs_whole: Callable[[nn.Parameter], bool],
    freed: Callable[[nn.Parameter], bool],
    terms: Mapping[int, Tensor],
) -> list[Sharded]:
    """The parameters of this rank's experts, sharded over the ranks that hold the same ones. needs_whole, freed: as for
    `shard_parameters`. terms: `keep_in_order`."""
    found = []
    for sharded in shard_parameters(named, mesh.expert_mesh, needs_whole, freed):
        split, parameter = model.partition(sharded.name), sharded.parameter
        assert split is not None
        stored = isinstance(parameter.data, StoredWeight)  # its update draws bits without regard to the first element
        placement = Placement(
            split.full_shape(parameter.shape),
            # The first element's number in all experts: a shard draws the bits of the whole parameter.
            split.ranges[0][0] * parameter.shape[1],
            mesh.expert_mesh.tp_rank * RANK_RNG_OFFSET if stored else 0,
        )
        found.append(dataclasses.replace(sharded, terms=terms.get(id(parameter)), placement=placement))
    return found
