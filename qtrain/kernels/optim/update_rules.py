"""What a fused update is given: a rule, a group's hyperparameters, and tensors with what is updated with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.optim.state_formats import StateFormat

SIGNED_STATES = {"adamw": (True, False), "lion": (True,), "sgd": (True,), "sgd_nesterov": (True,), "apply": ()}
"""Rules, each with its states: whether they are signed."""
HYPER = ("lr", "weight_decay", "beta1", "beta2", "eps")
"""Hyperparameters of a parameter group. sgd's momentum is beta1."""
UPDATE_ROLE = ROUNDED_TENSORS.index("update")

# One random word per two elements serves the weight and both states: odd multipliers permute the 32-bit words, so that
# both halves are uniform, and the rounding errors of the three are nearly uncorrelated.
MIX_M, MIX_V = 0x9E3779B1, 0x85EBCA77


class LowBitWeight:
    """Interface of a weight that is stored as codes; the tensor subclass that holds one derives from it.

    codes, scale: contiguous. format: "int8" (a scale per row) or "int4" (a scale per 128 along a row).
    """

    codes: Tensor
    scale: Tensor
    format: str

    def dequantize(self) -> Tensor:
        """The values, fp32."""
        raise NotImplementedError

    def store_(self, value: Tensor, key: Tensor, role: int) -> object:
        """Requantize `value` in place with stochastic rounding (`philox.random_bits_ref`)."""
        raise NotImplementedError


class WeightAmax:
    """Of one weight. versions_of: the tensors whose version counters count its changes, itself first."""

    def __init__(self, versions_of: Sequence[Tensor], device: torch.device):
        self.bits = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1], the absmax as bits of fp32, NaN above Inf; of the weight as it is stored, in its own dtype."""
        self._versions_of = versions_of
        self._versions: list[int] | None = None

    def record(self) -> None:
        """State that the weight was updated and that `bits` are those of its new value."""
        torch.autograd.graph.increment_version(self._versions_of[0])  # kernels do not
        self._versions = self._present_versions()

    @property
    def known(self) -> bool:
        """Whether `bits` are those of the weight's present value."""
        return self._versions == self._present_versions()

    def _present_versions(self) -> list[int]:
        return [t._version for t in self._versions_of]  # counted by torch at every in-place change


@dataclass
class Slot:
    """One tensor and what is updated with it."""

    weight: Tensor
    """fp32 or bf16, contiguous, or a LowBitWeight."""
    states: tuple[tuple[StateFormat, dict[str, Tensor]], ...] = ()
    """(format, its tensors) in the rule's order."""
    step: Tensor | MaybeNone = None
    """fp32 scalar, the updates so far; replaced by a view of the shared counters."""
    number: int = 0
    """The tensor number of the random bits."""
    group: int = 0
    master: Tensor | None = None
    """fp32 copy that is updated in the weight's place."""
    first_element: int = 0
    """Of a shard, its offset in the whole tensor."""
    amax: WeightAmax | None = None
    """Receives the absmax of the new weight; of a bf16 tensor."""
    device: torch.device | None = None
    """Where the update runs, if the weight and its gradient are in host memory (`optim/offload.py`); None: they are
    there."""


def is_stochastic(format: StateFormat, sr: bool) -> bool:
    """Whether a state is rounded stochastically. Signed 8-bit ones gain nothing: they change enough per step."""
    # An unsigned state is a second moment: rounded to nearest it would freeze where it changes by less than a code.
    return format.name == "int4" or (format.block > 0 and not format.signed) or (format.name == "bf16" and sr)
