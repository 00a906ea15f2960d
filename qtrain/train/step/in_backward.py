"""The optimizer in the backward pass: a block is updated as soon as its gradients are complete, and they are freed.

The gradients of a whole model are as large as bf16 weights, and twice as large as INT8 ones. Here those of one
partition exist at a time: a repeated block, the embedding, or the head. The idea is LOMO's (Lv et al. 2023,
arXiv:2306.09782), with the hooks of PyTorch's tutorial "How to save memory by fusing the optimizer step into the
backward pass"; the unit is a block and not a parameter, so that launches stay few. The result is that of the ordinary
step, bit for bit.

On several processes a partition's gradients are first reduced over the ranks; then each rank updates its masters. All
ranks do so in one order of the partitions, whatever the order in which gradients arrive on each: a partition waits for
those before it, and those that a rank's backward pass leaves incomplete are reduced after it. With full sharding what
is gathered at once is updated where its gradients are reduced, behind its backward pass, and all else at the end. What
ranks gather of the updated masters is gathered after the step, so backward reads the weights of before.

What is traded: weights change before the whole gradient is known. So the gradient can be neither clipped nor
accumulated over micro-batches, and a non-finite one has updated weights before it is detected: the run stops, and its
checkpoints date from before. A tied embedding's gradient is held from the head's backward to the embedding's.
"""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtrain.comm.ranks import all_gather, from_rank_0
from qtrain.models import repeated_blocks
from qtrain.optim import Optimizer, PartitionedOptimizer
from qtrain.parallel.sharding.data_parallel import DataParallel


def model_partitions(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trained parameters that are updated together, by the name of their module: those of each repeated block, and
    of the remaining modules each one's own."""
    blocks = {id(block) for block in repeated_blocks(model) or getattr(model, "layers", ())}
    names = {module: name for name, module in model.named_modules() if id(module) in blocks}
    partitions: dict[str, list[nn.Parameter]] = {}
    assigned: set[int] = set()
    for module, name in names.items():
        partitions[name] = [p for p in module.parameters() if p.requires_grad and id(p) not in assigned]
        assigned |= {id(p) for p in partitions[name]}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in assigned:
            partitions.setdefault(name.rpartition(".")[0], []).append(p)
    return {name: parameters for name, parameters in partitions.items() if parameters}


class OptimizerInBackward:
    """The hooks that update the partitions of `parallel`. `begin` comes before a step's backward pass, `finish` after
    it. optimizer: of the masters."""

    def __init__(self, optimizer: Optimizer, parallel: DataParallel):
        assert isinstance(optimizer, PartitionedOptimizer), "--optimizer_in_backward refuses the others"
        self.optimizer, self._parallel = optimizer, parallel
        self._names, self._members = list(parallel.partitions), list(parallel.partitions.values())
        optimizer.partition([[sharded.master for sharded in members] for members in self._members])
        place = {sharded.name: place for place, sharded in enumerate(parallel.parameters)}
        # As the backward pass completes them if modules run as they are defined; from the second step on, as it did.
        first = [min(place[sharded.name] for sharded in members) for members in self._members]
        self._order = sorted(range(len(first)), key=lambda index: -first[index])
        self._order_is_known = False
        self._missing: list[int] = []  # by partition: gradients that backward has not produced yet
        self._completed: list[int] = []  # partitions, in the order in which backward did
        self._squares: dict[int, Tensor] = {}  # by partition, in the order of the updates: of this rank's gradients
        # Full sharding reduces a unit's gradients behind its backward pass, and calls back there.
        if parallel.reshards:
            parallel.after_unit = self._after_unit
            return
        for index, members in enumerate(self._members):
            for sharded in members:
                sharded.parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, index))

    def begin(self) -> None:
        """The next backward pass is an optimizer step, at the learning rates that the optimizer's groups have now."""
        self._missing = [len(members) for members in self._members]
        self._completed, self._squares = [], {}
        self.optimizer.begin_step()

    def finish(self) -> Tensor:
        """Update the partitions in which some parameters got no gradient, and those behind them. Returns the sum of
        this rank's squared gradients, an fp64 scalar on the device."""
        for index in self._order:
            if index not in self._squares:
                self._update(index)
        # The order of the first backward pass, as rank 0 has seen it, holds on all ranks from now on.
        if not self._order_is_known:
            late = [index for index in self._order if index not in self._completed]
            self._order = from_rank_0(lambda: self._completed + late)
            self._order_is_known = True
        return torch.stack(list(self._squares.values())).sum()

    def first_nonfinite(self) -> str | None:
        """The first partition that was updated with a non-finite gradient, of any rank: all call it. Synchronizes with
        the device."""
        odd = [(i, square.sqrt().item()) for i, square in self._squares.items() if not bool(square.isfinite())]
        found = [pair for rank_entries in all_gather(odd) for pair in rank_entries]
        if not found:
            return None
        index, norm = min(found, key=lambda pair: [*self._squares].index(pair[0]))
        return f"the gradient of {self._names[index]} (norm {norm})"

    def _after_unit(self, unit: int) -> None:
        index = self._parallel.partition_of_unit[unit]
        if index is not None:
            self._update(index)

    def _on_gradient(self, index: int, _: Tensor) -> None:
        assert self._missing[index], f"a second gradient of {self._names[index]} in one step"
        self._missing[index] -= 1
        if not self._missing[index]:
            # Reductions are collectives, issued in one order on all ranks: a partition waits for those before it.
            self._completed.append(index)
            while (done := len(self._squares)) < len(self._order) and not self._missing[self._order[done]]:
                self._update(self._order[done])

    @torch.no_grad()
    def _update(self, index: int) -> None:
        members = self._members[index]
        # Sum over the ranks, norm, update: the gradients of this partition exist in between only.
        self._parallel.reduce_group(index)
        self._squares[index] = self._parallel.squares(members)
        self.optimizer.step_partition(index)
        # The kernels do not bump version counters. With them autograd refuses to read these weights later in this
        # backward pass, and their low-bit codes count as stale. A master of rows is not the model's own memory.
        changed = [s for s in members if s.master.grad is not None and not isinstance(s.master, DTensor)]
        torch.autograd.graph.increment_version([s.parameter for s in changed])
        for sharded in members:
            sharded.master.grad = None
