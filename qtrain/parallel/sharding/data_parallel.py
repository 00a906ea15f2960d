"""Data parallelism over a mesh: the masters that the optimizer updates, and what the ranks tell each other in a step.

A step on N ranks with A micro-batches each reads the N x A micro-batches of one rank's step, rounds with the same
random bits, and divides by the same count of trained tokens. With --deterministic it also adds in the same order: then
losses, gradients and weights are those of one rank, bit for bit.

After the optimizer's step every rank gathers the updated weights (`model_weights.py`).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qtrain.comm.wire import all_gather_rows, maximum_over_ranks
from qtrain.core.hardware.host_copy import HostCopy
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.optim.sum_of_squares import SumOfSquares
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.checkpoint_layout import ModelParallelState
from qtrain.parallel.sharding.full_shard import FullShard, Unit
from qtrain.parallel.sharding.gradient_wire import GradientWire
from qtrain.parallel.sharding.gradients import GradientReduction
from qtrain.parallel.sharding.host_gradients import HostGradients
from qtrain.parallel.sharding.model_weights import ModelWeights
from qtrain.parallel.sharding.part_masters import TensorParts
from qtrain.parallel.sharding.sharded_model import as_decoder, shard_model
from qtrain.parallel.sharding.shards import Sharded, by_mesh
from qtrain.quant import QuantizedModel, Scheme
from qtrain.quant.gradient_sums import GradientSums


@dataclass(frozen=True)
class StepNumbers:
    """What the backward passes of a step produce besides the gradients themselves."""

    loss: float
    """Mean over the step's trained tokens, without z-loss."""
    norm: float
    """L2 norm of all gradients, before clipping; a number of fp32."""
    tokens: int
    """Tokens read by all ranks, trained on or not."""
    stop_signal: int = 0
    """The number of a signal that some rank has received; 0: none."""


class LossAndNorm(NamedTuple):
    """Of a step, fp32 scalars on the device."""

    loss: Tensor
    norm: Tensor


class Gradients:
    """The numbers of a step (`StepNumbers`). The first one that is asked for waits until the device has computed the
    gradients; what is launched before that follows without a gap.

    on_device: the same on all ranks."""

    def __init__(self, read: Callable[[], StepNumbers], on_device: LossAndNorm):
        self._read, self.on_device = read, on_device

    @functools.cached_property
    def _numbers(self) -> StepNumbers:
        return self._read()

    @property
    def loss(self) -> float:
        return self._numbers.loss

    @property
    def norm(self) -> float:
        return self._numbers.norm

    @property
    def tokens(self) -> int:
        return self._numbers.tokens

    @property
    def stop_signal(self) -> int:
        return self._numbers.stop_signal

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    def update_scale(self, max_norm: float) -> Tensor:
        """What the update multiplies the gradients with, an fp32 scalar on the device: 1, or where they are clipped
        (max_norm > 0) the factor of `torch.nn.utils.clip_grads_with_norm_`; NaN unless loss and norm are finite."""
        loss, norm = self.on_device
        scale = torch.ones_like(norm)
        if max_norm:
            scale = torch.where(norm > max_norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0), scale)
        return scale + 0 * loss + 0 * norm


