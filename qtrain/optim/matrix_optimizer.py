"""Optimizers that treat the matrices of hidden layers as matrices and leave all other parameters to AdamW.

A method is a subclass with `directions`: gradients of many matrices in, as many update directions out. This file does
the rest. It batches matrices of one shape, so that the number of launches does not grow with the number of layers, and
applies w <- w · (1 - lr · weight_decay) - lr · direction, rounded stochastically where a weight is bf16 or stored in
low bits. A linear that fuses several projections (q, k and v) is updated projection by projection.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtrain.core.checks import Range
from qtrain.core.errors import UserError
from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.optim.elementwise import LowBitOptimizer
from qtrain.optim.low_bit_spec import LowBitSpec
from qtrain.optim.optimizer import PartitionedOptimizer, check_finite
from qtrain.optim.registry import OPTIMIZERS, OptimizerSpec, ParameterShape
from qtrain.optim.state_layout import BATCH_ELEMENTS, StateShapes, batches_by_shape
from qtrain.tensors.partition import Placement

Groups = list[dict[str, Any]]
BuildRest = Callable[[Groups], LowBitOptimizer]
"""Builds the optimizer of the groups that are no hidden matrices."""

Rest = Literal["adamw", "adamw_bf16_sr", "adamw_8bit", "adamw_4bit"]

Matrix = tuple[nn.Parameter, int]
"""One matrix: a parameter, and the index of the projection among those fused in it."""

MAX_PROJECTIONS = 16
"""Of one parameter: index of the parameter * this + index of the projection keys a matrix's random numbers."""

REST_SALT = 0x72657374 << 32
"""XORed into the seed of the other parameters, whose indices start from 0 again."""


