"""GaLore and Q-GaLore: AdamW in a low-rank subspace of each matrix's gradient.

GaLore (Zhao et al. 2024, arXiv:2403.03507): the gradient G [R, C], C the smaller side, is projected onto its leading
right singular vectors P [rank, C]; AdamW's moments are those of G·Pᵀ [R, rank], and its step U is projected back as
U·P. P is recomputed from every `update_proj_gap`-th gradient. Q-GaLore (Zhang et al. 2024, arXiv:2407.08296) stores P
in INT4 and the moments in INT8, and doubles a matrix's gap once its leading direction has stopped turning.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qtrain.core.checks import Range
from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.numerics.philox import normal
from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import state_format
from qtrain.kernels.quantize.operators import quantize
from qtrain.optim.matrix_optimizer import Matrix, MatrixOptimizer, MatrixOptimizerSpec, Rest
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import StateShapes, state_shapes, state_size, state_tensors

Method = Literal["randomized", "svd"]

OVERSAMPLING, POWER_ITERATIONS = 8, 2


def leading_subspace(matrix: Tensor, rank: int, method: Method, sketch: Tensor | None = None) -> Tensor:
    """matrix [..., R, C] -> orthonormal rows [..., min(rank, R, C), C], strongest first, in fp32 or wider.

    "svd" decomposes the whole matrix, which takes seconds per layer at a billion parameters. "randomized" needs matrix
    products only: two power iterations on `sketch` [..., C, at least rank] of random numbers (Halko, Martinsson, Tropp
    2011, arXiv:0909.4061, algorithm 4.4), then the singular vectors of the matrix restricted to that basis.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    rank = min(rank, *matrix.shape[-2:])
    if method == "svd":
        return _signed(torch.linalg.svd(matrix, full_matrices=False).Vh[..., :rank, :])
    assert sketch is not None
    basis = sketch.to(matrix.dtype)
    for _ in range(POWER_ITERATIONS):
        # Orthonormal after every product: powers of the singular values would else drown the small ones.
        basis = torch.linalg.qr(matrix.mT @ (matrix @ basis)).Q
    sketched = matrix @ basis  # [..., R, columns of the sketch]
    # Right singular vectors within the basis, by the small Gram matrix [sketch, sketch].
    order = torch.linalg.eigh(sketched.mT @ sketched).eigenvectors.flip(-1)  # eigenvalues ascend
    return _signed((basis @ order[..., :rank]).mT)


def _signed(rows: Tensor) -> Tensor:
    """Each row with the sign that makes its largest element positive: a decomposition does not determine the sign."""
    largest = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True))
    return (rows * largest.sign()).contiguous()


def sketch_columns(rank: int, rows: int, columns: int) -> int:
    """Columns of the sketch that `leading_subspace` needs for a matrix [rows, columns]."""
    return min(rank + OVERSAMPLING, rows, columns)


NO_COSINE = -1.0
_NEXT, _GAP = 0, 1
MOMENTS_SALT = 0x6D6F6D << 32
"""XORed into the seed, so that moments and weights draw different random bits."""


