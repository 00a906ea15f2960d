"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): averaging instead of a decaying learning rate.

Three sequences: z takes AdamW's steps, x is the running average of z, and gradients are taken at y = b1·x + (1-b1)·z,
which is what the model's weights hold in training. x is what is evaluated and exported. It is never stored, because
x = y + (1 - 1/b1)·(z - y): a checkpoint holds y, as the weights, and z.

`eval` writes x into the weights, and `train` restores the bits of y from a copy. There are no gradients during
evaluation, so the copy does not raise the peak.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from qtrain.core.checks import Range
from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.optim.elementwise import LowBitOptimizer
from qtrain.optim.low_bit_spec import state_bytes
from qtrain.optim.optimizer import Optimizer
from qtrain.optim.registry import OPTIMIZERS, OptimizerSpec, ParameterShape
from qtrain.optim.state_layout import BATCH_ELEMENTS, StateOptions, local
from qtrain.tensors.stored_weight import StoredWeight

PlainFormat = Literal["weight", "fp32", "bf16"]

_COUNTERS = ("k", "weight_sum", "lr_max")
_SALTS = {"z": 0x7A << 40, "exp_avg_sq": 0x76 << 40}
"""XORed into the seed, so that states and weights draw different random bits."""


@dataclass
class _Chunk:
    """Parameters of one partition and one group (its index) that are updated together, and the updates of y, z, v."""

    group: int
    parameters: list[Tensor]
    y: FusedUpdate
    z: FusedUpdate
    v: FusedUpdate


