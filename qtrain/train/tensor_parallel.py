"""Training with --tp: what is refused, and the gradients of parameters that all ranks of a tensor group have."""

from collections.abc import Sequence

import torch
from torch import nn

from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded
from qtrain.distributed.tensor_group import TENSOR_RANK_NUMBERS
from qtrain.errors import UserError
from qtrain.optim import OPTIMIZERS, OptimizerSpec
from qtrain.train.settings import LanguageSettings, TrainSettings


def check_tensor_parallel(settings: TrainSettings, optimizer: OptimizerSpec) -> None:
    """UserError for settings that --tp cannot be combined with; what depends on the model's sizes comes later."""
    if settings.tp == 1:
        return
    other = "divide the run with --dp_shard or --dp_replicate instead"
    if not isinstance(settings, LanguageSettings):
        raise UserError(f"--tp: {settings.tp}, but models of timm are not divided over processes; {other}.")
    if settings.model_impl != "native":
        raise UserError(
            f"--tp: {settings.tp}, but only qtrain's own decoder is divided; use --model_impl native, or {other}."
        )
    if getattr(settings, "lora", None) is not None:
        raise UserError(f"--tp: {settings.tp}, but adapters (--lora) are not divided over processes; {other}.")
    if settings.quantize == "auto" and settings.quantize_lm_head:
        raise UserError(
            f"--tp: {settings.tp}, but --quantize auto times one process's part of the head (--quantize_lm_head), and "
            "others may have fewer rows; name the scheme, or leave out --quantize_lm_head."
        )
    if settings.optimizer_in_backward:
        raise UserError(
            f"--tp: {settings.tp}, but --optimizer_in_backward updates a layer before the gradients of its norms are "
            "summed over its processes; leave one of them out."
        )
    if optimizer.needs_whole(hidden=True):
        known = {name: OPTIMIZERS.make(name, {}, "--optim") for name in OPTIMIZERS.names()}
        allowed = ", ".join(name for name, spec in known.items() if not spec.needs_whole(hidden=True))
        raise UserError(
            f"--tp: {settings.tp}, but --optim {settings.optim} works on whole matrices, and each process has a part; "
            f"allowed: {allowed}."
        )


class TensorParts:
    """The parameters of a rank's part of the model, in the groups whose gradients are reduced together. counted: those
    of which this rank adds the squared gradients to the norm: of a parameter that all ranks of its tensor group have,
    the first one does."""

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[Sharded]], mesh: Mesh):
        parameters = [s for group in groups for s in group]
        tensor, self._group = model.tensor, mesh.tensor_group
        splits = {s.name: tensor.split(s.name) for s in parameters}
        for s in parameters:
            if split := splits[s.name]:
                s.master.whole_shape = split.whole_shape(s.parameter.shape)
                s.master.first_random_number = mesh.tensor_rank * TENSOR_RANK_NUMBERS
        self.counted = [s for s in parameters if splits[s.name] or mesh.tensor_rank == 0]
        self._terms = [[s.parameter for s in group if tensor.has_partial_gradient(s.name)] for group in groups]
        # Added by rank 0 for all: they stay zero on the others, where their gradients are those of the sum, too.
        zeros = {s.name for s in parameters if splits[s.name] and not splits[s.name].held}
        self._zeros = [[s.parameter for s in group if s.name in zeros] for group in groups]

    @torch.no_grad()
    def complete_gradients(self, index: int) -> None:
        """Sum those gradients of a group of which every rank has a term."""
        terms = [p.grad for p in self._terms[index] if p.grad is not None]
        if terms:
            total = self._group.summed(torch.cat([g.flatten() for g in terms]), "gradients of norms")
            torch._foreach_copy_([g.view(-1) for g in terms], list(total.split([g.numel() for g in terms])))
        for p in self._zeros[index]:
            if p.grad is not None:
                p.grad.zero_()
