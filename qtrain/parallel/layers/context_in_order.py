"""Context parallelism with --deterministic: losses, gradients and weights have the bits of one process.

A weight's gradient sums over the tokens of a micro-batch, in the order of one product; ranks that multiply a part of
the tokens each (`context_parallel.py`) add in another one. So does flash attention's deterministic backward, which
splits its sums by the number of heads. Here every rank of the group computes all tokens, as one process does. What the
ranks share is memory: of a layer's input each keeps S / N tokens, which the layer's backward gathers. With --recompute
'["block"]' a layer keeps nothing else, so the sequence that fits is as long as one layer's tensors allow.

The gradients of the group's ranks are equal; the first rank's count (`sharding/data_parallel.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.comm.rank_group import RankGroup
from qtrain.models import Decoder, ResidualOffload
from qtrain.models.native.attention import SequenceInfo
from qtrain.models.native.moe import MoE
from qtrain.models.native.residual_offload import Residual
from qtrain.models.native.router import Routing
from qtrain.parallel.layers import become
from qtrain.parallel.layers.context_parallel import ContextParallel
from qtrain.parallel.mesh import Mesh
from qtrain.quant.quantized_model import SharedLinear


@dataclass(frozen=True)
class ContextInOrder:
    """How the ranks of a group train on the same sequences, if sums are in the order of one process."""

    group: RankGroup
    sequence_parts = 1
    """In which a rank's linears read a sequence."""

    def place(self, model: Decoder) -> None:
        """Have a decoder on the meta device keep a part of its layers' inputs."""
        model.residual_offload = ResidualParts(len(model.layers), self.group)
        for name, module in list(model.named_modules()):
            if isinstance(module, MoE):
                model.set_submodule(name, InOrderMoE(module, self.group))

    def shared_linear(self, name: str) -> SharedLinear | None:
        """Linears are those of one process."""
        return None


def context_of(mesh: Mesh, *, deterministic: bool) -> ContextParallel | ContextInOrder | None:
    """How the ranks of --cp share a sequence; None: each computes whole ones."""
    if mesh.cp_group is None:
        return None
    return (ContextInOrder if deterministic else ContextParallel)(mesh.cp_group)


class InOrderMoE(MoE):
    """A mixture whose routes the first rank of the group counts."""

    def __init__(self, mixture: MoE, group: RankGroup):
        become(self, mixture)
        self.group = group

    def statistics(self, routing: Routing, info: SequenceInfo) -> tuple[Tensor, Tensor]:
        load, losses = super().statistics(routing, info)
        return load * (self.group.rank == 0), losses


class ResidualParts(ResidualOffload):
    """Layers' inputs [B, S, C] of which each rank of a group keeps an equal part between the passes."""

    def __init__(self, layers: int, group: RankGroup):
        super().__init__(layers)
        self._group = group
        self._parts: dict[int, Tensor] = {}  # by layer

    def _put_away(self, index: int, x: Tensor, ready: torch.Event | None) -> Residual:
        residual = Residual.of(x)
        # Bytes: --cp divides the tokens of a sequence.
        self._parts[index] = residual.bytes().chunk(self._group.ranks)[self._group.rank].clone()
        return residual

    def _bring_back(self, index: int, residual: Residual) -> None:
        residual.storage.resize_(residual.size)
        residual.bytes().copy_(self._group.all_gather_no_grad(self._parts.pop(index)))
