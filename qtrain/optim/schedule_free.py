"""Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682): averaging in the place of a decaying learning rate.

Three sequences: z takes AdamW's steps, x is the running average of z, and gradients are taken at y = b1·x + (1-b1)·z,
which is what the model's weights are in training. x is what is judged and exported; it is never stored, for
x = y + (1 - 1/b1)·(z - y). A checkpoint holds y, as the weights, and z.

`eval` puts x into the weights and `train` puts back the very bits of y, kept meanwhile: there are no gradients then, so
the copy does not raise the peak.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from qtrain.checks import Range
from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.optim.base import LowBitOptimizer
from qtrain.optim.hidden_matrices import BATCH_ELEMENTS
from qtrain.optim.optimizer import OPTIMIZERS, OptimizerSpec
from qtrain.optim.state_layout import StateOptions, local
from qtrain.tensors.stored_weight import StoredWeight

PlainFormat = Literal["weight", "fp32", "bf16"]

_BOOKS = ("k", "weight_sum", "lr_max")
_SALTS = {"z": 0x7A << 40, "exp_avg_sq": 0x76 << 40}
"""Turned into the seed, so that states do not share their random bits with weights."""


@dataclass
class _Chunk:
    """Parameters of one part and one group (by its number) that are updated together. Slots are in their order."""

    group: int
    parameters: list[Tensor]
    y: FusedUpdate
    z: FusedUpdate
    v: FusedUpdate


class ScheduleFreeOptimizer(LowBitOptimizer):
    """Group options: betas, eps, r, weight_lr_power; and of its own books k, weight_sum, lr_max, on the device."""

    RULE = "apply"  # of weights and states alike
    STATES = ("z", "exp_avg_sq")

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], options: StateOptions, *, seed: int = 0):
        super().__init__(groups, defaults, options, seed=seed)
        self._chunks: list[list[_Chunk]] | None = None  # by part
        self._kept: list[Tensor] | None = None
        for group in self.param_groups:
            for name in _BOOKS:
                group[name] = torch.zeros((), dtype=torch.float64, device=group["params"][0].device)

    @property
    def signed(self) -> dict[str, bool]:
        return {"z": True, "exp_avg_sq": False}

    # ---- stepping ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        assert self._kept is None, "a step between eval() and train()"
        self._rates = [self._advance(group) for group in self.param_groups]

    @torch.no_grad()
    def step_part(self, number: int) -> None:
        for chunk in self._all_chunks()[number]:
            self._step_chunk(self.param_groups[chunk.group], chunk, *self._rates[chunk.group])

    @staticmethod
    def _advance(group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Count a step; this one's rate, and its z's share in the average x, fp64 on the device."""
        group["k"] += 1
        rate = group["lr"] * (1 - group["betas"][1] ** group["k"]).sqrt()
        torch.maximum(group["lr_max"], rate, out=group["lr_max"])
        weight = group["k"] ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight
        return rate, torch.where(weight > 0, weight / group["weight_sum"], 0.0)  # a rate of 0: no share

    def _step_chunk(self, group: dict[str, Any], chunk: _Chunk, rate: Tensor, share: Tensor) -> None:
        trained = [i for i, p in enumerate(chunk.parameters) if p.grad is not None]
        if not trained:
            return
        (beta1, beta2), float_share = group["betas"], share.float()
        g = [local(chunk.parameters[i].grad).float() for i in trained]
        if self.grad_scale is not None:
            g = torch._foreach_mul(g, self.grad_scale.float())

        squares = torch._foreach_mul(g, g)
        torch._foreach_neg_(squares)
        _apply(chunk.v, trained, squares, lr=1 - beta2, weight_decay=1.0)  # v = b2 * v + (1 - b2) * g * g
        roots = torch._foreach_sqrt([chunk.v.slots[i].weight.float() for i in trained])
        torch._foreach_add_(roots, group["eps"])
        y = [_plain(chunk.y.slots[i].weight, torch.float32) for i in trained]
        steps = torch._foreach_div(g, roots)
        torch._foreach_add_(steps, y, alpha=group["weight_decay"])

        # y moves towards z by its share, and, with the step that z takes, by what of it is not averaged away.
        move = torch._foreach_sub(y, [chunk.z.slots[i].weight.float() for i in trained])
        torch._foreach_mul_(move, float_share)
        torch._foreach_add_(move, torch._foreach_mul(steps, (rate * (1 - beta1 * (1 - share))).float()))
        _apply(chunk.z, trained, steps, lr=rate, weight_decay=0.0)
        _apply(chunk.y, trained, move, lr=1.0, weight_decay=0.0)

    # ---- judging -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average x into the weights."""
        if self._kept is not None or not self.state:
            return
        self._kept = []
        for chunks in self._all_chunks():
            for chunk in chunks:
                weight = 1 - 1 / self.param_groups[chunk.group]["betas"][0]
                for y, z in zip(chunk.y.slots, chunk.z.slots, strict=True):
                    self._kept.append(y.weight.clone())
                    y.weight.copy_(_plain(y.weight, torch.float32).lerp(z.weight.float(), weight))

    @torch.no_grad()
    def train(self) -> None:
        """Put back the y that `eval` has replaced, bit for bit."""
        if self._kept is None:
            return
        slots = (slot for chunks in self._all_chunks() for chunk in chunks for slot in chunk.y.slots)
        for slot, kept in zip(slots, self._kept, strict=True):
            slot.weight.copy_(kept)
        self._kept = None

    # ---- states ------------------------------------------------------------------------------------------------------

    def _all_chunks(self) -> list[list[_Chunk]]:
        if self._chunks is None:
            self._chunks = [self._make_chunks(set(part)) for part in self.parts]
        return self._chunks

    def _make_chunks(self, part: set[Tensor]) -> list[_Chunk]:
        chunks = []
        for number, group in enumerate(self.param_groups):
            members: list[list[Tensor]] = []
            size = BATCH_ELEMENTS
            for p in group["params"]:
                if p not in part:
                    continue
                if size + p.numel() > BATCH_ELEMENTS:
                    members.append([])
                    size = 0
                members[-1].append(p)
                size += p.numel()
            chunks += [self._make_chunk(number, chunk) for chunk in members]
        return chunks

    def _make_chunk(self, group: int, parameters: list[Tensor]) -> _Chunk:
        slots = []
        for p in parameters:
            if "z" not in self.state[p]:
                self.state[p]["z"] = _plain(p.detach(), self.options.formats_of(p, self.signed)["z"].dtype)
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

    def push_hyper(self) -> None:
        """Rates are brought to the device by every step."""

    def split(self, parts: Sequence[Sequence[Tensor]]) -> None:
        super().split(parts)
        self._chunks = None

    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        self._chunks = None
        return super().adopt_states(names)


