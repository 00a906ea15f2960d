"""APOLLO-Mini: the plain gradient of each matrix, scaled by one factor from a rank-1 AdamW.

Zhu et al. 2024, arXiv:2412.05270. The gradient G [R, C], C the smaller side, is projected onto one random direction,
g = G·p [R], and the moments are those of g. The factor |AdamW(g)| / |g| scales G, whose norm may grow by 1% per step.
Directions come from the counter-based generator, a new one every `update_proj_gap` steps, and are not stored.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from qtrain.core.checks import Range
from qtrain.kernels.numerics.philox import normal
from qtrain.kernels.optim.state_formats import state_format
from qtrain.optim.matrix_optimizer import Matrix, MatrixOptimizer, MatrixOptimizerSpec
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import StateShapes, read_states, state_shapes, write_states

MAX_GROWTH, TINY = 1.01, 1e-8
FP32 = state_format("fp32", signed=True)


class ApolloMiniOptimizer(MatrixOptimizer):
    """Group options: scale, update_proj_gap, betas, eps.

    States of the first projection fused in a parameter: `exp_avg_0`, `exp_avg_sq_0` [larger side], `norm_0` [1], fp32.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._index_tensors: dict[tuple[int, ...], Tensor] = {}

    def directions(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        gradients = gradients.float()
        return gradients * self._factors(group, matrices, gradients)[:, None, None]

    def _factors(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        """gradients [B, R, C] -> the factor of each matrix, fp32 [B]."""
        oriented = gradients if gradients.shape[1] >= gradients.shape[2] else gradients.mT  # [B, larger, smaller side]
        # Not a bmm, whose order of summation depends on the batch size: results must not depend on the batching.
        direction = self._random(group, matrices, oriented.shape[2])
        projected = torch.linalg.vecdot(oriented, direction[:, None])  # [B, larger side]
        (beta1, beta2), step = group["betas"], group["step"].double()
        first, second, norms = (
            [(self.state[p], f"{name}_{index}") for p, index in matrices] for name in ("exp_avg", "exp_avg_sq", "norm")
        )
        # AdamW of the rank-1 projection, fp32 [B, larger side]; its bias correction is applied to the factor.
        m = read_states(first, FP32, projected).lerp_(projected, 1 - beta1)
        v = read_states(second, FP32, projected).mul_(beta2).addcmul_(projected, projected, value=1 - beta2)
        write_states(first, FP32, m)
        write_states(second, FP32, v)
        adam = torch.linalg.vector_norm(m / v.sqrt_().add_(group["eps"]), dim=1)
        factors = adam / (torch.linalg.vector_norm(projected, dim=1) + TINY)

        # The norm limiter: the scaled gradient's norm grows by at most 1% from step to step.
        norm = factors * torch.linalg.vector_norm(gradients, dim=(1, 2))
        before = read_states(norms, FP32, norm[:, None])[:, 0]
        excess = (norm / (before + TINY)).clamp(min=MAX_GROWTH) / MAX_GROWTH
        excess = torch.where(before > 0, excess, 1.0)  # the first step has no norm to compare with
        write_states(norms, FP32, (norm / excess)[:, None])
        correction = (1 - beta2**step).sqrt() / (1 - beta1**step)
        return factors / excess * (math.sqrt(group["scale"]) * correction).float()

    def _indices(self, matrices: list[Matrix]) -> Tensor:
        """The index of each matrix, int64 [B] on the device; copied there once, because the copy synchronizes."""
        indices = tuple(map(self.matrix_index, matrices))
        if indices not in self._index_tensors:
            self._index_tensors[indices] = torch.tensor(indices, device=matrices[0][0].device)
        return self._index_tensors[indices]

    def states_of(self, group: dict[str, Any], parameter: Tensor) -> StateShapes:
        found: StateShapes = {}
        for index, shape in enumerate(self.matrix_shapes(group, parameter)):
            for name, size in (("exp_avg", max(shape)), ("exp_avg_sq", max(shape)), ("norm", 1)):
                found |= state_shapes(f"{name}_{index}", FP32, (size,))
        return found

    def _random(self, group: dict[str, Any], matrices: list[Matrix], length: int) -> Tensor:
        """A random direction for each matrix, [B, length], the same for `update_proj_gap` steps."""
        indices = self._indices(matrices)
        period = (group["step"] - 1) // group["update_proj_gap"]
        seed = torch.full_like(indices, self.seed)
        return normal(torch.stack([seed, period.expand_as(seed), indices], dim=1), length)


@OPTIMIZERS.register("apollo_mini")
@dataclass(frozen=True)
class ApolloMini(MatrixOptimizerSpec):
    """gradients scaled per matrix by a rank-1 AdamW; almost no state beside the embeddings'"""

    scale: Annotated[float, Range(0)] = 128.0
    """its square root multiplies the update"""
    update_proj_gap: Annotated[int, Range(1)] = 200
    """steps between new random directions"""

    method: ClassVar = ApolloMiniOptimizer

    def direction_bytes(self, weight_bytes: int) -> float:
        return 8 if weight_bytes == 2 else 4  # fp32 copies of bf16 gradients, and the directions

    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        return 4 * (2 * max(rows, columns) + 1)
