"""Which part of each parameter a rank holds under tensor and expert parallelism, and the modules that compute with it.

    column     rows of the weight are split: a rank's heads of q, k, v; its slices of gate and up
    row        columns are split: partial sums, which the ranks add; rank 0 adds the bias
    vocab      rows of the vocabulary are split: the embedding, the head
    heads      a norm over all heads, or over the whole intermediate size: split like qkv, gate_up
    expert     some of the experts
    (others)   every rank has all of it: norms, routers and shared experts

Adapters of experts, and the weights under them, are of the kind of the experts' weights.

A decoder is declared for one process, with full shapes on the meta device. `place` gives the parameters of TABLE their
local shapes and replaces modules by their parallel kinds under the same names. Where a degree is 1 it replaces nothing,
so that the compiler sees the same graph.

    Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from qtrain.comm.rank_group import RANK_RNG_OFFSET, RankGroup
from qtrain.core.maybe_none import MaybeNone
from qtrain.models import Decoder
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import Attention
from qtrain.models.native.decoder import Embedding
from qtrain.models.native.mlp import MLP
from qtrain.models.native.moe import Experts, MoE
from qtrain.parallel.layers.exchange import describe_inputs, describe_tokens, reduce_statistics
from qtrain.parallel.layers.experts import EPExperts
from qtrain.parallel.layers.local_config import local_config
from qtrain.parallel.layers.tensor_parallel import (
    TPMLP,
    ResidualStream,
    TPAttention,
    TPEmbedding,
    TPMoE,
    TPOutput,
    TPRMSNorm,
)
from qtrain.parallel.mesh import Mesh
from qtrain.quant.choices import LinearChoice
from qtrain.quant.quantized_model import SharedLinear
from qtrain.quant.tensor_roles import Gemm
from qtrain.tensors.partition import Partition

Kind = Literal["column", "row", "vocab", "heads", "expert"]

TABLE: dict[tuple[str, str], Kind] = {
    ("", "embed_tokens"): "vocab",
    ("", "lm_head"): "vocab",
    ("attn", "qkv"): "column",
    ("attn", "q_norm"): "heads",  # where it is over all heads (OLMoE)
    ("attn", "k_norm"): "heads",
    ("attn", "sub_norm"): "heads",
    ("attn", "o_proj"): "row",
    ("mlp", "gate_up"): "column",
    ("mlp", "sub_norm"): "heads",
    ("mlp", "down_proj"): "row",
    ("experts", "gate_up"): "expert",
    ("experts", "down_proj"): "expert",
}
"""(parent module, module) -> how its parameters are split."""

VOCABULARY_ALIGNMENT = 64
"""Ranks' rows of a large vocabulary begin at multiples of it, which GEMMs and shards read best."""


