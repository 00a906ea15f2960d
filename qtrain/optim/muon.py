"""Muon: orthogonalized momentum (Keller Jordan 2024, kellerjordan.github.io/posts/muon).

The orthogonalization is a Newton-Schulz iteration, matrix products only: x <- a·x + (b·xxᵀ + c·(xxᵀ)²)·x. The quintic's
coefficients trade exactness for a steep slope at zero: after five steps singular values are between 0.7 and 1.2.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from qtrain.core.checks import Range
from qtrain.kernels.optim.state_formats import state_format
from qtrain.optim.matrix_optimizer import Matrix, MatrixOptimizer, MatrixOptimizerSpec
from qtrain.optim.registry import OPTIMIZERS
from qtrain.optim.state_layout import StateShapes, read_states, state_shapes, state_size, write_states

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """x [B, R, C] -> [B, R, C], with singular values near one. Computed in x's dtype."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]  # the Gram matrix is that of the smaller side
    if tall:
        x = x.mT
    # The Frobenius norm bounds the largest singular value: all start in 0..1, where the iteration converges.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x * norm.clamp(min=eps).reciprocal().to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT  # [B, R, R]; then (b·G + c·G²)·x + a·x as two fused products
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


Adjust = Literal["none", "spectral", "match_rms"]


def adjustment(rows: int, columns: int, adjust: Adjust) -> float:
    """The factor of an orthogonal update [rows, columns].

    "spectral" makes the change of a layer's output independent of its shape (Jordan). "match_rms" gives the update
    AdamW's typical root mean square of 0.2, so that AdamW's lr and weight decay apply (Liu et al. 2025,
    arXiv:2502.16982).
    """
    if adjust == "spectral":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms" else 1.0


class MuonOptimizer(MatrixOptimizer):
    """Group options: momentum, nesterov, ns_steps, adjust, state. The first projection's state is `momentum_0`."""

    def directions(self, group: dict[str, Any], matrices: list[Matrix], gradients: Tensor) -> Tensor:
        refs = [(self.state[p], f"momentum_{index}") for p, index in matrices]
        format = state_format(group["state"], signed=True)
        gradients = gradients.float()
        # fp32 [B, R, C], whatever format the state is stored in; lerp: m + (1 - momentum)·(g - m).
        momentum = read_states(refs, format, gradients).lerp_(gradients, 1 - group["momentum"])
        write_states(refs, format, momentum)
        update = gradients.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        # bf16 products on tensor cores: singular values need to be near one only.
        orthogonal = newton_schulz(update.bfloat16() if update.is_cuda else update, group["ns_steps"])
        return orthogonal.float().mul_(adjustment(update.shape[1], update.shape[2], group["adjust"]))

    def states_of(self, group: dict[str, Any], parameter: Tensor) -> StateShapes:
        found: StateShapes = {}
        for index, shape in enumerate(self.matrix_shapes(group, parameter)):
            found |= state_shapes(f"momentum_{index}", state_format(group["state"], signed=True), shape)
        return found


@OPTIMIZERS.register("muon")
@dataclass(frozen=True)
class Muon(MatrixOptimizerSpec):
    """orthogonalized momentum for the matrices of hidden layers, AdamW for embeddings, head and vectors"""

    momentum: Annotated[float, Range(0, 0.999999)] = 0.95
    """decay rate of the momentum"""
    nesterov: bool = True
    """Nesterov's momentum"""
    ns_steps: Annotated[int, Range(1, 20)] = 5
    """Newton-Schulz iterations"""
    adjust: Adjust = "match_rms"
    """scale of the update: match_rms, AdamW's typical size, so that its lr applies; spectral, as in Jordan's Muon"""
    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """format of the momentum"""

    method: ClassVar = MuonOptimizer

    def takes_parts(self, hidden: bool) -> bool:
        return True

    def direction_bytes(self, weight_bytes: int) -> float:
        # fp32: copies of bf16 gradients, the momentum, the update; bf16: the update, two iterates of Newton-Schulz and,
        # for square matrices, as much for Gram matrices.
        return (4 if weight_bytes == 2 else 0) + 8 + 2 + 4 + 4

    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        return state_size(state_format(self.state, signed=True), (rows, columns))
