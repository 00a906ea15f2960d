"""The words of fused updates: rules, a group's numbers, and one tensor with what is updated beside it."""

from dataclasses import dataclass

from torch import Tensor

from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.optim.state_formats import StateFormat

RULES = {"adamw": 0, "lion": 1, "sgd": 2, "sgd_nesterov": 3, "apply": 4}
SIGNED_STATES = {"adamw": (True, False), "lion": (True,), "sgd": (True,), "sgd_nesterov": (True,), "apply": ()}
"""Of every rule's states: whether they are signed."""
HYPER = ("lr", "weight_decay", "beta1", "beta2", "eps")
"""The numbers of a parameter group. sgd's momentum is beta1."""
UPDATE_ROLE = ROUNDED_TENSORS.index("update")

# One random word for two elements serves the weights and both states: odd multipliers permute the 32-bit words, so that
# both halves are uniform, and that their errors are nearly uncorrelated.
MIX_M, MIX_V = 0x9E3779B1, 0x85EBCA77


class LowBitWeight:
    """What an update asks of a weight that is stored as codes: a base class of the tensor subclass that is one.

    codes, scale: contiguous; format: "int8" (a scale per row) or "int4" (a scale per 128 along a row).
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


@dataclass
class Slot:
    """One tensor and what is updated with it.

    weight: fp32 or bf16, contiguous, or a LowBitWeight. states: (format, its tensors) in the rule's order. step: fp32
    scalar, the updates so far; replaced by a view of the shared counters. master: fp32 copy that is updated in the
    weight's place. number: names the tensor's random bits. first_element: of a shard, its place in the whole tensor.
    """

    weight: Tensor
    states: tuple[tuple[StateFormat, dict[str, Tensor]], ...] = ()
    step: Tensor | None = None
    number: int = 0
    group: int = 0
    master: Tensor | None = None
    first_element: int = 0


def is_stochastic(format: StateFormat, sr: bool) -> bool:
    """Whether a state is rounded stochastically. Signed 8-bit ones gain nothing: they move far enough a step."""
    return format.name == "int4" or (format.block > 0 and not format.signed) or (format.name == "bf16" and sr)