class DataParallel:
    """The trained parameters of `model` on the mesh.

    needs_whole: whether the optimizer needs all elements of a parameter on one rank.
    deterministic: add in the order of the micro-batches.
    keep_full_weights: keep the weights of linears that read codes only, too.
    wire: how gradients are encoded between ranks, rounded with `seed`; None: as they are.
    units: in the order in which they run, those whose weights and gradients exist in full only while they do; where the
        mesh does not shard, those whose frozen weights are in host memory between, and with `host_gradients` those that
        train too.
    host_gradients: the sums of gradients are in host memory, of a mesh that shards those of all units.
    partitions: with the optimizer in the backward pass, the parameters that are updated together; those of a unit are
        one.
    gradient_sums: of one process, which adds up its micro-batches' gradients in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        quantized: QuantizedModel,
        mesh: Mesh,
        needs_whole: Callable[[nn.Parameter], bool] = lambda p: False,
        *,
        deterministic: bool = False,
        keep_full_weights: bool = False,
        wire: GradientWire | None = None,
        seed: int = 0,
        units: Sequence[Unit] = (),
        host_gradients: bool = False,
        partitions: Mapping[str, Sequence[nn.Parameter]] | None = None,
        gradient_sums: GradientSums | None = None,
    ):
        self.mesh = mesh
        self.adds_locally = not (deterministic or (units and mesh.shard > 1))
        """Whether a micro-batch's gradients are added to those of the one before in the parameters' `.grad`, or in host
        memory."""
        self.sequence_parts = 1 if deterministic else mesh.cp
        """In which the ranks of --cp read a sequence. One: each computes all of its tokens, and the gradients and sums
        of the first one count."""
        self._first_micro_step, self._micro_batches, self._index = 0, 1, 0
        self._quantized, self._gradient_sums = quantized, gradient_sums
        quantized.reduce_amax = maximum_over_ranks
        self._sum_of_squares = SumOfSquares()
        self._device = next(model.parameters()).device
        host_weights = host_gradients and mesh.world == 1
        self.parameters, self.frozen = shard_model(
            model,
            quantized,
            mesh,
            needs_whole,
            units,
            deterministic=deterministic,
            keep_full_weights=keep_full_weights,
            host_weights=host_weights,
        )
        self.masters = {id(s.parameter): s.master for s in [*self.parameters, *self.frozen]}
        sharded_of = {id(s.parameter): s for s in self.parameters}
        self.partitions = {n: [sharded_of[id(p)] for p in members] for n, members in (partitions or {}).items()}
        """The parameters that are updated within the backward pass, by the name of their module."""
        self.partition_of_unit = _indices_of(self.partitions.values(), units)
        """The index of each unit's partition; None where it has none."""
        self._reduction = None
        # What is reduced at once: a partition of the backward pass, a unit, or all there is.
        groups = self._groups = [*self.partitions.values()] or _by_unit(self.parameters, units)
        self._parts = TensorParts(as_decoder(model), groups, mesh) if mesh.tp > 1 else None
        self.placements = {s.master: s.placement for s in self.parameters if s.placement is not None}
        """Of masters that are parts of larger parameters."""
        if self._parts is not None:
            self.placements |= self._parts.placements
        self.model_parallel_state = None if mesh.model_group is None else ModelParallelState(as_decoder(model))
        if mesh.dp_size > 1 or deterministic:
            self._reduction = GradientReduction(
                groups,
                every_micro_batch=not (self.adds_locally or self.partitions),
                by_machine=not deterministic,
                wire=wire,
                seed=seed,
                on_host=self._device if host_gradients else None,
            )
        self._host = HostGradients(groups, self._device) if host_weights else None
        self.after_unit: Callable[[int], None] = self.reduce_group
        """What is done with the gradients of a fully sharded unit as soon as its backward pass is over."""
        self.weights = ModelWeights(
            model,
            quantized,
            self.parameters,
            mesh,
            frozen=self.frozen,
            keep_full_weights=keep_full_weights,
            units=units,
            reduce=lambda unit: self.after_unit(unit),
            # Collectives of gathers and reductions would have to be in one order on all ranks.
            reduces_apart=mesh.shard == 1 or (self._reduction is not None and self._reduction.copies_all),
        )

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self._device

    @property
    def full_shard(self) -> FullShard | MaybeNone:
        """The blocks whose weights exist in full only while they run; None without full sharding."""
        return self.weights.full_shard

    @property
    def _repeats(self) -> bool:
        """Whether another rank counts for what this one computes."""
        return self.mesh.cp_rank >= self.sequence_parts

    # ---- what the optimizer and checkpoints see ----------------------------------------------------------------------

    def master(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates in place of a parameter of the model; of a frozen one what this rank has of it."""
        return self.masters.get(id(parameter), parameter)

    @property
    def reshards(self) -> bool:
        """Whether layers exist in full only while they run."""
        return self.full_shard is not None

    @property
    def adds_in_backward(self) -> bool:
        """Whether the backward pass of a step's first micro-batch writes gradients, or sums of them, to which that of a
        further one adds."""
        return self.adds_locally or self.reshards

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, micro_batches: int) -> None:
        """The next gradients are those of `step`, from this many micro-batches of each rank."""
        self._first_micro_step, self._micro_batches = step * micro_batches * self.mesh.readers, micro_batches
        if self._gradient_sums is not None:
            self._gradient_sums.begin_step(micro_batches)

    def begin_micro_batch(self, index: int) -> None:
        """Key random bits with the number of this rank's micro-batch `index` among those of the run."""
        self._index = index
        self._quantized.set_step(self._micro_step(index))

    def _micro_step(self, index: int) -> int:
        # A micro-batch has a number for each part: ranks must not draw the same bits for other tokens.
        micro_step = self._first_micro_step + index * self.mesh.readers + self.mesh.reader
        return micro_step * self.sequence_parts + self.mesh.cp_rank % self.sequence_parts

    def count_trained(self, own: int) -> Tensor:
        """Trained tokens of the step over all ranks, at least 1: an fp32 scalar on the device."""
        own = own if self.mesh.cp_rank == 0 else 0  # the other ranks of its group have counted the same tokens
        trained = torch.full((), float(own), dtype=torch.float64, device=self._device)
        if self.mesh.dp_size > 1:
            # Counts up to 2**53 are exact in fp64, in any order.
            torch.distributed.all_reduce(trained, group=self.mesh.dp_group)
        return trained.clamp_(min=1).float()  # a step without trained tokens divides by 1, not by 0

    def end_backward(self) -> None:
        """The last part of a micro-batch's forward and backward pass, which is recorded with it."""
        if self.full_shard is not None:
            self.full_shard.end_backward()

    def abort_micro_batch(self) -> None:
        """A forward or backward pass has failed and will be run again."""
        if self.full_shard is not None:
            self.full_shard.free()

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Passes inside, of all data ranks, leave no gradients: those of fully sharded units are not reduced."""
        after_unit, self.after_unit = self.after_unit, lambda unit: None
        try:
            yield
        finally:
            self.after_unit = after_unit
            self.abort_micro_batch()

    def reduce_group(self, index: int, *, recorded: bool = False) -> None:
        """Reduce the gradients of this micro-batch of one unit, or of one partition, whose masters get the sums.
        recorded: as in `end_micro_batch`."""
        if self._parts is not None:
            self._parts.complete_gradients(index)
        if self._repeats:
            for sharded in self._groups[index]:
                sharded.receiver.grad = None
        if self._reduction is not None:
            first = self._index == 0
            self._reduction.add_group(index, self._micro_step(self._index), first=first, recorded=recorded)
        if self._host is not None:
            self._host.add_group(index, first=self._index == 0)

    def end_micro_batch(self, index: int, *, recorded: bool = False) -> None:
        """Reduce the gradients of micro-batch `index`, if they are not added up on this rank first. recorded: they are
        in the memory of a CUDA graph, where the next step's replay writes them."""
        if self.partitions:
            return
        # Added locally, ranks meet once a step; kept in order, after every micro-batch.
        last = index == self._micro_batches - 1
        if self.adds_locally and not last:
            return
        # All parameters are one group without full sharding; with it the units' gradients are added already.
        self.reduce_group(0 if self.full_shard is None else self.full_shard.blocks, recorded=recorded)
        if last and self._reduction is not None:
            self._reduction.finish()
        if last and self._host is not None:
            self._host.finish()

    def sums(
        self, nll: Sequence[Tensor], trained: Tensor, tokens: int, stop_signal: int, squares: Tensor | None = None
    ) -> Gradients:
        """Loss, gradient norm and counts over all ranks. nll: of each micro-batch. squares: `squares` of all gradients,
        if they are freed already.

        To read them is the only synchronization of a step with the device."""
        if self._gradient_sums is not None:
            self._gradient_sums.end_step()
        # Of a parameter that several tensor ranks have, the norm counts one copy.
        counted = self.parameters if self._parts is None else self._parts.counted
        if squares is None:
            on_device = [sharded for sharded in counted if not sharded.on_host]
            summed = [(mesh, self.squares(members)) for mesh, members in by_mesh(on_device, lambda sharded: sharded)]
        else:
            summed = [(self.mesh, squares)]
        if self._host is not None:
            summed.append((self.mesh, self._host.squares()))
        # From pageable memory: the copy has been staged when the call returns, and the host goes on.
        counts = torch.tensor([tokens, stop_signal], dtype=torch.float64).to(self._device, non_blocking=True)
        # fp64 [micro-batches + 1 + meshes + 2]: all that the host reads in a step, in one message and one copy.
        own = torch.cat([torch.stack([*nll, trained, *(square for _, square in summed)]).double(), counts])
        every_rank = own[None] if self.mesh.world == 1 else all_gather_rows(own)  # [ranks, n]
        on_host, meshes = HostCopy(every_rank), [mesh for mesh, _ in summed]
        # The same on the device, for the update.
        loss = every_rank[:: self._alike, : len(nll)].sum() / every_rank[0, len(nll)]
        of_meshes = (every_rank[: mesh.shard * mesh.tp, len(nll) + 1 + i].sum() for i, mesh in enumerate(meshes))
        norm = sum(of_meshes, start=torch.zeros_like(loss)).sqrt()
        return Gradients(
            lambda: self._numbers(on_host.read().numpy(), len(nll), meshes), LossAndNorm(loss.float(), norm.float())
        )

    @property
    def _alike(self) -> int:
        """Ranks with the same loss and tokens: those of a tensor group, and of --cp if each computes all tokens."""
        return self.mesh.tp * (self.mesh.cp // self.sequence_parts)

    def _numbers(self, per_rank: np.ndarray, micro_batches: int, meshes: Sequence[Mesh]) -> StepNumbers:
        """per_rank: fp64 [ranks, n], of each the message of `sums`. meshes: of each sum of squares."""
        every = per_rank[:: self._alike]
        # In fp32 and in the order of the micro-batches, as one process adds: the logged loss is the same bits.
        loss = np.float32(0)
        for per_micro_batch in every.T[:micro_batches]:
            for value in per_micro_batch:
                loss = np.float32(loss + np.float32(value))
        # Replicas hold the same gradients: the first one's are counted, with all tensor ranks' parts.
        copies = [per_rank[: mesh.shard * mesh.tp, micro_batches + 1 + i] for i, mesh in enumerate(meshes)]
        value = math.sqrt(sum(square for first_replica in copies for square in first_replica))
        return StepNumbers(
            loss=float(np.float32(loss / np.float32(every[0, micro_batches]))),
            norm=float(np.float32(value)),
            tokens=int(every[:: self.sequence_parts, -2].sum()),  # ranks with the same sequences count the same
            stop_signal=int(per_rank[:, -1].max()),
        )

    def squares(self, parameters: Iterable[Sharded]) -> Tensor:
        """Sum of what this rank has of squared gradients, in fp64, in which the order of additions does not show."""
        gradients = [getattr(g, "_local_tensor", g) for g in gradients_of(parameters)]
        if not gradients:  # other ranks own all of them
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return self._sum_of_squares(gradients)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def refresh(self, recorded: Callable[[], None] | None = None) -> None:
        """After the optimizer's step: `requantize`, or the replay of it."""
        # The number of the last micro-batch of all ranks keys the rounding of weights, as it does on one rank.
        self._quantized.set_step(self._first_micro_step + self._micro_batches * self.mesh.readers - 1)
        (recorded or self.requantize)()  # by a CUDA graph's replay, if there is one

    def requantize(self) -> None:
        """Give the model the masters' values, and its linears the codes of them."""
        self.gather()
        self._quantized.refresh()

    def gather(self) -> None:
        """Copy the masters' values into the model."""
        self.weights.gather()

    def reassign(self, model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
        """`quant.reassign` between steps, on all ranks: weights and codes are gathered as of a run that begins with the
        new map."""
        self.weights.reassign(model, schemes)

    def restore_full_weights(self) -> None:
        """For an export, after which the model does not train any more."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # masters in host memory are read there
        self.weights.restore()


def gradients_of(parameters: Iterable[Sharded]) -> list[Tensor]:
    """What this rank has of the masters' gradients."""
    return [s.master.grad for s in parameters if s.master.grad is not None]


def _indices_of(partitions: Iterable[Sequence[Sharded]], units: Sequence[Unit]) -> list[int | None]:
    """Which of the partitions has the parameters of each unit."""
    index_of = {id(s.parameter): index for index, members in enumerate(partitions) for s in members}
    found = [{index_of[id(p)] for p in unit.holder.parameters() if id(p) in index_of} for unit in units]
    return [max(indices, default=None) for indices in found]


def _by_unit(parameters: Sequence[Sharded], units: Sequence[Unit]) -> list[list[Sharded]]:
    """The parameters of each unit, then all others."""
    unit_of = {id(p): index for index, unit in enumerate(units) for p in unit.holder.parameters()}
    groups: list[list[Sharded]] = [[] for _ in range(len(units) + 1)]
    for sharded in parameters:
        groups[unit_of.get(id(sharded.parameter), len(units))].append(sharded)
    return groups
