"""The optimizer in the backward pass: a block is updated as soon as its gradients are complete, and they are freed.

The gradients of a whole model are as large as bf16 weights, and twice as large as INT8 ones. Here those of one
partition exist at a time: a repeated block, the embedding, or the head. The idea is LOMO's (Lv et al. 2023,
arXiv:2306.09782), with the hooks of PyTorch's tutorial "How to save memory by fusing the optimizer step into the
backward pass"; the unit is a block and not a parameter, so that launches stay few. The result is that of the ordinary
step, bit for bit.

What is traded: weights change before the whole gradient is known. So the gradient can be neither clipped nor
accumulated over micro-batches, and a non-finite one has updated weights before it is detected: the run stops, and its
checkpoints date from before. A tied embedding's gradient is held from the head's backward to the embedding's.
"""

import functools

import torch
from torch import Tensor, nn

from qtrain.errors import UserError
from qtrain.models import repeated_blocks
from qtrain.optim import OptimizerSpec, PartitionedOptimizer
from qtrain.train.gradients import norm_of
from qtrain.train.settings import BatchGeometry, TrainSettings


def check_in_backward(settings: TrainSettings, geometry: BatchGeometry, optimizer: OptimizerSpec) -> None:
    """UserError for settings that --optimizer_in_backward cannot be combined with."""
    if not settings.optimizer_in_backward:
        return
    if geometry.devices > 1 or settings.deterministic:
        other = "several processes" if geometry.devices > 1 else "--deterministic"
        raise UserError(
            f"--optimizer_in_backward: with {other} weights change only after all gradients are summed; leave it out."
        )
    flag, micro = "--optimizer_in_backward", geometry.micro_batch_size * geometry.gradient_accumulation
    if geometry.gradient_accumulation > 1:
        raise UserError(
            f"{flag}: a micro-batch's gradients are freed before the next one's could be added; give "
            f"--gradient_accumulation 1 --micro_batch_size {micro}, or a smaller --batch_size."
        )
    if settings.clip_grad_norm:
        raise UserError(
            f"{flag}: weights change before the norm of all gradients is known, so it cannot be clipped to "
            f"{settings.clip_grad_norm:g}; give --clip_grad_norm 0."
        )
    if reason := optimizer.refuses_partitions():
        raise UserError(f"{flag}: {reason}")


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
    """The hooks that update a model's partitions. `begin` comes before a step's backward pass, `finish` after it."""

    def __init__(self, model: nn.Module, optimizer: PartitionedOptimizer):
        partitions = model_partitions(model)
        self.optimizer = optimizer
        self._names = list(partitions)
        optimizer.partition(list(partitions.values()))
        self._missing: list[int] = []  # by partition: gradients that backward has not produced yet
        self._norms: dict[int, Tensor] = {}  # by partition, in the order of the updates: fp32 scalars on the device
        for index, parameters in enumerate(partitions.values()):
            for p in parameters:
                p.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, index))

    def begin(self) -> None:
        """The next backward pass is an optimizer step, at the learning rates that the optimizer's groups have now."""
        self._missing = [len(parameters) for parameters in self.optimizer.partitions]
        self._norms = {}
        self.optimizer.begin_step()

    def finish(self) -> Tensor:
        """Update the partitions in which some parameters got no gradient. Returns the norm of all gradients, an fp32
        scalar on the device."""
        for index, missing in enumerate(self._missing):
            if missing:
                self._update(index)
        return torch.linalg.vector_norm(torch.stack(list(self._norms.values())))

    def first_nonfinite(self) -> str | None:
        """The first partition that was updated with a non-finite gradient. Synchronizes with the device."""
        for index, norm in self._norms.items():
            if not bool(norm.isfinite()):
                return f"the gradient of {self._names[index]} (norm {norm.item()})"
        return None

    def _on_gradient(self, index: int, _: Tensor) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            self._update(index)

    @torch.no_grad()
    def _update(self, index: int) -> None:
        trained = [p for p in self.optimizer.partitions[index] if p.grad is not None]
        if not trained:
            return
        assert index not in self._norms, f"a second gradient of {self._names[index]} in one step"
        self._norms[index] = norm_of([p.grad for p in trained])
        self.optimizer.step_partition(index)
        # The kernels do not bump version counters. With them autograd refuses to read these weights later in this
        # backward pass, and their low-bit codes count as stale.
        torch.autograd.graph.increment_version(trained)
        for p in trained:
            p.grad = None