@dataclass(frozen=True)
class ModelParallel:
    """How ranks split a decoder that `check_mesh` allows: those of --tp everything in TABLE, those of --ep the experts,
    and with both the ranks of all tensor groups that compute experts together."""

    config: ModelConfig
    """Of the full model."""
    tp_group: RankGroup | MaybeNone
    """The ranks that split all but experts; None: each has all of that."""
    expert_group: RankGroup | MaybeNone
    """Those that split experts; without --ep `tp_group`."""
    sequence: bool = True
    """Whether the residual stream is sharded along tokens between the layers' parts (sequence parallelism)."""
    every_routing: bool = True
    """With --ep, whether a rank has rows for any routing (`EPExperts`)."""
    adapter_rank: int = 0
    """Of the adapters of experts."""

    @classmethod
    def on(cls, config: ModelConfig, mesh: Mesh, **options: Any) -> "ModelParallel | None":
        """On the ranks of a mesh; None where each has all of the model."""
        group = mesh.model_group
        return None if group is None else cls(config, mesh.tp_group, group, **options)

    @property
    def tp(self) -> int:
        """The tensor-parallel degree."""
        return 1 if self.tp_group is None else self.tp_group.ranks

    @cached_property
    def vocabulary(self) -> list[tuple[int, int]]:
        """Rows of the vocabulary of every rank."""
        size, ranks = self.config.vocab_size, self.tp
        # A small one would be split unevenly.
        unit = VOCABULARY_ALIGNMENT if size >= 8 * ranks * VOCABULARY_ALIGNMENT else 1
        # size * r / ranks, rounded up to the unit; the last ranks may have less.
        cuts = [min(size, -(-size * r // (ranks * unit)) * unit) for r in range(ranks + 1)]
        return list(pairwise(cuts))

    def kind(self, name: str) -> Kind | None:
        """How the parameter `name` is split; None: every rank has all of it."""
        parent, module, _ = _path(name)
        kind = TABLE.get((parent, module))
        if self.tp_group is None and kind != "expert":
            return None
        return None if module in ("q_norm", "k_norm") and self.config.qk_norm != "whole" else kind

    def group_of(self, name: str) -> RankGroup | MaybeNone:
        """The ranks that compute with the parameter `name` together, parts of it or, as norms, all of it; None: each
        for itself."""
        return self.expert_group if self.kind(name) == "expert" else self.tp_group

    def partition(self, name: str) -> Partition | None:
        """Which part of the parameter `name` this rank holds; None: all of it."""
        group = self.group_of(name)
        return None if group is None else self.partition_of(name, group.ranks, group.rank)

    def partition_of(self, name: str, ranks: int, rank: int) -> Partition | None:
        """The same of any rank of the parameter's group."""
        kind, config = self.kind(name), self.config
        if kind is None:
            return None
        parent, module, own = _path(name)
        if kind == "expert":
            rows = 2 * config.mixture.width if module == "gate_up" else config.hidden_size
            rows = self.adapter_rank if name.endswith(".lora_a.weight") else rows
            return Partition.evenly(0, (config.mixture.experts * rows,), ranks, rank)
        if kind == "vocab":
            return Partition(0, config.vocab_size, (self.vocabulary[rank],))
        if kind == "row" and own == "bias":
            # Added once: the ranks' partial sums are added, and each would add the bias again.
            return Partition(0, config.hidden_size, ((0, config.hidden_size),), held=rank == 0)
        # Fused projections: a rank has its part of each, q, k and v or gate and up, not one range of rows.
        sizes: dict[tuple[str, str], tuple[int, ...]] = {
            ("attn", "qkv"): (config.q_size, config.kv_size, config.kv_size),
            ("attn", "k_norm"): (config.kv_size,),
            ("mlp", "gate_up"): (config.intermediate_size,) * 2,
        }
        whole = config.q_size if parent == "attn" else config.intermediate_size
        return Partition.evenly(int(kind == "row"), sizes.get((parent, module), (whole,)), ranks, rank)

    def with_adapters(self, rank: int) -> "ModelParallel":
        return replace(self, adapter_rank=rank)

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each rank computes a term of the gradient of a parameter that all have: norms, routers and shared
        experts, of its heads or its tokens."""
        if self.tp_group is None or self.partition(name) is not None:  # that of a part is this rank's alone
            return False
        return self.sequence or name.split(".")[-2] in ("q_norm", "k_norm")

    def split_gemms(self, name: str) -> tuple[Gemm, ...]:
        """The GEMMs of the linear `name` that sum over a dimension which is split: each rank computes a term of the
        same product."""
        kind = self.kind(f"{name}.weight")
        if kind is None:  # all ranks have all of it, and with sequence parallelism tokens of their own
            return ("grad_weight",) if self.sequence and self.tp_group is not None else ()
        if kind == "row":
            return ("output",)
        return ("grad_input",) if kind in ("column", "vocab") else ()

    def shared_linear(self, name: str) -> SharedLinear | None:
        """How the swap shares the weight of the linear `name` with other ranks; None: not at all."""
        group = self.group_of(f"{name}.weight")
        return None if group is None else shared_over(group)

    @property
    def local_config(self) -> ModelConfig:
        """The sizes of one rank's layers; of experts those without --ep."""
        return local_config(self.config, self.tp, 1)

    def notes(self, linears: Sequence[LinearChoice]) -> list[str]:
        """The plan's lines on what ranks send each other within layers."""
        notes = [] if self.tp_group is None or not self.sequence else [describe_inputs(linears)]
        if self.expert_group != self.tp_group:
            notes.append(describe_tokens(self.config.mixture.experts, linears, self.expert_group.ranks))
        return notes

    def place(self, model: Decoder) -> None:
        """Make a decoder on the meta device that of this rank."""
        for name, module in list(model.named_modules()):
            for own, p in list(module.named_parameters(recurse=False)):
                part = self.partition(f"{name}.{own}")
                if part is not None:
                    shape = part.local_shape(p.shape)
                    setattr(
                        module, own, nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
                    )
                    _set_sizes(module, shape)
        model.parts = self
        model.fullgraph = model.fullgraph and self.every_routing
        # After the shapes: parallel modules read the sizes of the weights that they take over.
        stream = ResidualStream(self.tp_group, self.sequence)
        for name, module in list(model.named_modules()):
            if (parallel := self._parallel_kind(name, module, stream)) is not None:
                model.set_submodule(name, parallel)
        if self.tp_group is not None:
            model.shards_sequence = self.sequence
            model.kv_heads //= self.tp
            model.make_norm = partial(TPRMSNorm, group=self.tp_group)
        model.tie()

    def _parallel_kind(self, name: str, module: nn.Module, stream: ResidualStream) -> nn.Module | None:
        """What replaces a module; None: it stays."""
        if isinstance(module, Experts):
            return EPExperts(module, self.expert_group, self.every_routing)
        if self.tp_group is None or name.endswith(".shared"):  # every rank has all of a shared expert
            return None
        if isinstance(module, Attention):
            rows = self.partition(f"{name}.qkv.weight")
            assert rows is not None
            sizes = [length for _, _, length in rows.pieces()]
            return TPAttention(module, stream, sizes)
        if isinstance(module, MLP):
            return TPMLP(module, stream)
        if isinstance(module, MoE):
            return TPMoE(module, stream)
        if isinstance(module, Embedding):
            return TPEmbedding(module, stream, self.vocabulary[self.tp_group.rank][0])
        if name == "output":
            return TPOutput(stream, self.vocabulary)
        if isinstance(module, nn.RMSNorm) and self.kind(f"{name}.weight") == "heads":
            assert module.eps is not None
            return TPRMSNorm(module.weight.shape[0], module.eps, self.tp_group)  # on meta, like everything
        return None


def _path(name: str) -> tuple[str, str, str]:
    """Of a parameter its module's parent, its module and its own name: layers.0.attn.qkv.weight -> attn, qkv, weight.
    Of experts with adapters, experts.gate_up.lora_a.weight and experts.gate_up.base.weight -> those of gate_up."""
    path = ["", "", *name.split(".")]
    if path[-4:-3] == ["experts"]:
        del path[-2]
    parent, module, own = path[-3:]
    return parent, module, own


@cache  # weights of the same ranks have the same reduction: `refresh_weights` makes one of them
def shared_over(group: RankGroup) -> SharedLinear:
    """A weight of which each rank of the group has a part."""
    return SharedLinear(group.rank * RANK_RNG_OFFSET, partial(reduce_statistics, group=group))


def _set_sizes(module: Any, shape: torch.Size) -> None:
    """Attributes of a module that say how large its weight is."""
    if len(shape) == 1:
        return
    if isinstance(module, nn.Embedding):
        module.num_embeddings = shape[0]
        return
    if hasattr(module, "groups"):  # experts: whole ones, so groups shrink with the rows
        module.groups = module.groups * shape[0] // module.out_features
    module.out_features, module.in_features = shape


def order_notes(mesh: Mesh, rounds_experts: bool) -> list[str]:
    """What --deterministic does not promise on this mesh, or how. rounds_experts: experts' weights are rounded
    stochastically."""
    notes = []
    if mesh.tp > 1:
        with_ep = " and --ep" * (mesh.ep > 1)
        notes.append(
            f"note    --deterministic: the same on any number of processes with this --tp{with_ep}, whose sums have "
            "an order of their own"
        )
    if mesh.cp > 1:
        notes.append(
            "note    --deterministic: each rank of --cp computes all tokens, in the order of one process, and keeps a "
            "part of layers' inputs; nothing else with --recompute '[\"block\"]'"
        )
    if mesh.ep > 1 and mesh.tp == 1 and rounds_experts:
        notes.append(
            "note    --deterministic: the same on any number of processes with this --ep; experts' weights are rounded "
            "stochastically, on each process with bits of its own"
        )
    return notes
