"""Muon: momentum, orthogonalized (Keller Jordan 2024, kellerjordan.github.io/posts/muon)."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from qtrain.checks import Range
from qtrain.kernels.optim.state_formats import state_format
from qtrain.optim.batched_states import describe_state, read_states, state_size, write_states
from qtrain.optim.matrix_optimizer import MatrixOptimizer, MatrixOptimizerSpec, Place
from qtrain.optim.newton_schulz import newton_schulz
from qtrain.optim.optimizer import OPTIMIZERS
from qtrain.optim.resumable import Described

Adjust = Literal["none", "spectral", "match_rms"]


def adjustment(rows: int, columns: int, adjust: Adjust) -> float:
    """What an orthogonal update [rows, columns] is multiplied with.

    "spectral" keeps the change of a layer's output alike for all shapes (Jordan). "match_rms" gives it AdamW's usual
    root mean square of 0.2, so that AdamW's rate and decay serve (Liu et al. 2025, arXiv:2502.16982).
    """
    if adjust == "spectral":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms" else 1.0


class MuonOptimizer(MatrixOptimizer):
    """Group options: momentum, nesterov, ns_steps, adjust, state. The state of a parameter's part 0: `momentum_0`."""

    def directions(self, group: dict[str, Any], places: list[Place], gradients: Tensor) -> Tensor:
        slots = [(self.state[p], f"momentum_{part}") for p, part in places]
        format = state_format(group["state"], signed=True)
        gradients = gradients.float()
        momentum = read_states(slots, format, gradients).lerp_(gradients, 1 - group["momentum"])
        write_states(slots, format, momentum)
        update = gradients.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        orthogonal = newton_schulz(update.bfloat16() if update.is_cuda else update, group["ns_steps"])
        return orthogonal.float().mul_(adjustment(*update.shape[1:], group["adjust"]))

    def states_of(self, group: dict[str, Any], parameter: Tensor) -> Described:
        found: Described = {}
        for part, shape in enumerate(self.part_shapes(group, parameter)):
            found |= describe_state(f"momentum_{part}", state_format(group["state"], signed=True), shape)
        return found


@OPTIMIZERS.register("muon")
@dataclass(frozen=True)
class Muon(MatrixOptimizerSpec):
    """orthogonalized momentum for the matrices of hidden layers, AdamW for embeddings, head and vectors"""

    momentum: Annotated[float, Range(0, 0.999999)] = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Range(1, 20)] = 5
    adjust: Adjust = "match_rms"
    state: Literal["fp32", "bf16", "int8"] = "fp32"

    method: ClassVar = MuonOptimizer

    def matrix_bytes(self, rows: int, columns: int, weight_bytes: int) -> float:
        return state_size(state_format(self.state, signed=True), (rows, columns))
