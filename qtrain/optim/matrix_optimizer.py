"""The frame of optimizers that treat matrices of hidden layers as matrices, and leave the rest to AdamW.

A method is a subclass with `directions`: gradients of many matrices in, as many directions out. Here is what they all
share: which parameters a method gets, in batches of one shape, so that launches do not grow with the number of layers;
and w <- w · (1 - lr · weight_decay) - lr · direction, rounded stochastically where a weight is bf16 or stored in low
bits.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtrain.checks import Range
from qtrain.errors import UserError
from qtrain.kernels.optim import fused_update
from qtrain.kernels.optim.fused_update import FusedUpdate
from qtrain.optim.base import LowBitOptimizer
from qtrain.optim.hidden_matrices import batches_by_shape, equal_parts
from qtrain.optim.optimizer import OPTIMIZERS, OptimizerSpec, ParameterShape
from qtrain.optim.partitioned_optimizer import PartitionedOptimizer
from qtrain.optim.resumable import Described

Groups = list[dict[str, Any]]

Rest = Literal["adamw", "adamw_bf16_sr", "adamw_8bit", "adamw_4bit"]

Place = tuple[nn.Parameter, int]
"""One matrix: a parameter, and the number of its part, where several projections are fused in one."""

MOST_PARTS = 16
"""Of one parameter: tells the random numbers of its parts apart."""


REST_SALT = 0x72657374 << 32
"""Turned into the seed for the other parameters, which are numbered from 0 again."""


@dataclass(frozen=True)
class MatrixOptimizerSpec(OptimizerSpec):
    """What the specs of such methods share. Fields that `_OWN` does not name are options of the parameter groups."""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.95)
    eps: Annotated[float, Range(0)] = 1e-8
    sr: bool = True
    rest: Rest = "adamw"
    rest_lr_scale: Annotated[float, Range(0)] = 1.0

    method: ClassVar[type["MatrixOptimizer"]]
    _OWN: ClassVar = ("sr", "rest", "rest_lr_scale")

    @abstractmethod
    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        """Bytes of state of one matrix of a hidden layer."""

    def _rest(self) -> OptimizerSpec:
        return OPTIMIZERS.make(self.rest, {"betas": self.betas, "eps": self.eps, "sr": self.sr}, "--optim_kwargs")

    def state_bytes(self, weight_bytes: int) -> float:
        return self._rest().state_bytes(weight_bytes)  # where shapes are not known

    def total_state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        others = [shape for shape in shapes if not shape.hidden]
        own = sum(
            shape.count * self.matrix_bytes(rows, shape.shape[1], weight_bytes)
            for shape in shapes
            if shape.hidden
            for rows in shape.parts or shape.shape[:1]
        )
        return own + self._rest().total_state_bytes(others, weight_bytes)

    def build(self, groups: Groups, lr: float, seed: int = 0) -> torch.optim.Optimizer:
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self._OWN}
        return self.method(
            groups,
            {"lr": lr, **options},
            lambda others: self._rest().build(others, lr, seed=seed ^ REST_SALT),
            seed=seed,
            sr=self.sr,
            rest_lr_scale=self.rest_lr_scale,
        )


@dataclass
class Batch:
    """Matrices of one shape that are worked on together. `apply` writes their weights."""

    parameters: list[nn.Parameter]
    apply: FusedUpdate


class MatrixOptimizer(PartitionedOptimizer):
    """A method on the groups marked `hidden`; `rest` builds the optimizer of the others, which steps with this one.

    rest_lr_scale: the others' learning rate as a multiple of --lr. sr: round bf16 weights stochastically, with bits
    keyed by (seed, step, number of the parameter); those stored in low bits always are.
    """

    def __init__(
        self,
        groups: Groups,
        defaults: dict[str, Any],
        rest: Callable[[Groups], LowBitOptimizer],
        *,
        seed: int,
        sr: bool,
        rest_lr_scale: float = 1.0,
    ):
        hidden = [group for group in groups if group.get("hidden")]
        others = [group for group in groups if not group.get("hidden")]
        if not hidden:
            raise UserError("--optim: the model has no trainable matrix in a hidden layer; use adamw.")
        super().__init__(hidden, defaults)
        self.hidden_groups = list(self.param_groups)
        parameters = [p for group in self.hidden_groups for p in group["params"]]
        if any(isinstance(p, DTensor) for p in parameters):
            raise UserError("--optim: this optimizer works on whole matrices, which are sharded here; use adamw_8bit.")
        device = parameters[0].device
        for group in self.hidden_groups:
            group["step"] = torch.zeros((), dtype=torch.int64, device=device)
        self.seed, self.sr, self._rest_lr_scale = seed, sr, rest_lr_scale
        self.numbers = {id(p): number for number, p in enumerate(parameters)}
        self._rest = rest(others) if others else None
        if self._rest is not None:  # one set of books: what is saved, restored and scheduled
            self.param_groups += self._rest.param_groups
            self._rest.state = self.state
        self._batches = self._all_batches()

    def split(self, parts: Sequence[Sequence[Tensor]]) -> None:
        super().split(parts)
        self._batches = self._all_batches()
        if self._rest is not None:
            others = set(self._rest.parameters())
            self._rest.split([[p for p in part if p in others] for part in parts])

    def _all_batches(self) -> list[list[tuple[dict[str, Any], Batch]]]:
        """By part: its batches, each with its group."""
        found = []
        for part in self.parts:
            members = set(part)
            found.append(
                [
                    (group, batch)
                    for group in self.hidden_groups
                    for batch in self._make_batches([p for p in group["params"] if p in members])
                ]
            )
        return found

    def _make_batches(self, parameters: list[nn.Parameter]) -> list[Batch]:
        batches = []
        for indices in batches_by_shape(parameters):
            members = [parameters[i] for i in indices]
            slots = [fused_update.Slot(p, number=self.numbers[id(p)]) for p in members]
            batches.append(Batch(members, FusedUpdate("apply", slots, seed=self.seed, sr=self.sr)))
        return batches

    @abstractmethod
    def directions(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        """gradients [B, R, C] of matrices of one shape -> fp32 or bf16 [B, R, C], what the learning rate multiplies."""

    def begin(self) -> None:
        for group in self.hidden_groups:
            group["step"] += 1

    @torch.no_grad()
    def step_part(self, number: int) -> None:
        for group, batch in self._batches[number]:
            self._step_batch(group, batch)
        if self._rest is not None:
            self._step_rest(number)

    def _step_batch(self, group: dict[str, Any], batch: Batch) -> None:
        trained = [p for p in batch.parameters if p.grad is not None]
        if not trained:
            return
        gradients = torch.stack([p.grad for p in trained])
        if self.grad_scale is not None:
            gradients *= self.grad_scale
        updates = iter(self._by_parts(group, trained, gradients).contiguous().unbind(0))
        batch.apply.steps.copy_(group["step"] - 1)  # after a resume, too
        batch.apply.set_hyper(0, {"lr": group["lr"], "weight_decay": group["weight_decay"]})
        batch.apply.step([None if p.grad is None else next(updates) for p in batch.parameters])

    def _by_parts(self, group: dict[str, Any], parameters: list[nn.Parameter], gradients: Tensor) -> Tensor:
        """`directions` of every part of every parameter: all parts of as many rows are one call's."""
        if not group["parts"]:
            return self.directions(group, [(p, 0) for p in parameters], gradients)
        found = torch.empty_like(gradients, dtype=torch.float32)
        for rows, parts in equal_parts(group["parts"]).items():
            pieces = torch.cat([gradients[:, first : first + rows] for _, first in parts])
            done = self.directions(group, [(p, number) for number, _ in parts for p in parameters], pieces)
            for (_, first), part in zip(parts, done.split(len(parameters)), strict=True):
                found[:, first : first + rows] = part
        return found

    def _step_rest(self, number: int) -> None:
        rates = [group["lr"] for group in self._rest.param_groups]
        for group, lr in zip(self._rest.param_groups, rates, strict=True):
            group["lr"] = lr * self._rest_lr_scale
        self._rest.grad_scale = self.grad_scale
        self._rest.step_part(number)
        for group, lr in zip(self._rest.param_groups, rates, strict=True):
            group["lr"] = lr

    # ---- states from elsewhere ---------------------------------------------------------------------------------------

    def part_shapes(self, group: dict[str, Any], parameter: Tensor) -> list[tuple[int, int]]:
        """Rows and columns of each of a parameter's parts."""
        return [(rows, parameter.shape[1]) for rows in group["parts"] or parameter.shape[:1]]

    @abstractmethod
    def states_of(self, group: dict[str, Any], parameter: Tensor) -> Described:
        """What a parameter of a hidden group keeps."""

    def check_saved(self, name: str, p: Tensor, described: Described) -> None:
        """States of hidden matrices must be in this optimizer's own form."""
        if id(p) not in self.numbers:
            self._rest.check_saved(name, p, described)
            return
        group = next(g for g in self.hidden_groups if any(p is q for q in g["params"]))
        expected = self.states_of(group, p)
        odd = sorted(key for key in described.keys() | expected.keys() if described.get(key) != expected.get(key))
        if odd:
            saved, here = (d.get(odd[0], "not there") for d in (described, expected))
            raise UserError(
                f"--resume: the optimizer state {odd[0]} of {name} is {saved} in the checkpoint and {here} in this "
                "optimizer; give --optim and --optim_kwargs as in the run that saved it."
            )

    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        for group in self.hidden_groups:
            for p in group["params"]:
                for key, value in self.state.get(p, {}).items():
                    if value.is_floating_point() and not bool(value.float().isfinite().all()):
                        raise UserError(f"--resume: the optimizer state {key} of {names[p]} holds NaN or Inf.")
        return [] if self._rest is None else self._rest.adopt_states(names)

    def synchronize(self) -> None:
        """As `LowBitOptimizer.synchronize`."""
        if self._rest is not None:
            self._rest.synchronize()
