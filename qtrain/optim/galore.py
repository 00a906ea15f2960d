"""GaLore and Q-GaLore: AdamW in a low-rank subspace of each matrix's gradient.

GaLore (Zhao et al. 2024, arXiv:2403.03507): the gradient G [R, C], C the smaller side, is projected onto its leading
right singular vectors P [rank, C]; moments live with G·Pᵀ [R, rank], and their step comes back as U·P. P is taken anew
from every `update_proj_gap`-th gradient. Q-GaLore (Zhang et al. 2024, arXiv:2407.08296) keeps P in INT4, the moments in
INT8, and doubles a matrix's gap once its leading direction has stopped turning.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qtrain.checks import Range
from qtrain.kernels.numerics.dequantize import dequantize
from qtrain.kernels.numerics.normal import normal
from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import state_format
from qtrain.kernels.quantize.operators import quantize
from qtrain.optim.batched_states import describe_state, make_states, state_size
from qtrain.optim.matrix_optimizer import MOST_PARTS, MatrixOptimizer, MatrixOptimizerSpec, Place, Rest
from qtrain.optim.optimizer import OPTIMIZERS
from qtrain.optim.resumable import Described
from qtrain.optim.subspace import Method, leading_subspace, sketch_columns

NO_COSINE = -1.0
_NEXT, _GAP = 0, 1
MOMENTS_SALT = 0x6D6F6D << 32
"""Turned into the seed, so that moments do not share their random bits with weights."""


class GaLoreOptimizer(MatrixOptimizer):
    """Group options: rank, update_proj_gap, scale, betas, eps, state, projection, subspace, and of lazy refreshes
    cos_threshold (0: not lazy), queue_size, gamma_proj.

    The states of a parameter's part 0: `exp_avg_0`, `exp_avg_sq_0` [larger side, rank], `projection_0` [rank, smaller
    side]. On the host, by part: `refresh` [parts, 2], the step after which its subspace is renewed, and its gap, and
    `cosines` [parts, queue_size].
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for group in self.hidden_groups:
            group["steps_done"] = 0
        self._steps: dict[torch.Size, Tensor] = {}
        self._updates: dict[tuple, tuple[FusedUpdate, list[Tensor]]] = {}

    def begin(self) -> None:
        super().begin()
        for group in self.hidden_groups:
            group["steps_done"] += 1  # known to the host, which decides about refreshes

    def directions(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        wide = gradients.shape[1] < gradients.shape[2]
        matrices = gradients.mT if wide else gradients  # [B, larger side, smaller side]
        projections = self._projections(group, places, matrices)
        steps = self._adam(group, places, matrices @ projections.mT)
        found = steps.to(matrices.dtype) @ projections
        return found.mT if wide else found

    def _adam(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        """Projected gradients [B, larger side, rank] -> AdamW's steps, scaled, fp32; valid until the next call."""
        if gradients.shape not in self._steps:
            self._steps[gradients.shape] = torch.zeros(gradients.shape, device=gradients.device)
        steps = self._steps[gradients.shape]
        update = self._update(group, places, steps)
        update.steps.copy_(group["step"] - 1)
        beta1, beta2 = group["betas"]
        # AdamW on weights of zero, at a rate of minus the scale, leaves its steps where the weights are.
        steps.zero_()
        update.set_hyper(0, {"lr": -group["scale"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]})
        update.step(list(gradients.contiguous().unbind(0)))
        return steps

    def _update(self, group: dict[str, Any], places: list[Place], steps: Tensor) -> FusedUpdate:
        """AdamW over the moments of `places`, writing to `steps` [B, larger side, rank]."""
        shape = steps.shape[1:]
        states = []
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            format = state_format(group["state"], signed=signed).fitted(shape)
            slots = [(self.state[p], f"{name}_{part}") for p, part in places]
            states.append([(format, parts) for parts in make_states(slots, format, shape, steps.device)])
        tensors = [tensor for column in states for _, parts in column for tensor in parts.values()]
        key = tuple((id(p), part) for p, part in places)
        update, known = self._updates.get(key, (None, []))
        if update is None or any(a is not b for a, b in zip(known, tensors, strict=True)):  # else loaded since
            numbers = [self.numbers[id(p)] * MOST_PARTS + part for p, part in places]
            members = [
                Slot(weight, states=pair, number=number)
                for weight, pair, number in zip(steps.unbind(0), zip(*states, strict=True), numbers, strict=True)
            ]
            update = FusedUpdate("adamw", members, seed=self.seed ^ MOMENTS_SALT)
            self._updates[key] = (update, tensors)
        return update

    # ---- subspaces ---------------------------------------------------------------------------------------------------

    def _projections(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        """[B, rank, smaller side] in the gradients' dtype, renewed where that is due."""
        due = [
            i for i, (p, part) in enumerate(places) if group["steps_done"] > self._refresh(group, p)[part, _NEXT].item()
        ]
        if due:
            self._renew(group, [places[i] for i in due], gradients[due] if len(due) < len(places) else gradients)
        return self._read_projections(group, places, gradients)

    def _refresh(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """When each part's subspace is renewed, on the host."""
        state = self.state[parameter]
        if "refresh" not in state:
            parts = len(self.part_shapes(group, parameter))
            state["refresh"] = torch.tensor([[0, group["update_proj_gap"]]] * parts)
            state["cosines"] = torch.full((parts, group["queue_size"]), NO_COSINE)
        return state["refresh"]

    def _renew(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> None:
        """Take the subspaces of `places` from their gradients: the one thing here that waits for the device."""
        (rows, columns), step = gradients.shape[1:], group["steps_done"]
        # A decomposition fails on values that are not finite; within a backward pass they come before the run's stop.
        norms = torch.linalg.vector_norm(gradients, dim=(1, 2), keepdim=True, dtype=torch.float32)
        gradients = torch.where(norms.isfinite(), gradients, 0)
        width, sketch = sketch_columns(group["rank"], rows, columns), None
        if group["subspace"] == "randomized":
            numbers = [self.numbers[id(p)] * MOST_PARTS + part for p, part in places]
            keys = torch.tensor([[self.seed, step, number] for number in numbers], device=gradients.device)
            sketch = normal(keys, columns * width).view(len(places), columns, width)
        found = leading_subspace(gradients, group["rank"], group["subspace"], sketch)
        if group["cos_threshold"]:
            self._stretch(group, places, found, gradients)
        for p, part in places:
            refresh = self._refresh(group, p)[part]
            refresh[_NEXT] = step - 1 + refresh[_GAP]
        self._write_projections(group, places, found.to(gradients.dtype))

    def _stretch(self, group: dict[str, Any], places: list[Place], found: Tensor, gradients: Tensor) -> None:
        """Widen the gaps of matrices whose leading direction has hardly turned over their last refreshes."""
        if any(self._refresh(group, p)[part, _NEXT] == 0 for p, part in places):
            return  # the first refresh
        before = self._read_projections(group, places, gradients)[:, 0].float()
        cosines = torch.nn.functional.cosine_similarity(before, found[:, 0]).abs().cpu()
        for (p, part), cosine in zip(places, cosines, strict=True):
            last = self.state[p]["cosines"][part]
            last.copy_(torch.cat([last[1:], cosine[None]]))
            if last.min() > NO_COSINE and last.mean() >= group["cos_threshold"]:
                gap = self._refresh(group, p)[part, _GAP : _GAP + 1]
                gap.copy_(gap.double() * group["gamma_proj"])

    def _read_projections(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        if group["projection"] == "weight":
            return torch.stack([self.state[p][f"projection_{part}"] for p, part in places])
        columns, rank = gradients.shape[2], min(group["rank"], *gradients.shape[1:])
        parts = [
            torch.cat([self.state[p][f"projection_{part}.int4.{name}"] for p, part in places])
            for name in ("codes", "scale")
        ]
        values = dequantize(*parts, "int4", "1x128", [len(places) * rank, columns], gradients.dtype)
        return values.view(len(places), rank, columns)

    def _write_projections(self, group: dict[str, Any], places: list[Place], values: Tensor) -> None:
        for (p, part), value in zip(places, values, strict=True):
            name = f"projection_{part}"
            if group["projection"] == "weight":
                self.state[p][name] = value.clone()
            else:
                codes, scale = quantize(value, "int4", "1x128")
                self.state[p] |= {f"{name}.int4.codes": codes, f"{name}.int4.scale": scale}

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def states_of(self, group: dict[str, Any], parameter: Tensor) -> Described:
        shapes = self.part_shapes(group, parameter)
        found: Described = {
            "refresh": ((len(shapes), 2), torch.int64),
            "cosines": ((len(shapes), group["queue_size"]), torch.float32),
        }
        for part, shape in enumerate(shapes):
            small, large = sorted(shape)
            rank = min(group["rank"], small)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                found |= describe_state(f"{name}_{part}", state_format(group["state"], signed=signed), (large, rank))
            if group["projection"] == "weight":
                found[f"projection_{part}"] = ((rank, small), parameter.dtype)
            else:
                found[f"projection_{part}.int4.codes"] = ((rank, -(-small // 2)), torch.uint8)
                found[f"projection_{part}.int4.scale"] = ((rank, -(-small // 128)), torch.float32)
        return found

    def home(self, key: str, parameter: Tensor) -> torch.device:
        return torch.device("cpu") if key in ("refresh", "cosines") else parameter.device


@OPTIMIZERS.register("galore_adamw")
@dataclass(frozen=True)
class GaLore(MatrixOptimizerSpec):
    """AdamW in a low-rank subspace of each hidden matrix's gradient"""

    rank: Annotated[int, Range(1)] = 128
    update_proj_gap: Annotated[int, Range(1)] = 200
    scale: Annotated[float, Range(0)] = 0.25
    state: Literal["fp32", "bf16", "fp8", "int8", "int4"] = "fp32"
    projection: Literal["weight", "int4"] = "weight"
    subspace: Method = "randomized"
    cos_threshold: Annotated[float, Range(0, 1)] = 0.0
    queue_size: Annotated[int, Range(1, 1000)] = 5
    gamma_proj: Annotated[float, Range(1)] = 2.0

    method: ClassVar = GaLoreOptimizer

    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        small, large = sorted((rows, columns))
        rank = min(self.rank, small)
        moments = [state_size(state_format(self.state, signed=signed), (large, rank)) for signed in (True, False)]
        in_int4 = rank * (-(-small // 2) + 4 * -(-small // 128))
        return sum(moments) + (in_int4 if self.projection == "int4" else rank * small * weight_bytes)


@OPTIMIZERS.register("q_galore_adamw")
@dataclass(frozen=True)
class QGaLore(GaLore):
    """GaLore with INT8 moments, INT4 projections and lazy refreshes; with --quantize int8_weight also INT8 weights"""

    rest: Rest = "adamw_8bit"
    state: Literal["fp32", "bf16", "fp8", "int8", "int4"] = "int8"
    projection: Literal["weight", "int4"] = "int4"
    cos_threshold: Annotated[float, Range(0, 1)] = 0.4
