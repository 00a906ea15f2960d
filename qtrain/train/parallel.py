"""Data parallelism over a mesh: the masters that the optimizer updates, and what the ranks tell each other in a step.

A step on N ranks with A micro-batches each reads the N x A micro-batches of one rank's step, rounds with the same
random bits, and divides by the same count of trained tokens. With --deterministic it also adds in the same order: then
losses, gradients and weights are those of one rank, bit for bit.

After the optimizer's step every rank gathers the updated weights. Where all products of a linear read codes, the rank
keeps the codes only: the full weight exists for the moment in which it is quantized. With full sharding a rank
quantizes its rows after the step, and the blocks gather their weights when they run.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from qtrain.distributed.full_shard import FullShard, ShardedBlock
from qtrain.distributed.gradient_wire import GradientWire
from qtrain.distributed.gradients import GradientReduction
from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded, plain_tensors, shard_parameters
from qtrain.distributed.weights import GatheredMaster, gather_weights
from qtrain.distributed.wire import gather_rows
from qtrain.quant import LowBitLinear, QuantizedModel
from qtrain.quant.convert import shared_weights
from qtrain.quant.sharded_codes import ShardedCodes, update_codes
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.gradients import Gradients, norm_of


class DataParallel:
    """The trained parameters of `model` on the mesh. deterministic: add in the order of the micro-batches.

    needs_whole: whether the optimizer needs all elements of a parameter on one rank. keep_full_weights: also of linears
    that read codes only. wire: how gradients are encoded between ranks, rounded with `seed`; None: as they are. blocks:
    in the order in which they run, those whose weights and gradients exist in full only while they do."""

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
        blocks: Sequence[nn.Module] = (),
    ):
        self.mesh = mesh
        self.adds_locally = not (deterministic or blocks)
        """Whether a micro-batch's gradients are added to those of the former one in the parameters' `.grad`."""
        self._first_micro_step, self._micro_batches, self._index = 0, 1, 0
        self._quantized = quantized
        self._device = next(model.parameters()).device
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        self.parameters = shard_parameters(trained, mesh, needs_whole, freed=lambda p: id(p) in in_blocks)
        self.masters = {id(s.parameter): s.master for s in self.parameters}
        self._reduction = None
        if mesh.world > 1 or deterministic:
            groups = _by_block(self.parameters, blocks)
            self._reduction = GradientReduction(
                groups, mesh, every_micro_batch=not self.adds_locally, wire=wire, seed=seed
            )
        self._linear_of = {} if mesh.shard == 1 else _linears_by_weight(quantized, model)
        self._codes: list[ShardedCodes] = []
        if mesh.shard > 1 and not keep_full_weights:
            self._drop_full_weights()
        self._full_shard: FullShard | None = None
        self._in_blocks: set[int] = set()
        if blocks:
            self._shard_fully(model, blocks)

    # ---- what the optimizer and checkpoints see ----------------------------------------------------------------------

    def master(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates in place of a parameter of the model; frozen ones are their own masters."""
        return self.masters.get(id(parameter), parameter)

    @property
    def reshards(self) -> bool:
        """Whether layers exist in full only while they run."""
        return self._full_shard is not None

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, micro_batches: int) -> None:
        """The next gradients are those of `step`, from this many micro-batches of each rank."""
        self._first_micro_step, self._micro_batches = step * micro_batches * self.mesh.world, micro_batches

    def begin_micro_batch(self, index: int) -> None:
        """Key random bits with the number of this rank's micro-batch `index` among those of the run."""
        self._index = index
        self._quantized.set_step(self._micro_step(index))

    def _micro_step(self, index: int) -> int:
        return self._first_micro_step + index * self.mesh.world + self.mesh.rank

    def count_trained(self, own: int) -> Tensor:
        """Trained tokens of the step over all ranks, at least 1: an fp32 scalar on the device."""
        trained = torch.full((), float(own), dtype=torch.float64, device=self._device)
        if self.mesh.world > 1:
            torch.distributed.all_reduce(trained)
        return trained.clamp_(min=1).float()

    def end_backward(self) -> None:
        """The last part of a micro-batch's forward and backward pass, which is recorded with it."""
        if self._full_shard is not None:
            self._full_shard.end_backward()

    def break_off(self) -> None:
        """A forward or backward pass has failed and will be run again."""
        if self._full_shard is not None:
            self._full_shard.free()

    def end_micro_batch(self, index: int) -> None:
        """Reduce the gradients of micro-batch `index`, if they are not added up on this rank first."""
        last = index == self._micro_batches - 1
        if self._reduction is None or (self.adds_locally and not last):
            return
        if self._full_shard is not None:  # the blocks' gradients are added already
            self._reduction.add_group(self._full_shard.blocks, self._micro_step(index))
        else:
            self._reduction.add(self._micro_step(index))
        if last:
            self._reduction.finish()

    def sums(
        self, nll: Sequence[Tensor], trained: Tensor, tokens: int, stop_signal: int, norm: Tensor | None = None
    ) -> Gradients:
        """Loss, gradient norm and counts over all ranks. nll: of each micro-batch. norm: of the gradients, if known.

        The only synchronization of a step with the device."""
        exact = self._reduction is not None
        if norm is None:
            gradients = [s.master.grad for s in self.parameters if s.master.grad is not None]
            norm = self._squares(gradients) if exact else norm_of(gradients)
        counts = torch.tensor([tokens, stop_signal], dtype=torch.float64, device=self._device)
        own = torch.cat([torch.stack([*nll, trained, norm]).double(), counts])
        every = self._gather(own)
        loss = np.float32(0)
        for of_ranks in every.T[: len(nll)]:
            for value in of_ranks:
                loss = np.float32(loss + np.float32(value))
        if exact:
            value = math.sqrt(sum(every[: self.mesh.shard, len(nll) + 1]))
            norm = torch.tensor(value, dtype=torch.float32, device=self._device)
        else:
            value = float(every[0, len(nll) + 1])
        return Gradients(
            loss=float(np.float32(loss / np.float32(every[0, len(nll)]))),
            norm=norm,
            norm_value=float(np.float32(value)),
            tokens=int(every[:, -2].sum()),
            stop_signal=int(every[:, -1].max()),
        )

    def _gather(self, own: Tensor) -> np.ndarray:
        """The numbers of all ranks, [ranks, n], on the host."""
        if self.mesh.world == 1:
            return own[None].cpu().numpy()
        return gather_rows(own).cpu().numpy()

    @staticmethod
    def _squares(gradients: Iterable[Tensor]) -> Tensor:
        """Sum of squares in fp64, in which the order of additions does not show."""
        norms = torch._foreach_norm([getattr(g, "_local_tensor", g) for g in gradients], 2, dtype=torch.float64)
        return torch.stack(norms).square().sum()

    # ---- weights -----------------------------------------------------------------------------------------------------

    def refresh(self, recorded: Callable[[], None] | None = None) -> None:
        """After the optimizer's step: `requantize`, or the replay of it."""
        # The number of the last micro-batch of all ranks keys the rounding of weights, as it does on one rank.
        self._quantized.set_step(self._first_micro_step + self._micro_batches * self.mesh.world - 1)
        (recorded or self.requantize)()

    def requantize(self) -> None:
        """Give the model the masters' values, and its linears the codes of them."""
        self.gather()
        self._quantized.refresh()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the masters' values into the model, and quantize those weights that it does not keep in full. What
        belongs to fully sharded blocks is gathered when they run."""
        if self.mesh.shard == 1:
            return
        if self._full_shard is not None:
            self._full_shard.free()
            self._weight_keys.copy_(self._quantized.keys)
        update_codes(self._codes, self.mesh)
        as_codes = {id(weight.sharded.parameter) for weight in self._codes}
        self._gather_masters(s for s in self.parameters if id(s.parameter) not in as_codes | self._in_blocks)
        for sharded in self.parameters:
            if id(sharded.parameter) in self._in_blocks - as_codes:
                torch.autograd.graph.increment_version(sharded.parameter)
                if (linear := self._linear_of.get(id(sharded.parameter))) is not None:
                    linear.mark_fresh()

    def _gather_masters(self, parameters: Iterable[Sharded]) -> None:
        changed = list(parameters)
        torch.autograd.graph.increment_version([s.parameter for s in changed])
        gather_weights([GatheredMaster(sharded, self._receive) for sharded in changed], self.mesh)

    def _receive(self, sharded: Sharded, tensors: list[Tensor]) -> None:
        linear = self._linear_of.get(id(sharded.parameter))
        if linear is not None and linear.codes_only:
            linear.refresh(tensors[0])
            return
        for own, gathered in zip(plain_tensors(sharded.parameter), tensors, strict=True):
            own.copy_(gathered)
        if linear is not None and linear.gathered:
            linear.refresh(sharded.parameter)

    def _drop_full_weights(self) -> None:
        """Free the weights of linears that read only codes; the parameter stays, to receive the gradient."""
        for sharded in self.parameters:
            linear = self._linear_of.get(id(sharded.parameter))
            if linear is not None and linear.scheme.reads_codes_only:
                linear.keep_codes_only()
                if linear.scheme.wire_format():
                    self._codes.append(ShardedCodes(sharded, linear, self.mesh.shard_rank))

    # ---- full sharding -----------------------------------------------------------------------------------------------

    def _shard_fully(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Let the matrices of `blocks` exist in full only while their block runs."""
        shared = shared_weights(model)
        by_weight = {id(s.parameter): s for s in self.parameters if s.parameter.ndim > 1}
        codes = {id(weight.sharded.parameter): weight for weight in self._codes}
        self._weight_keys = self._quantized.keys.clone()
        sharded_blocks = []
        for block in blocks:
            own = [by_weight[id(p)] for p in block.parameters() if id(p) in by_weight and id(p) not in shared]
            linears = [linear for s in own if (linear := self._linear_of.get(id(s.parameter))) is not None]
            for linear in linears:
                linear.gathered = True
                # Gathered in any micro-batch, a weight is rounded with the random bits of its last update.
                linear.weight_key = self._weight_keys[int(linear.key[2])]
            of_codes = [codes[id(s.parameter)] for s in own if id(s.parameter) in codes]
            for weight in of_codes:
                weight.keeps = True
            masters = [GatheredMaster(s, self._receive) for s in own if id(s.parameter) not in codes]
            dropped = {id(linear.weight) for linear in linears if linear.codes_only}
            tensors = [t for s in own if id(s.parameter) not in dropped for t in plain_tensors(s.parameter)]
            tensors += [buffer for linear in linears for buffer in linear.low_bit_weight.buffers()]
            sharded_blocks.append(
                ShardedBlock(block, tensors, functools.partial(self._gather_block, of_codes, masters))
            )
            self._in_blocks |= {id(s.parameter) for s in own}
        update_codes([weight for weight in self._codes if weight.keeps], self.mesh)
        self._full_shard = FullShard(sharded_blocks, self._device, self._reduce_block)

    def gather_blocks(self) -> None:
        """Gather the weights of all fully sharded blocks at once, to be read."""
        if self._full_shard is not None:
            self._full_shard.gather()

    def _gather_block(self, codes: Sequence[ShardedCodes], masters: Sequence[GatheredMaster]) -> None:
        gather_weights(codes, self.mesh, "codes")
        gather_weights(masters, self.mesh)

    def _reduce_block(self, index: int) -> None:
        self._reduction.add_group(index, self._micro_step(self._index))

    # ---- the end of a run --------------------------------------------------------------------------------------------

    def restore_full_weights(self) -> None:
        """For an export: the full weights that are not in memory; of fully sharded blocks in the host's, on rank 0
        only. The model does not train any more after this."""
        if self._full_shard is not None:
            self._full_shard.remove()
        dropped = {id(linear.weight) for linear in self._linear_of.values() if linear.codes_only}
        missing = [s for s in self.parameters if id(s.parameter) in dropped | self._in_blocks]
        gather_weights([GatheredMaster(sharded, self._restore) for sharded in missing], self.mesh)

    def _restore(self, sharded: Sharded, tensors: list[Tensor]) -> None:
        parameter, from_block = sharded.parameter, id(sharded.parameter) in self._in_blocks
        if from_block and self.mesh.rank:
            return
        if isinstance(parameter.data, StoredWeight):
            for own, gathered in zip(plain_tensors(parameter), tensors, strict=True):
                own.untyped_storage().resize_(gathered.nbytes)
                own.copy_(gathered)
        else:
            parameter.data = tensors[0].cpu() if from_block else tensors[0]
        if not from_block and (linear := self._linear_of.get(id(parameter))) is not None:
            linear.codes_only = False


def _by_block(parameters: Sequence[Sharded], blocks: Sequence[nn.Module]) -> list[list[Sharded]]:
    """The parameters of each block, then all others."""
    block_of = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    groups: list[list[Sharded]] = [[] for _ in range(len(blocks) + 1)]
    for sharded in parameters:
        groups[block_of.get(id(sharded.parameter), len(blocks))].append(sharded)
    return groups


def _linears_by_weight(quantized: QuantizedModel, model: nn.Module) -> dict[int, LowBitLinear]:
    """id of a trained weight -> its linear, where no other module has the weight."""
    shared = shared_weights(model)
    return {
        id(linear.weight): linear
        for linear in quantized.linears
        if linear.weight.requires_grad and id(linear.weight) not in shared
    }
