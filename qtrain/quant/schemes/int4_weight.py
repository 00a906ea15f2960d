"""Weights stored in INT4, one scale per 128 elements along a row: 0.53 bytes per element.

As `int8_weight`, except that for INT8 products both layouts are requantized from the stored weight once per optimizer
step and kept: two bytes per element. To save memory, leave `activations` at none.
"""

from dataclasses import dataclass
from typing import Literal

from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.int8_weight import StoredWeightScheme


@SCHEMES.register("int4_weight")
@dataclass(frozen=True)
class Int4Weight(StoredWeightScheme):
    """weights stored in INT4 in groups of 128, updated with stochastic rounding; activations none, int8 or int8_sr"""

    activations: Literal["none", "int8", "int8_sr"] = "none"

    stored_format = "int4"
