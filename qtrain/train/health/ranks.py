"""What the ranks of a run do of a health sample together.

Layers that are split over ranks, or whose weights are gathered when they run, have collectives in their passes. Then
all ranks sample their own micro-batches at once, and rank 0 writes what it has found:

    data parallel (ZeRO, full sharding)   the numbers of its own tokens
    --tp                                  those of whole linears: sums over the parts of tensors and products
    --ep                                  of experts those of all ranks of its group, of other linears its own, or
                                          with --tp those of whole ones
    --cp                                  those of its part of the sequences, under the scales of all parts
    routers                               the load of all ranks' tokens

What the passes depend on is rank 0's choice, so that all ranks come to the same collectives. Before them all ranks
must have memory for what passes of training take, twice, as the sample runs eagerly. An error while a rank measures
ends the samples of all ranks. One of the passes themselves ends the run as it does in training: the others wait within
a collective that this rank cannot take part in, until they miss its heartbeat.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qtrain.comm.ranks import all_gather, from_rank_0
from qtrain.comm.wire import sent
from qtrain.core.errors import first_line
from qtrain.core.hardware.memory import allocatable_memory
from qtrain.models.native.decoder import Decoder
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import LinearChoice, LowBitLinear, QuantizedModel
from qtrain.quant.health.findings import ALTERNATIVES, alternatives
from qtrain.quant.health.measures import SUMS, add_sums, product_squares
from qtrain.quant.health.probe import LinearProbe, SchemeErrors
from qtrain.quant.tensor_roles import GEMMS, READERS
from qtrain.train.log.failures import is_out_of_memory

T = TypeVar("T")

NO_MEMORY = "takes more memory than is free"
EAGER, GATHERED = 2.0, 0.5
"""Of the memory of a training step's passes, what a sample takes: for the same tokens, and for any number of them, as
of weights that are gathered."""
MEASURES = 3 * 2**29
"""Bytes for temporaries of measures, a whole weight and the gradients of a turn."""


class SampleFailed(Exception):
    """No rank has a sample. The text goes on from "a sample"."""


@dataclass(frozen=True)
class LinearSums:
    """Of a linear in its own scheme and, if others are compared, in ALTERNATIVES; on the host, fp64."""

    tensors: Tensor
    """[schemes, 3 (READERS), 9 (SUMS)]; without elements where a tensor was not seen."""
    products: Tensor
    """[schemes, 3 (GEMMS), 3]: whether it was seen, and `product_squares`."""
    direction: Tensor
    """[3], `direction_sums`; zeros where the gradient was not compared."""


class SampleRanks:
    """The ranks that sample a model."""

    def __init__(self, model: nn.Module, quantized: QuantizedModel, parallel: DataParallel):
        self._model, self._quantized, self._parallel = model, quantized, parallel
        parts = model.parts if isinstance(model, Decoder) else None
        self._parts = parts if isinstance(parts, ModelParallel) else None

    @property
    def together(self) -> bool:
        """Whether all ranks take a sample at once; else rank 0 does."""
        mesh = self._parallel.mesh
        gathers = self._parallel.reshards or any(linear.codes_only for linear in self._quantized.linears)
        return mesh.world > 1 and (mesh.model_group is not None or mesh.cp > 1 or gathers)

    @property
    def sequence_parts(self) -> int:
        """How many ranks share each sequence."""
        return self._parallel.sequence_parts

    def agree(self, choose: Callable[[], T]) -> T:
        """What rank 0 chooses."""
        return from_rank_0(choose) if self.together else choose()

    def probe(self, choice: LinearChoice, linear: LowBitLinear, compare: bool) -> LinearProbe:
        """compare: with other schemes."""
        others = alternatives(choice, linear.weight.device) if compare else None
        split = self._parts.split_gemms(choice.name) if self._parts is not None else ()
        weight = (lambda: self._parallel.weights.whole(linear.weight)) if linear.codes_only else None
        return LinearProbe(choice, linear, others, split, weight)

    def check_memory(self, share: float) -> None:
        """Raise SampleFailed on all ranks if one has too little memory for passes of this share of a micro-batch's
        tokens, where they must all come through."""
        if not self.together:
            return
        if not all(all_gather(self._fits(share))):
            raise SampleFailed(NO_MEMORY)

    def _fits(self, share: float) -> bool:
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            return True
        # Between steps all else is in memory that a step has: its peak is that of its passes.
        passes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        return allocatable_memory(device) > max(EAGER * share, GATHERED) * passes + MEASURES

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Passes inside send nothing that a step counts, and reduce no gradients."""
        before = sent.copy()
        try:
            with self._parallel.without_reduction():
                yield
        finally:
            sent.clear()
            sent.update(before)

    def check(self, probes: Sequence[LinearProbe]) -> None:
        """Raise SampleFailed on all ranks if some could not measure."""
        error = next((probe.error for probe in probes if probe.error is not None), None)
        why = None if error is None else why_failed(error)
        if why := next(filter(None, all_gather(why) if self.together else [why]), None):
            raise SampleFailed(why)

    def sum(self, counts: Tensor) -> Tensor:
        """fp64 counts over all ranks."""
        if self.together:
            dist.all_reduce(counts)
        return counts

    def add(self, probes: Mapping[str, LinearProbe], directions: Mapping[str, Tensor]) -> dict[str, LinearSums]:
        """What the probes have seen of whole linears. directions: `direction_sums` of some. One copy from the
        device."""
        if not probes:
            return {}
        group = self._parallel.mesh.model_group
        for probe in probes.values():
            self._add_terms(probe)
        blocks = [_flat(probe, directions.get(name)) for name, probe in probes.items()]
        flat = torch.cat(blocks)
        # [ranks, all]
        every = (flat[None] if group is None else group.all_gather_no_grad(flat[None])).cpu()
        found = {}
        for (name, probe), block in zip(probes.items(), every.split([len(b) for b in blocks], dim=1), strict=True):
            kind = None if self._parts is None else self._parts.kind(f"{name}.weight")
            own = group if self._parts is None else self._parts.group_of(f"{name}.weight")
            if group is not None:  # of its consecutive ranks those that compute this linear together
                first, count = (group.rank, 1) if own is None else (group.rank - own.rank, own.ranks)
                block = block[first : first + count]
            found[name] = _added(block, len(_schemes(probe)), kind == "expert")
        return found

    def _add_terms(self, probe: LinearProbe) -> None:
        """Sum the products of which each rank has a term."""
        group, schemes = self._parallel.mesh.tp_group, _schemes(probe)
        for gemm, own in probe.own.terms.items():
            none = torch.zeros_like(own)
            terms = torch.stack([none if errors is None else errors.terms.get(gemm, none) for errors in schemes])
            terms = group.all_reduce_no_grad(terms) if group is not None else terms
            for errors, summed in zip(schemes, terms, strict=True):
                if errors is not None and gemm in errors.terms:
                    errors.squares[gemm] = product_squares(summed)


