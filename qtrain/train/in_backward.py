"""The optimizer within the backward pass: a block is updated as soon as its gradients are there, and they are freed.

Gradients of a whole model are as large as bf16 weights, and twice as large as INT8 ones. Here those of one part of the
model exist at a time: of one repeated block, of the embedding, of the head. It is LOMO's idea (Lv et al. 2023,
arXiv:2306.09782), by the hooks of PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward
pass", with a block and not a parameter as the unit, so that launches stay few. The result is the ordinary step's.

What is traded: weights change before the whole gradient is known. So it cannot be clipped nor added up over
micro-batches, and one that is not finite is in the weights when it is noticed: the run stops, and its checkpoints are
from before. A tied embedding's gradient waits, from the head's part on, for the embedding's at the very end.
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
    """UserError where --optimizer_in_backward is asked for and something that it cannot do is too."""
    if not settings.optimizer_in_backward:
        return
    flag, micro = "--optimizer_in_backward", geometry.micro_batch_size * geometry.gradient_accumulation
    if geometry.gradient_accumulation > 1:
        raise UserError(
            f"{flag}: gradients are gone before those of a further micro-batch could be added; give "
            f"--gradient_accumulation 1 --micro_batch_size {micro}, or a smaller --batch_size."
        )
    if settings.clip_grad_norm:
        raise UserError(
            f"{flag}: weights change before the norm of all gradients is known, so it cannot be clipped to "
            f"{settings.clip_grad_norm:g}; give --clip_grad_norm 0."
        )
    if reason := optimizer.refuses_partitions():
        raise UserError(f"{flag}: {reason}")


def model_parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """What is updated at once: the trained parameters of each repeated block, and of the rest those of each module."""
    blocks = {id(block) for block in repeated_blocks(model) or getattr(model, "layers", ())}
    names = {module: name for name, module in model.named_modules() if id(module) in blocks}
    parts: dict[str, list[nn.Parameter]] = {}
    taken: set[int] = set()
    for module, name in names.items():
        parts[name] = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in parts[name]}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in taken:
            parts.setdefault(name.rpartition(".")[0], []).append(p)
    return {name: part for name, part in parts.items() if part}


class OptimizerInBackward:
    """The hooks that update a model's parts, from `begin` before a step's one backward pass to `finish` after it."""

    def __init__(self, model: nn.Module, optimizer: PartitionedOptimizer):
        parts = model_parts(model)
        self.optimizer = optimizer
        self._names = list(parts)
        optimizer.partition(list(parts.values()))
        self._missing: list[int] = []  # by part: gradients that have not come yet
        self._norms: dict[int, Tensor] = {}  # by part, in the order of the updates: fp32 scalars on the device
        for number, part in enumerate(parts.values()):
            for p in part:
                p.register_post_accumulate_grad_hook(functools.partial(self._arrived, number))

    def begin(self) -> None:
        """The next backward pass is a step, at the rates that the optimizer's groups have now."""
        self._missing = [len(part) for part in self.optimizer.partitions]
        self._norms = {}
        self.optimizer.begin_step()

    def finish(self) -> Tensor:
        """Update parts of which some parameters got no gradient; the norm of all gradients, an fp32 scalar."""
        for number, missing in enumerate(self._missing):
            if missing:
                self._update(number)
        return torch.linalg.vector_norm(torch.stack(list(self._norms.values())))

    def first_bad(self) -> str | None:
        """The first part to be updated with a gradient that is not finite. Waits for the device."""
        for number, norm in self._norms.items():
            if not bool(norm.isfinite()):
                return f"the gradient of {self._names[number]} (norm {norm.item()})"
        return None

    def _arrived(self, number: int, _: Tensor) -> None:
        self._missing[number] -= 1
        if not self._missing[number]:
            self._update(number)

    @torch.no_grad()
    def _update(self, number: int) -> None:
        trained = [p for p in self.optimizer.partitions[number] if p.grad is not None]
        if not trained:
            return
        assert number not in self._norms, f"a second gradient of {self._names[number]} in one step"
        self._norms[number] = norm_of([p.grad for p in trained])
        self.optimizer.step_partition(number)
        # Kernels do not count as changes by themselves: autograd refuses to read these weights for this pass from here
        # on, and codes made of them are stale.
        torch.autograd.graph.increment_version(trained)
        for p in trained:
            p.grad = None