def _apply(update: FusedUpdate, indices: list[int], values: list[Tensor], *, lr: float | Tensor, weight_decay: float):
    """w <- w * (1 - lr * weight_decay) - lr * value for those of the update's tensors, rounded as they are kept."""
    given: list[Tensor | None] = [None] * len(update.slots)
    for i, value in zip(indices, values, strict=True):
        given[i] = value
    update.set_hyper(0, {"lr": lr, "weight_decay": weight_decay})
    update.step(given)


def _plain(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight's values as a new tensor, not stored in low bits."""
    return weight.dequantize(dtype) if isinstance(weight, StoredWeight) else weight.to(dtype, copy=True)


@OPTIMIZERS.register("adamw_schedule_free")
@dataclass(frozen=True)
class ScheduleFreeAdamW(OptimizerSpec):
    """AdamW whose weights' average is judged and exported, in the place of a decay; use decay 0 in the schedule"""

    betas: Annotated[tuple[float, float], Range(0.000001, 0.999999)] = (0.9, 0.999)
    eps: Annotated[float, Range(0)] = 1e-8
    r: Annotated[float, Range(0)] = 0.0
    weight_lr_power: Annotated[float, Range(0)] = 2.0
    z: PlainFormat = "fp32"
    v: PlainFormat = "fp32"
    sr: bool = True

    @property
    def state_options(self) -> StateOptions:
        return StateOptions({"z": self.z, "exp_avg_sq": self.v}, sr=self.sr)

    def state_bytes(self, weight_bytes: int) -> float:
        return self.state_options.bytes_per_parameter(weight_bytes)

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> torch.optim.Optimizer:
        own = {"betas": self.betas, "eps": self.eps, "r": self.r, "weight_lr_power": self.weight_lr_power}
        return ScheduleFreeOptimizer(groups, {"lr": lr, "weight_decay": 0.0, **own}, self.state_options, seed=seed)