def why_failed(error: Exception) -> str:
    """The sentence that begins with "a sample"."""
    return NO_MEMORY if is_out_of_memory(error) else f"failed ({first_line(error)})"


# ---- the layout of what ranks gather, which is the same on all of them -----------------------------------------------


def _schemes(probe: LinearProbe) -> list[SchemeErrors | None]:
    """Its own scheme and ALTERNATIVES, None where a linear of this shape cannot run in one."""
    return [probe.own, *(probe.what_if.get(name) for name in ALTERNATIVES)] if probe.compared else [probe.own]


def _flat(probe: LinearProbe, direction: Tensor | None) -> Tensor:
    """fp64 [schemes * (27 + 9) + 4]."""
    device = probe.linear.weight.device
    zeros, seen = torch.zeros(len(SUMS), dtype=torch.float64, device=device), torch.ones(1, device=device).double()
    parts = []
    for errors in _schemes(probe):
        parts += [zeros if errors is None else errors.sums.get(name, zeros) for name in READERS]
        for gemm in GEMMS:
            squares = None if errors is None else errors.squares.get(gemm)
            parts += [zeros[:3]] if squares is None else [seen, squares]
    parts += [zeros[:3] if direction is None else direction, seen * probe.expert_rows]
    return torch.cat(parts)


def _added(ranks: Tensor, schemes: int, experts: bool) -> LinearSums:
    """ranks [ranks, as `_flat`]. experts: each rank has other experts."""
    per_scheme = ranks[:, :-4].view(len(ranks), schemes, -1)
    tensors, products = per_scheme.split([len(READERS) * len(SUMS), len(GEMMS) * 3], dim=-1)
    products = products.unflatten(-1, (len(GEMMS), 3))
    # Of experts, the products are those of the one that has the most rows.
    products = products[ranks[:, -1].argmax()] if experts else products.sum(0)
    return LinearSums(add_sums(tensors.unflatten(-1, (len(READERS), len(SUMS)))), products, ranks[:, -4:-1].sum(0))