@dataclass(frozen=True)
class MatrixOptimizerSpec(OptimizerSpec):
    """Options that every such method has. Those outside `_SPEC_ONLY` are options of the parameter groups."""

    betas: Annotated[tuple[float, float], Range(0, 0.999999)] = (0.9, 0.95)
    """decay rates of the moments, also in the optimizer of the other parameters"""
    eps: Annotated[float, Range(0)] = 1e-8
    """added to the root of the second moment, also in the optimizer of the other parameters"""
    sr: bool = True
    """round bf16 weights stochastically"""
    rest: Rest = "adamw"
    """optimizer of embeddings, output head, norms and biases"""
    rest_lr_scale: Annotated[float, Range(0)] = 1.0
    """learning rate of those parameters as a multiple of --lr"""

    method: ClassVar[type["MatrixOptimizer"]]
    _SPEC_ONLY: ClassVar = ("sr", "rest", "rest_lr_scale")

    def needs_whole(self, hidden: bool) -> bool:
        return hidden

    @abstractmethod
    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        """Bytes of state of one matrix of a hidden layer."""

    def _rest(self) -> LowBitSpec:
        spec = OPTIMIZERS.make(self.rest, {"betas": self.betas, "eps": self.eps, "sr": self.sr}, "--optim_kwargs")
        assert isinstance(spec, LowBitSpec), self.rest
        return spec

    def state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        others = [shape for shape in shapes if not shape.hidden]
        # A fused linear has a state per projection: each is a matrix of its own.
        own = sum(
            shape.count * self.matrix_bytes(rows, shape.shape[1], weight_bytes)
            for shape in shapes
            if shape.hidden
            for rows in shape.parts or shape.shape[:1]
        )
        return own + self._rest().state_bytes(others, weight_bytes)

    @abstractmethod
    def direction_bytes(self, weight_bytes: int) -> float:
        """Peak bytes per element of `directions`, with its result and without its arguments."""

    def step_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int, *, partitioned: bool) -> float:
        """As in `MatrixOptimizer._step_batch`: the stacked gradients and `directions`; for fused projections also their
        stacked gradients and the result in fp32."""
        largest = 0.0
        for shape in shapes:
            if shape.hidden:
                numel = math.prod(shape.shape)
                # As `batches_by_shape` cuts them; in backward each layer's matrices are alone.
                batch = 1 if partitioned else min(shape.count, max(1, BATCH_ELEMENTS // numel))
                fused = weight_bytes + 4 if shape.parts else 0
                size = numel * batch * (weight_bytes + fused + self.direction_bytes(weight_bytes))
                largest = max(largest, size)
        return largest

    def build(self, groups: Groups, lr: float, seed: int = 0) -> PartitionedOptimizer:
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self._SPEC_ONLY}
        rest: BuildRest = partial(self._rest().build, lr=lr, seed=seed ^ REST_SALT)
        defaults, scale = {"lr": lr, **options}, self.rest_lr_scale
        return self.method(groups, defaults, rest, seed=seed, sr=self.sr, rest_lr_scale=scale)


@dataclass
class MatrixBatch:
    """Parameters of one shape and one group that are updated together. `apply` writes their weights."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    apply: FusedUpdate


class MatrixOptimizer(PartitionedOptimizer):
    """A method on the groups marked `hidden`; `rest` builds the optimizer of the others, which steps with this one.

    rest_lr_scale: the others' learning rate as a multiple of --lr. sr: round bf16 weights stochastically, with bits
    keyed by (seed, step, index of the parameter); weights stored in low bits always are.
    """

    def __init__(
        self, groups: Groups, defaults: dict[str, Any], rest: BuildRest, *, seed: int, sr: bool, rest_lr_scale: float
    ):
        # torch's base class gets the hidden groups alone; the others' are appended once their optimizer has checked
        # them.
        hidden = [group for group in groups if group.get("hidden")]
        others = [group for group in groups if not group.get("hidden")]
        if not hidden:
            raise UserError("--optim: the model has no trainable matrix in a hidden layer; use adamw.")
        super().__init__(hidden, defaults)
        self.hidden_groups = list(self.param_groups)
        parameters = self.parameters()
        assert not any(isinstance(p, DTensor) for p in parameters), "matrices are whole: see OptimizerSpec.needs_whole"
        for group in self.hidden_groups:
            # On the device: incremented by a launch that a CUDA graph can capture.
            group["step"] = torch.zeros((), dtype=torch.int64, device=parameters[0].device)
        self.seed, self.sr, self._rest_lr_scale = seed, sr, rest_lr_scale
        # Over all groups: one number per parameter.
        self.index_of = {id(p): index for index, p in enumerate(parameters)}
        self._rest = rest(others) if others else None
        if self._rest is not None:  # shared groups and states: saved, restored and scheduled as one optimizer
            self.param_groups += self._rest.param_groups
            self._rest.state = self.state
        self._batches = self._make_batches()

    def partition(self, partitions: Sequence[Sequence[Tensor]]) -> None:
        super().partition(partitions)
        self._batches = self._make_batches()
        if self._rest is not None:
            others = set(self._rest.parameters())  # partitions have both kinds, each optimizer its own
            self._rest.partition([[p for p in members if p in others] for members in partitions])

    def _make_batches(self) -> list[list[MatrixBatch]]:
        """The batches of each partition."""
        return [
            [batch for group in self.hidden_groups for batch in self._group_batches(group, set(members))]
            for members in self.partitions
        ]

    def _group_batches(self, group: dict[str, Any], members: set[Tensor]) -> list[MatrixBatch]:
        parameters = [p for p in group["params"] if p in members]
        batches = []
        for indices in batches_by_shape(parameters):
            chosen = [parameters[i] for i in indices]
            slots = [Slot(p, number=self.index_of[id(p)], first_element=self.first_element(p)) for p in chosen]
            batches.append(MatrixBatch(group, chosen, FusedUpdate("apply", slots, seed=self.seed, sr=self.sr)))
        return batches

    @abstractmethod
    def directions(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        """gradients [B, R, C] of matrices of one shape -> update directions, fp32 or bf16 [B, R, C]: w -= lr · d."""

    def matrix_index(self, matrix: Matrix) -> int:
        """An index that no other matrix of the model has: it keys random numbers."""
        parameter, projection = matrix
        return self.index_of[id(parameter)] * MAX_PROJECTIONS + projection

    def begin_step(self) -> None:
        for group in self.hidden_groups:
            group["step"] += 1

    @torch.no_grad()
    def step_partition(self, index: int) -> None:
        for batch in self._batches[index]:
            self._step_batch(batch)
        if self._rest is not None:
            self._step_rest(self._rest, index)

    def _step_batch(self, batch: MatrixBatch) -> None:
        group, trained = batch.group, [p for p in batch.parameters if p.grad is not None]
        if not trained:
            return
        gradients = torch.stack([p.grad for p in trained if p.grad is not None])  # [B, R, C], weights' dtype
        if self.grad_scale is not None:
            gradients *= self.grad_scale
        # Contiguous: transposed directions would be copied one by one by the update.
        updates = iter(self._by_projections(group, trained, gradients).contiguous().unbind(0))
        batch.apply.steps.copy_(group["step"] - 1)  # also right after a resume
        # Launches only where a value has changed.
        batch.apply.set_hyper(0, {"lr": group["lr"], "weight_decay": group["weight_decay"]})
        batch.apply.step([None if p.grad is None else next(updates) for p in batch.parameters])

    def _by_projections(self, group: dict[str, Any], parameters: list[nn.Parameter], gradients: Tensor) -> Tensor:
        """`directions` of every projection of every parameter; projections with equally many rows share a call."""
        if not group["parts"]:
            return self.directions(group, [(p, 0) for p in parameters], gradients)
        found = torch.empty_like(gradients, dtype=torch.float32)  # [B, R, C]; every row belongs to one projection
        for rows, projections in equal_projections(self.projections_of(group, parameters[0])).items():
            # [projections * B, rows, C]
            stacked = torch.cat([gradients[:, start : start + rows] for _, start in projections])
            matrices = [(p, index) for index, _ in projections for p in parameters]
            updates = self.directions(group, matrices, stacked).split(len(parameters))
            for (_, start), update in zip(projections, updates, strict=True):
                found[:, start : start + rows] = update
        return found

    def _step_rest(self, rest: LowBitOptimizer, index: int) -> None:
        # The schedule sets --lr in all groups; the scale is applied for the step only, so a checkpoint holds --lr.
        rates = [group["lr"] for group in rest.param_groups]
        for group, lr in zip(rest.param_groups, rates, strict=True):
            group["lr"] = lr * self._rest_lr_scale
        rest.grad_scale = self.grad_scale
        rest.step_partition(index)
        for group, lr in zip(rest.param_groups, rates, strict=True):
            group["lr"] = lr

    def synchronize(self) -> None:
        if self._rest is not None:
            self._rest.synchronize()

    # ---- loading states ----------------------------------------------------------------------------------------------

    def drop_states(self) -> None:
        super().drop_states()
        if self._rest is not None:
            self._rest.drop_states()

    def projections_of(self, group: Mapping[str, Any], parameter: Tensor) -> Sequence[int]:
        """Rows of the projections fused in a parameter; of a rank's part those that it has, which are like the first
        ones of the whole."""
        return group["parts"][: len(group["parts"]) * parameter.shape[0] // self.full_shape(parameter)[0]]

    def place(self, placements: Mapping[Tensor, Placement]) -> None:
        super().place(placements)
        self._batches = self._make_batches()  # which key random bits by the elements' places
        if self._rest is not None:
            self._rest.place(placements)

    def matrix_shapes(self, group: dict[str, Any], parameter: Tensor) -> list[tuple[int, int]]:
        """Rows and columns of each projection of a parameter."""
        return [(rows, parameter.shape[1]) for rows in self.projections_of(group, parameter) or parameter.shape[:1]]

    @abstractmethod
    def states_of(self, group: dict[str, Any], parameter: Tensor) -> StateShapes:
        """The states of a parameter of a hidden group."""

    def check_saved(self, name: str, parameter: Tensor, saved: StateShapes) -> None:
        """The states of a hidden matrix must be in this optimizer's own formats."""
        if self._rest is not None and id(parameter) not in self.index_of:
            self._rest.check_saved(name, parameter, saved)
            return
        # States of a matrix are not converted: a projection or a factor has no meaning in another rank or format.
        group = next(g for g in self.hidden_groups if any(parameter is p for p in g["params"]))
        expected = self.states_of(group, parameter)
        odd = sorted(key for key in saved.keys() | expected.keys() if saved.get(key) != expected.get(key))
        if odd:
            there, here = (d.get(odd[0], "missing") for d in (saved, expected))
            raise UserError(
                f"--resume: the optimizer state {odd[0]} of {name} is {there} in the checkpoint and {here} in this "
                "optimizer; give --optim and --optim_kwargs as in the run that saved it."
            )

    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        for group in self.hidden_groups:
            for p in group["params"]:
                for key, value in self.state.get(p, {}).items():
                    if value.is_floating_point():
                        check_finite(key, value, names[p])
        return [] if self._rest is None else self._rest.adopt_states(names)


def equal_projections(rows_of: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Rows -> (index, first row) of every fused projection with that many rows, which can share a batch."""
    found: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for index, rows in enumerate(rows_of):
        found.setdefault(rows, []).append((index, start))
        start += rows
    return found
