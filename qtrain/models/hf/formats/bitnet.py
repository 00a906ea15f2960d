"""BitNet's packed ternary weights, as transformers' BitLinear reads them (`BitNetQuantConfig`, offline).

`weight` is uint8 [N / 4, K]: byte (r, k) holds the codes + 1 of rows r, r + N/4, r + N/2 and r + 3N/4, the first in the
lowest two bits. `weight_scale` [1] divides: it is the inverse of the weight's scale. Activations are INT8 per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import unpack
from qtrain.models.config.model import ModelConfig
from qtrain.models.hf.formats.format import EXPORT_FORMATS, SafetensorsFormat
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor


@EXPORT_FORMATS.register("bitnet")
@dataclass(frozen=True)
class BitNet(SafetensorsFormat):
    """ternary weights in two bits, of --quantize bitnet; transformers (BitLinear)"""

    weight = OperandFormat("ternary", "tensorwise")
    rows_multiple = 4
    scale_rounding = "scales inverted"

    def refuses_model(self, config: ModelConfig) -> str | None:
        return "has no reader for a mixture of experts" if config.moe_layers else None

    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        fields = (unpack(codes.codes, "ternary", columns) + 1).view(torch.uint8).unflatten(0, (4, -1))  # [4, N / 4, K]
        packed = fields[0].clone()
        for i in range(1, 4):
            packed |= fields[i] << 2 * i
        return {"weight": packed, "weight_scale": codes.scale.reciprocal()}

    def quantization_config(self, left: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitnet",
            "linear_class": "bitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": list(left),
        }
