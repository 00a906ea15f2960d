"""Weights stored in INT4, a scale for each 128 along a row: half a byte an element and a little.

As `int8_weight`, but for products in INT8 neither layout is there as it is: both are quantized from the stored weight
once an optimizer step and kept, two bytes an element. Who is after memory leaves `activations` at none.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.int8_weight import StoredWeightScheme


@SCHEMES.register("int4_weight")
@dataclass(frozen=True)
class Int4Weight(StoredWeightScheme):
    """weights stored in INT4 in groups of 128, updated with stochastic rounding; activations none, int8 or int8_sr"""

    activations: Literal["none", "int8", "int8_sr"] = "none"

    stored_format = "int4"

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        if in_features % 2:
            return "INT4 codes are stored two a byte, which takes an even number of in-features"
        return super().refusal(in_features, out_features, device)

    def code_bytes(self) -> float:
        return 0 if self.activations == "none" else 2

    def _columns(self, codes: Tensor) -> int:
        return 2 * codes.shape[1]
