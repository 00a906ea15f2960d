"""Data parallelism over a mesh: the masters that the optimizer updates, and what the ranks tell each other in a step.

A step on N ranks with A micro-batches each reads the N x A micro-batches of one rank's step, rounds with the same
random bits, and divides by the same count of trained tokens. With --deterministic it also adds in the same order: then
losses, gradients and weights are those of one rank, bit for bit.

After the optimizer's step every rank gathers the updated weights. Where all products of a linear read codes, the rank
keeps the codes only: the full weight exists for the moment in which it is quantized.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from qtrain.distributed.gradient_wire import GradientWire
from qtrain.distributed.gradients import GradientReduction
from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded, plain_tensors, shard_parameters
from qtrain.distributed.weights import GatheredMaster, gather_weights
from qtrain.distributed.wire import gather_rows
from qtrain.quant import LowBitLinear, QuantizedModel
from qtrain.quant.sharded_codes import ShardedCodes, gather_codes
from qtrain.train.gradients import Gradients, norm_of
from qtrain.train.state.divided_state import DividedState
from qtrain.train.tensor_parallel import TensorParts


class DataParallel:
    """The trained parameters of `model` on the mesh. deterministic: add in the order of the micro-batches.

    needs_whole: whether the optimizer needs all elements of a parameter on one rank. keep_full_weights: also of linears
    that read codes only. wire: how gradients are encoded between ranks, rounded with `seed`; None: as they are."""

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
    ):
        self.mesh, self.deterministic = mesh, deterministic
        self._first_micro_step, self._micro_batches = 0, 1
        self._quantized = quantized
        self._device = next(model.parameters()).device
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = shard_parameters(trained, mesh, needs_whole)
        self.masters = {id(s.parameter): s.master for s in self.parameters}
        self._reduction = None
        self._parts = self.divided_state = None
        if mesh.tensor > 1:
            self._parts = TensorParts(model, self.parameters, mesh)
            self.divided_state = DividedState(model, mesh.tensor_group)
        if mesh.data_world > 1 or deterministic:
            self._reduction = GradientReduction(
                self.parameters, mesh, every_micro_batch=deterministic, wire=wire, seed=seed
            )
        self._linear_of = {} if mesh.shard == 1 else _linears_by_weight(quantized, model)
        self._codes = [
            ShardedCodes(s, linear, mesh.shard_rank)
            for s in self.parameters
            if (linear := self._linear_of.get(id(s.parameter))) and linear.scheme.wire_format()
        ]
        if mesh.shard > 1 and not keep_full_weights:
            self._drop_full_weights()

    # ---- what the optimizer and checkpoints see ----------------------------------------------------------------------

    def master(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates in place of a parameter of the model; frozen ones are their own masters."""
        return self.masters.get(id(parameter), parameter)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int, micro_batches: int) -> None:
        """The next gradients are those of `step`, from this many micro-batches of each rank."""
        self._first_micro_step, self._micro_batches = step * micro_batches * self.mesh.data_world, micro_batches

    def begin_micro_batch(self, index: int) -> None:
        """Key random bits with the number of this rank's micro-batch `index` among those of the run."""
        self._quantized.set_step(self._micro_step(index))

    def _micro_step(self, index: int) -> int:
        return self._first_micro_step + index * self.mesh.data_world + self.mesh.data_rank

    def count_trained(self, own: int) -> Tensor:
        """Trained tokens of the step over all ranks, at least 1: an fp32 scalar on the device."""
        trained = torch.full((), float(own), dtype=torch.float64, device=self._device)
        if self.mesh.data_world > 1:
            torch.distributed.all_reduce(trained, group=self.mesh.data_group)
        return trained.clamp_(min=1).float()

    def end_micro_batch(self, index: int) -> None:
        """Reduce the gradients of micro-batch `index`, if they are not added up on this rank first."""
        last = index == self._micro_batches - 1
        if self._parts is not None and (last or self.deterministic):
            self._parts.complete_gradients()
        if self._reduction is None or not (last or self.deterministic):
            return
        self._reduction.add(self._micro_step(index))
        if last:
            self._reduction.finish()

    @property
    def adds_locally(self) -> bool:
        """Whether a micro-batch's gradients are added to those of the former one in the parameters' `.grad`."""
        return not self.deterministic

    def sums(
        self, nll: Sequence[Tensor], trained: Tensor, tokens: int, stop_signal: int, norm: Tensor | None = None
    ) -> Gradients:
        """Loss, gradient norm and counts over all ranks. nll: of each micro-batch. norm: of the gradients, if known.

        The only synchronization of a step with the device."""
        exact = self._reduction is not None or self._parts is not None
        if norm is None:
            counted = self.parameters if self._parts is None else self._parts.counted
            gradients = [s.master.grad for s in counted if s.master.grad is not None]
            norm = self._squares(gradients) if exact else norm_of(gradients)
        counts = torch.tensor([tokens, stop_signal], dtype=torch.float64, device=self._device)
        own = torch.cat([torch.stack([*nll, trained, norm]).double(), counts])
        of_parts = self._gather(own).reshape(self.mesh.data_world, self.mesh.tensor, len(own))
        every = of_parts[:, 0]  # the ranks of a tensor group have the same loss and tokens
        loss = np.float32(0)
        for of_ranks in every.T[: len(nll)]:
            for value in of_ranks:
                loss = np.float32(loss + np.float32(value))
        if exact:
            value = math.sqrt(sum(of_parts[: self.mesh.shard, :, len(nll) + 1].flatten()))
            norm = torch.tensor(value, dtype=torch.float32, device=self._device)
        else:
            value = float(every[0, len(nll) + 1])
        return Gradients(
            loss=float(np.float32(loss / np.float32(every[0, len(nll)]))),
            norm=norm,
            norm_value=float(np.float32(value)),
            tokens=int(every[:, -2].sum()),
            stop_signal=int(of_parts[..., -1].max()),
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
        """After the optimizer's step: gather the weights and requantize them. recorded: replays the latter."""
        if self.mesh.data_world == 1:
            (recorded or self._quantized.refresh)()
            return
        # The number of the last micro-batch of all ranks keys the rounding of weights, as it does on one rank.
        self._quantized.set_step(self._first_micro_step + self._micro_batches * self.mesh.data_world - 1)
        self.gather()
        self._quantized.refresh()

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the masters' values into the model, and quantize those weights that it does not keep in full."""
        if self.mesh.shard == 1:
            return
        codes = [weight for weight in self._codes if weight.linear.codes_only]
        gathered = {id(weight.sharded) for weight in codes}
        self._gather_masters(s for s in self.parameters if id(s) not in gathered)
        gather_codes(codes, self.mesh)

    def _gather_masters(self, parameters: Iterable[Sharded]) -> None:
        gather_weights([GatheredMaster(sharded, self._receive) for sharded in parameters], self.mesh)

    def _receive(self, sharded: Sharded, tensors: list[Tensor]) -> None:
        linear = self._linear_of.get(id(sharded.parameter))
        if linear is not None and linear.codes_only:
            linear.refresh(tensors[0])
            return
        for own, gathered in zip(plain_tensors(sharded.parameter), tensors, strict=True):
            own.copy_(gathered)
        torch.autograd.graph.increment_version(sharded.parameter)

    def _drop_full_weights(self) -> None:
        """Free the weights of linears that read only codes; the parameter stays, to receive the gradient."""
        for linear in self._linear_of.values():
            linear.keep_codes_only()

    def restore_full_weights(self) -> None:
        """For an export: the full weights of those linears that have only codes. All others stay as they are."""
        dropped = {id(linear.weight): linear for linear in self._linear_of.values() if linear.codes_only}
        for linear in dropped.values():
            linear.codes_only = False
            linear.weight.data = torch.empty_like(linear.weight.data, memory_format=torch.contiguous_format)
        self._gather_masters(s for s in self.parameters if id(s.parameter) in dropped)


def _linears_by_weight(quantized: QuantizedModel, model: nn.Module) -> dict[int, LowBitLinear]:
    """id of a weight -> its linear, where all products of the linear read codes and no other module has the weight."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            holders[id(p)] = holders.get(id(p), 0) + 1
    return {
        id(linear.weight): linear
        for linear in quantized.linears
        if linear.weight.requires_grad and holders[id(linear.weight)] == 1 and linear.scheme.reads_codes_only
    }
