"""APOLLO-Mini: the plain gradient, each matrix scaled by one number that a rank-1 AdamW works out.

Zhu et al. 2024, arXiv:2412.05270. The gradient G [R, C], C the smaller side, is seen through one random direction:
g = G·p [R], with moments of that size. What AdamW would make of g, |AdamW(g)| / |g|, scales G, whose norm may grow by
1% a step. Directions come from the counter-based generator, a new one every `update_proj_gap` steps, and are not kept.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from qtrain.checks import Range
from qtrain.kernels.numerics.normal import normal
from qtrain.kernels.optim.state_formats import state_format
from qtrain.optim.batched_states import describe_state, read_states, write_states
from qtrain.optim.matrix_optimizer import MOST_PARTS, MatrixOptimizer, MatrixOptimizerSpec, Place
from qtrain.optim.optimizer import OPTIMIZERS
from qtrain.optim.resumable import Described

GROWTH, TINY = 1.01, 1e-8
FP32 = state_format("fp32", signed=True)


class ApolloMiniOptimizer(MatrixOptimizer):
    """Group options: scale, update_proj_gap, betas, eps.

    The states of a parameter's part 0: `exp_avg_0`, `exp_avg_sq_0` [larger side], `norm_0` [1], all fp32.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._known_numbers: dict[tuple[int, ...], Tensor] = {}

    def directions(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        gradients = gradients.float()
        return gradients * self._factors(group, places, gradients)[:, None, None]

    def _factors(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        """gradients [B, R, C] -> what each matrix is multiplied with, fp32 [B]."""
        oriented = gradients if gradients.shape[1] >= gradients.shape[2] else gradients.mT
        # Not a bmm, which sums a batch of one in another order: results must not depend on what is worked on together.
        seen = torch.linalg.vecdot(oriented, self._random(group, places, oriented.shape[2])[:, None])  # [B, larger]
        (beta1, beta2), step = group["betas"], group["step"].double()
        first, second, norms = (
            [(self.state[p], f"{name}_{part}") for p, part in places] for name in ("exp_avg", "exp_avg_sq", "norm")
        )
        m = read_states(first, FP32, seen).lerp_(seen, 1 - beta1)
        v = read_states(second, FP32, seen).mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
        write_states(first, FP32, m)
        write_states(second, FP32, v)
        adam = torch.linalg.vector_norm(m / v.sqrt_().add_(group["eps"]), dim=1)
        factors = adam / (torch.linalg.vector_norm(seen, dim=1) + TINY)

        norm = factors * torch.linalg.vector_norm(gradients, dim=(1, 2))
        before = read_states(norms, FP32, norm[:, None])[:, 0]
        growth = (norm / (before + TINY)).clamp(min=GROWTH) / GROWTH
        growth = torch.where(before > 0, growth, 1.0)  # the first step has nothing to grow from
        write_states(norms, FP32, (norm / growth)[:, None])
        correction = (1 - beta2**step).sqrt() / (1 - beta1**step)
        return factors / growth * (math.sqrt(group["scale"]) * correction).float()

    def _place_numbers(self, places: list[Place]) -> Tensor:
        """int64 [B] on the device; brought there once, for that waits."""
        wanted = tuple(self.numbers[id(p)] * MOST_PARTS + part for p, part in places)
        if wanted not in self._known_numbers:
            self._known_numbers[wanted] = torch.tensor(wanted, device=places[0][0].device)
        return self._known_numbers[wanted]

    def states_of(self, group: dict[str, Any], parameter: Tensor) -> Described:
        found: Described = {}
        for part, shape in enumerate(self.part_shapes(group, parameter)):
            for name, size in (("exp_avg", max(shape)), ("exp_avg_sq", max(shape)), ("norm", 1)):
                found |= describe_state(f"{name}_{part}", FP32, (size,))
        return found

    def _random(self, group: dict[str, Any], places: list[Place], length: int) -> Tensor:
        """A random direction for each place, [B, length], the same for `update_proj_gap` steps."""
        numbers = self._place_numbers(places)
        period = (group["step"] - 1) // group["update_proj_gap"]
        seed = torch.full_like(numbers, self.seed)
        return normal(torch.stack([seed, period.expand_as(seed), numbers], dim=1), length)


@OPTIMIZERS.register("apollo_mini")
@dataclass(frozen=True)
class ApolloMini(MatrixOptimizerSpec):
    """gradients scaled matrix by matrix by a rank-1 AdamW; hardly any state beside the embeddings'"""

    scale: Annotated[float, Range(0)] = 128.0
    update_proj_gap: Annotated[int, Range(1)] = 200

    method: ClassVar = ApolloMiniOptimizer

    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        return 4 * (2 * max(rows, columns) + 1)