class ScheduleFreeOptimizer(LowBitOptimizer):
    """Group options: betas, eps, r, weight_lr_power; and, as fp64 scalars on the device, k, weight_sum, lr_max."""

    averages_weights = True
    RULE = "apply"  # for weights and states alike
    STATES = ("z", "exp_avg_sq")

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], options: StateOptions, *, seed: int = 0):
        super().__init__(groups, defaults, options, seed=seed)
        self._chunks: list[list[_Chunk]] | None = None  # by partition
        self._saved_y: list[Tensor] | None = None
        for group in self.param_groups:
            for name in _COUNTERS:
                group[name] = torch.zeros((), dtype=torch.float64, device=group["params"][0].device)

    @property
    def signed(self) -> dict[str, bool]:
        return {"z": True, "exp_avg_sq": False}

    # ---- stepping ----------------------------------------------------------------------------------------------------

    @property
    def skips_nan_scale(self) -> bool:
        return False

    def prepare_step(self) -> None:
        """Nothing: its updates are given what it computes from the gradients."""

    def begin_step(self) -> None:
        assert self._saved_y is None, "a step between eval() and train()"
        self._rates = [self._advance(group) for group in self.param_groups]

    @torch.no_grad()
    def step_partition(self, index: int) -> None:
        for chunk in self._built_chunks()[index]:
            self._step_chunk(self.param_groups[chunk.group], chunk, *self._rates[chunk.group])

    @staticmethod
    def _advance(group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Count a step; returns its learning rate and the weight of its z in the average x, fp64 on the device."""
        group["k"] += 1
        # AdamW's correction of the second moment goes into the rate; the first moment is y's interpolation.
        rate = group["lr"] * (1 - group["betas"][1] ** group["k"]).sqrt()
        torch.maximum(group["lr_max"], rate, out=group["lr_max"])
        weight = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight  # fp64: a sum over all steps, of which a share is taken
        return rate, torch.where(weight > 0, weight / group["weight_sum"], 0.0)  # an lr of 0 has no weight

    def _step_chunk(self, group: dict[str, Any], chunk: _Chunk, rate: Tensor, share: Tensor) -> None:
        trained = [i for i, p in enumerate(chunk.parameters) if p.grad is not None]
        if not trained:
            return
        (beta1, beta2), float_share = group["betas"], share.float()
        # fp32 copies, overwritten where a value is no longer needed: three at the peak, `step_bytes` counts them.
        g = [local(p.grad).to(torch.float32, copy=True) for p in chunk.parameters if p.grad is not None]
        if self.grad_scale is not None:
            torch._foreach_mul_(g, self.grad_scale.float())

        # By the rule "apply", w·(1 - lr·decay) - lr·value, with which bf16 states are rounded stochastically too.
        negated = torch._foreach_mul(g, g)
        torch._foreach_neg_(negated)
        _apply(chunk.v, trained, negated, lr=1 - beta2, weight_decay=1.0)  # v = b2 * v + (1 - b2) * g * g
        del negated
        roots = [_dense(chunk.v.slots[i].weight, torch.float32) for i in trained]  # the new v, as it is stored
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(g, roots)
        del roots
        y = [_dense(chunk.y.slots[i].weight, torch.float32) for i in trained]
        # Decay is taken at y, and moves z and y: g is now the step of both.
        torch._foreach_add_(g, y, alpha=group["weight_decay"])

        # y <- y - share·(y - z) - lr·(1 - b1·(1 - share))·step
        torch._foreach_sub_(y, [chunk.z.slots[i].weight.float() for i in trained])
        torch._foreach_mul_(y, float_share)
        torch._foreach_add_(y, torch._foreach_mul(g, (rate * (1 - beta1 * (1 - share))).float()))
        # z steps only now: y's update has read the z before this step.
        _apply(chunk.z, trained, g, lr=rate, weight_decay=0.0)
        # lr 1: `y` is the whole change of the weights by now.
        _apply(chunk.y, trained, y, lr=1.0, weight_decay=0.0)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval(self) -> None:
        """Write the average x into the weights."""
        if self._saved_y is not None or not self.state:
            return
        self._saved_y = []
        for chunks in self._built_chunks():
            for chunk in chunks:
                # x = y + (1 - 1 / b1)·(z - y), from y = b1·x + (1 - b1)·z
                weight = 1 - 1 / self.param_groups[chunk.group]["betas"][0]
                for y, z in zip(chunk.y.slots, chunk.z.slots, strict=True):
                    self._saved_y.append(y.weight.clone())
                    y.weight.copy_(_dense(y.weight, torch.float32).lerp(z.weight.float(), weight))

    @torch.no_grad()
    def train(self) -> None:
        """Restore the y that `eval` replaced, bit for bit."""
        if self._saved_y is None:
            return
        slots = (slot for chunks in self._built_chunks() for chunk in chunks for slot in chunk.y.slots)
        for slot, saved in zip(slots, self._saved_y, strict=True):
            slot.weight.copy_(saved)
        self._saved_y = None

    # ---- states ------------------------------------------------------------------------------------------------------

    def _built_chunks(self) -> list[list[_Chunk]]:
        if self._chunks is None:
            self._chunks = [self._make_chunks(set(members)) for members in self.partitions]
        return self._chunks

    def _make_chunks(self, partition: set[Tensor]) -> list[_Chunk]:
        chunks = []
        for index, group in enumerate(self.param_groups):
            members: list[list[Tensor]] = []
            size = 0
            for p in group["params"]:
                if p not in partition:
                    continue
                # Chunks bound the fp32 copies of `_step_chunk`, as `step_bytes` plans.
                if not members or size + p.numel() > BATCH_ELEMENTS:
                    members.append([])
                    size = 0
                members[-1].append(p)
                size += p.numel()
            chunks += [self._make_chunk(index, chunk) for chunk in members]
        return chunks

    def _make_chunk(self, group: int, parameters: list[Tensor]) -> _Chunk:
        slots = []
        for p in parameters:
            if "z" not in self.state[p]:
                self.state[p]["z"] = _dense(
                    p.detach(), self.options.formats_of(p, self.signed, self.full_shape(p))["z"].dtype
                )
            slots.append(self._slot(p, 0))
        y = FusedUpdate("apply", [replace(slot, states=()) for slot in slots], seed=self.seed, sr=self.options.sr)
        z, v = (
            FusedUpdate(
                "apply",
                [Slot(slot.states[i][1]["value"], step=slot.step, number=slot.number) for slot in slots],
                seed=self.seed ^ salt,
            )
            for i, salt in enumerate(_SALTS.values())
        )
        for p, slot in zip(parameters, y.slots, strict=True):
            self.state[p]["step"] = slot.step
        return _Chunk(group, parameters, y, z, v)

    def _forget_updates(self) -> None:
        self._chunks = None


def _apply(
    update: FusedUpdate, indices: list[int], values: Sequence[Tensor], *, lr: float | Tensor, weight_decay: float
):
    """w <- w * (1 - lr * weight_decay) - lr * value for the update's tensors `indices`, rounded to their formats."""
    given: list[Tensor | None] = [None] * len(update.slots)
    for i, value in zip(indices, values, strict=True):
        given[i] = value
    update.set_hyper(0, {"lr": lr, "weight_decay": weight_decay})
    update.step(given)


def _dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight's values as a new dense tensor."""
    return weight.dequantize(dtype) if isinstance(weight, StoredWeight) else weight.to(dtype, copy=True)


@OPTIMIZERS.register("adamw_schedule_free")
@dataclass(frozen=True)
class ScheduleFreeAdamW(OptimizerSpec):
    """AdamW that evaluates and exports an average of the weights instead of decaying lr; set decay 0 in the schedule"""

    betas: Annotated[tuple[float, float], Range(0.000001, 0.999999)] = (0.9, 0.999)
    """weight of the average where gradients are taken; decay rate of the second moment"""
    eps: Annotated[float, Range(0)] = 1e-8
    """added to the root of the second moment"""
    r: Annotated[float, Range(0)] = 0.0
    """power of the step count in a step's weight in the average"""
    weight_lr_power: Annotated[float, Range(0)] = 2.0
    """power of the largest lr so far in that weight"""
    z: PlainFormat = "fp32"
    """format of the sequence that takes the steps; weight: the dtype of the weights"""
    v: PlainFormat = "fp32"
    """format of the second moment"""
    sr: bool = True
    """round bf16 weights and states stochastically"""

    @property
    def state_options(self) -> StateOptions:
        return StateOptions({"z": self.z, "exp_avg_sq": self.v}, sr=self.sr)

    def state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        return state_bytes(self.state_options, shapes, weight_bytes)

    def step_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int, *, partitioned: bool) -> float:
        """Three fp32 copies of the parameters that are updated together (`ScheduleFreeOptimizer._step_chunk`)."""
        groups: dict[tuple, int] = {}
        for shape in shapes:
            group = shape.hidden, shape.parts, len(shape.shape)
            groups[group] = groups.get(group, 0) + shape.elements // (shape.count if partitioned else 1)
        largest = max(math.prod(shape.shape) for shape in shapes)
        return 12 * max(largest, *(min(size, BATCH_ELEMENTS) for size in groups.values()))

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> Optimizer:
        own = {"betas": self.betas, "eps": self.eps, "r": self.r, "weight_lr_power": self.weight_lr_power}
        return ScheduleFreeOptimizer(groups, {"lr": lr, "weight_decay": 0.0, **own}, self.state_options, seed=seed)
