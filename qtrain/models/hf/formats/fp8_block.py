"""Fine-grained FP8 as DeepSeek-V3's checkpoints have it: `weight` in e4m3 and `weight_scale_inv`, a scale per block.

A scale multiplies, in spite of its name. transformers (`FineGrainedFP8Config`), vLLM and SGLang read it; activations
are quantized per token and 128 (32) elements. On a CPU transformers dequantizes to the model's dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtrain.models.hf.formats.format import EXPORT_FORMATS, SafetensorsFormat, blocks, stored_scale
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor


class FineGrained(SafetensorsFormat):
    """What both share."""

    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        return {"weight": codes.codes, "weight_scale_inv": stored_scale(codes.scale)}

    def quantization_config(self, left: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(blocks(self.weight)),
            "modules_to_not_convert": list(left),
        }


@EXPORT_FORMATS.register("fp8_block")
@dataclass(frozen=True)
class Fp8Block(FineGrained):
    """FP8 with a scale per 128x128 (DeepSeek-V3's); vLLM, SGLang, transformers"""

    weight = OperandFormat("e4m3", "128x128")
    # transformers derives a block's size from the number of scales, which a block at the edge would falsify.
    columns_multiple = rows_multiple = 128


@EXPORT_FORMATS.register("mxfp8")
@dataclass(frozen=True)
class MxFp8(FineGrained):
    """OCP MXFP8, a power-of-two scale of one byte (E8M0) per 32 elements; vLLM, SGLang, transformers"""

    weight = OperandFormat("e4m3", "1x32", torch.float8_e8m0fnu)
    columns_multiple = 32

    def quantization_config(self, left: Sequence[str]) -> dict[str, Any]:
        return {**super().quantization_config(left), "quant_method": "mxfp8", "scale_fmt": "ue8m0"}