class GaLoreOptimizer(MatrixOptimizer):
    """Group options: rank, update_proj_gap, scale, betas, eps, state, projection, subspace, and for lazy refreshes
    cos_threshold (0: not lazy), queue_size, gamma_proj.

    States of the first projection fused in a parameter: `exp_avg_0`, `exp_avg_sq_0` [larger side, rank], `projection_0`
    [rank, smaller side]. In host memory, a row per fused projection: `refresh` [rows, 2], the step after which the
    subspace is refreshed, and the gap; `cosines` [rows, queue_size].
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        for group in self.hidden_groups:
            group["steps_done"] = 0
        self._steps: dict[torch.Size, Tensor] = {}
        self._updates: dict[tuple, tuple[FusedUpdate, list[Tensor]]] = {}

    def begin_step(self) -> None:
        super().begin_step()
        for group in self.hidden_groups:
            group["steps_done"] += 1  # a Python int: the host decides about refreshes

    def directions(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        wide = gradients.shape[1] < gradients.shape[2]  # the smaller side is projected
        oriented = gradients.mT if wide else gradients  # [B, larger side, smaller side]
        projections = self._projections(group, matrices, oriented)
        steps = self._adam(group, matrices, oriented @ projections.mT)  # [B, larger side, rank]
        found = steps.to(oriented.dtype) @ projections  # [B, larger side, smaller side]
        return found.mT if wide else found

    def _adam(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        """Projected gradients [B, larger side, rank] -> AdamW's steps, scaled, fp32; valid until the next call."""
        if gradients.shape not in self._steps:
            self._steps[gradients.shape] = torch.zeros(gradients.shape, device=gradients.device)
        steps = self._steps[gradients.shape]
        update = self._update(group, matrices, steps)
        update.steps.copy_(group["step"] - 1)  # the update increments it; AdamW's bias corrections are the group's
        beta1, beta2 = group["betas"]
        # AdamW on weights of zero, with lr = -scale, leaves its scaled steps in the weights.
        steps.zero_()
        update.set_hyper(0, {"lr": -group["scale"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]})
        update.step(list(gradients.contiguous().unbind(0)))
        return steps

    def drop_states(self) -> None:
        super().drop_states()
        self._updates.clear()

    def _update(self, group: dict[str, Any], matrices: list[Matrix], steps: Tensor) -> FusedUpdate:
        """AdamW over the moments of `matrices`, writing to `steps` [B, larger side, rank]."""
        shape = steps.shape[1:]
        states = []
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            format = state_format(group["state"], signed=signed).fitted(shape)
            refs = [(self.state[p], f"{name}_{index}") for p, index in matrices]
            states.append([(format, tensors) for tensors in state_tensors(refs, format, shape, steps.device)])
        tensors = [tensor for moment in states for _, stored in moment for tensor in stored.values()]
        key = tuple(map(self.matrix_index, matrices))
        update, known = self._updates.get(key, (None, []))
        if update is None or any(a is not b for a, b in zip(known, tensors, strict=True)):  # else: loaded since
            slots = [
                Slot(weight, states=moments, number=index)
                for weight, moments, index in zip(steps.unbind(0), zip(*states, strict=True), key, strict=True)
            ]
            update = FusedUpdate("adamw", slots, seed=self.seed ^ MOMENTS_SALT)
            self._updates[key] = (update, tensors)
        return update

    # ---- subspaces ---------------------------------------------------------------------------------------------------

    def _projections(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        """The projections [B, rank, smaller side] in the gradients' dtype, refreshed where that is due."""
        # The host reads these states in its own memory: no synchronization.
        due = [
            i
            for i, (p, index) in enumerate(matrices)
            if group["steps_done"] > self._refresh_state(group, p)[index, _NEXT].item()
        ]
        if due:
            some = len(due) < len(matrices)  # indexing copies the gradients: not where all are due
            self._refresh(group, [matrices[i] for i in due], gradients[due] if some else gradients)
        return self._read_projections(group, matrices, gradients)

    def _refresh_state(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        """When each subspace is refreshed, int64 [fused projections, 2] in host memory."""
        state = self.state[parameter]
        if "refresh" not in state:
            count = len(self.matrix_shapes(group, parameter))
            state["refresh"] = torch.tensor([[0, group["update_proj_gap"]]] * count)
            state["cosines"] = torch.full((count, group["queue_size"]), NO_COSINE)
        return state["refresh"]

    def _refresh(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> None:
        """Compute the subspaces of `matrices` from their gradients. The only device synchronization of a step."""
        (rows, columns), step = gradients.shape[1:], group["steps_done"]
        # A decomposition fails on non-finite values, which an update in the backward pass sees before the run stops.
        norms = torch.linalg.vector_norm(gradients, dim=(1, 2), keepdim=True, dtype=torch.float32)
        gradients = torch.where(norms.isfinite(), gradients, 0)
        width, sketch = sketch_columns(group["rank"], rows, columns), None
        if group["subspace"] == "randomized":
            keys = [[self.seed, step, self.matrix_index(matrix)] for matrix in matrices]
            drawn = normal(torch.tensor(keys, device=gradients.device), columns * width)
            sketch = drawn.view(len(matrices), columns, width)
        found = leading_subspace(gradients, group["rank"], group["subspace"], sketch)
        if group["cos_threshold"]:
            self._widen_gaps(group, matrices, found, gradients)
        for p, index in matrices:
            refresh = self._refresh_state(group, p)[index]
            refresh[_NEXT] = step - 1 + refresh[_GAP]  # the last step on this subspace
        self._write_projections(group, matrices, found.to(gradients.dtype))

    def _widen_gaps(self, group: dict[str, Any], matrices: list[Matrix], found: Tensor, gradients: Tensor) -> None:
        """Widen the gaps of matrices whose leading direction has hardly turned over their last refreshes."""
        if any(self._refresh_state(group, p)[index, _NEXT] == 0 for p, index in matrices):
            return  # the first refresh
        before = self._read_projections(group, matrices, gradients)[:, 0].float()
        # The absolute value: opposite vectors span the same direction.
        cosines = torch.nn.functional.cosine_similarity(before, found[:, 0]).abs().cpu()
        for (p, index), cosine in zip(matrices, cosines, strict=True):
            last = self.state[p]["cosines"][index]
            last.copy_(torch.cat([last[1:], cosine[None]]))
            if last.min() > NO_COSINE and last.mean() >= group["cos_threshold"]:  # once the queue is full
                gap = self._refresh_state(group, p)[index, _GAP : _GAP + 1]
                gap.copy_(gap.double() * group["gamma_proj"])

    def _read_projections(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        if group["projection"] == "weight":
            return torch.stack([self.state[p][f"projection_{index}"] for p, index in matrices])
        columns, rank = gradients.shape[2], min(group["rank"], *gradients.shape[1:])
        codes, scale = (
            torch.cat([self.state[p][f"projection_{index}.int4.{kind}"] for p, index in matrices])
            for kind in ("codes", "scale")
        )
        values = dequantize(codes, scale, "int4", "1x128", [len(matrices) * rank, columns], gradients.dtype)
        return values.view(len(matrices), rank, columns)

    def _write_projections(self, group: dict[str, Any], matrices: list[Matrix], values: Tensor) -> None:
        for (p, index), value in zip(matrices, values, strict=True):
            name = f"projection_{index}"
            if group["projection"] == "weight":
                self.state[p][name] = value.clone()
            else:
                codes, scale = quantize(value, "int4", "1x128")
                self.state[p] |= {f"{name}.int4.codes": codes, f"{name}.int4.scale": scale}

    # ---- states ------------------------------------------------------------------------------------------------------

    def states_of(self, group: dict[str, Any], parameter: Tensor) -> StateShapes:
        shapes = self.matrix_shapes(group, parameter)
        found: StateShapes = {
            "refresh": ((len(shapes), 2), torch.int64),
            "cosines": ((len(shapes), group["queue_size"]), torch.float32),
        }
        for index, shape in enumerate(shapes):
            small, large = sorted(shape)
            rank = min(group["rank"], small)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                found |= state_shapes(f"{name}_{index}", state_format(group["state"], signed=signed), (large, rank))
            if group["projection"] == "weight":
                found[f"projection_{index}"] = ((rank, small), parameter.dtype)
            else:
                found[f"projection_{index}.int4.codes"] = ((rank, -(-small // 2)), torch.uint8)
                found[f"projection_{index}.int4.scale"] = ((rank, -(-small // 128)), torch.float32)
        return found

    def state_device(self, key: str, parameter: Tensor, saved_on_host: bool = False) -> torch.device:
        return torch.device("cpu") if key in ("refresh", "cosines") else parameter.device


@OPTIMIZERS.register("galore_adamw")
@dataclass(frozen=True)
class GaLore(MatrixOptimizerSpec):
    """AdamW in a low-rank subspace of each hidden matrix's gradient"""

    rank: Annotated[int, Range(1)] = 128
    """dimensions of the subspace"""
    update_proj_gap: Annotated[int, Range(1)] = 200
    """steps between refreshes of the subspace"""
    scale: Annotated[float, Range(0)] = 0.25
    """multiplies the step in the subspace"""
    state: Literal["fp32", "bf16", "fp8", "int8", "int4"] = "fp32"
    """format of the moments"""
    projection: Literal["weight", "int4"] = "weight"
    """format of the subspace's basis; weight: the dtype of the weights"""
    subspace: Method = "randomized"
    """how the basis is computed: by a randomized or a full singular value decomposition"""
    cos_threshold: Annotated[float, Range(0, 1)] = 0.0
    """mean cosine between successive leading directions from which a matrix is refreshed less often; 0: never"""
    queue_size: Annotated[int, Range(1, 1000)] = 5
    """refreshes that this mean is taken over"""
    gamma_proj: Annotated[float, Range(1)] = 2.0
    """factor by which the gap between refreshes then grows"""

    method: ClassVar = GaLoreOptimizer

    def direction_bytes(self, weight_bytes: int) -> float:
        return weight_bytes + (4 if weight_bytes == 2 else 0)  # in a refresh: finite gradients, and fp32 copies

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
