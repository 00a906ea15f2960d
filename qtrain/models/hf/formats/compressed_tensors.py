"""The formats of the package compressed-tensors, which vLLM and transformers read (`CompressedTensorsConfig`).

    ct_fp8_row, ct_fp8_block, ct_int8   weight e4m3 or int8, weight_scale fp32 [N, 1] or one per 128x128
    ct_int4_g32, ct_int4_g128           weight_packed int32, eight codes + 8 each, the first in the lowest bits;
                                        weight_scale [N, K / group], weight_shape int64 [2]
    ct_nvfp4                            weight_packed uint8, two codes each; weight_scale e4m3 [N, K / 16];
                                        weight_global_scale fp32 [1], a divisor: value = code * scale / global_scale
    ct_mxfp8                            weight e4m3; weight_scale uint8 [N, K / 32], the exponent + 127

Activations are quantized by the reader: of the first line per token (ct_fp8_block: and 128 elements), of ct_mxfp8 per
32 elements; INT4 and NVFP4 multiply activations in high precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtrain.models.hf.formats.format import EXPORT_FORMATS, SafetensorsFormat, blocks, stored_scale
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

_PER_TOKEN = {"strategy": "token", "dynamic": True}


class CompressedTensors(SafetensorsFormat):
    """What the formats share: `quantization_config`."""

    layout: ClassVar[str]
    """The package's name of the tensors' layout."""
    weights: ClassVar[dict[str, Any]]
    """QuantizationArgs of the weights."""
    activations: ClassVar[dict[str, Any] | None] = None
    """Those of activations, as far as they differ from the weights'; None: they stay in high precision."""

    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        scale = codes.scale if codes.scale.ndim == 2 else codes.scale[:, None]
        return {"weight": codes.codes, "weight_scale": stored_scale(scale)}

    def quantization_config(self, left: Sequence[str]) -> dict[str, Any]:
        weights = {"symmetric": True, "dynamic": False, **self.weights}
        activations = None
        if self.activations is not None:
            shared = {key: weights[key] for key in ("symmetric", "num_bits", "type", "scale_dtype") if key in weights}
            activations = {**shared, **self.activations}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left),
        }


@EXPORT_FORMATS.register("ct_fp8_row")
@dataclass(frozen=True)
class CtFp8Row(CompressedTensors):
    """FP8 with a scale per row, activations per token; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("e4m3", "rowwise")
    layout = "float-quantized"
    weights: ClassVar = {"num_bits": 8, "type": "float", "strategy": "channel"}
    activations: ClassVar = _PER_TOKEN


@EXPORT_FORMATS.register("ct_fp8_block")
@dataclass(frozen=True)
class CtFp8Block(CompressedTensors):
    """FP8 with a scale per 128x128, activations per token and 128; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("e4m3", "128x128")
    columns_multiple = rows_multiple = 128
    layout = "float-quantized"
    weights: ClassVar = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    activations: ClassVar = {"strategy": "group", "group_size": 128, "dynamic": True}


@EXPORT_FORMATS.register("ct_int8")
@dataclass(frozen=True)
class CtInt8(CompressedTensors):
    """INT8 (W8A8) with a scale per row, activations per token; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("int8", "rowwise")
    layout = "int-quantized"
    weights: ClassVar = {"num_bits": 8, "type": "int", "strategy": "channel"}
    activations: ClassVar = _PER_TOKEN


class CtInt4(CompressedTensors):
    """Packed INT4 weights."""

    layout = "pack-quantized"

    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        # Eight in an int32, the first in its lowest bits as in ours; code + 8 instead of two's complement.
        packed = (codes.codes ^ 0x88).view(torch.int32)
        shape = torch.tensor([len(packed), columns], device="meta" if codes.codes.is_meta else "cpu")
        return {"weight_packed": packed, "weight_scale": codes.scale, "weight_shape": shape}


@EXPORT_FORMATS.register("ct_int4_g128")
@dataclass(frozen=True)
class CtInt4G128(CtInt4):
    """INT4 weights (W4A16) with a scale per 128 elements; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("int4", "1x128")
    columns_multiple = 128
    weights: ClassVar = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@EXPORT_FORMATS.register("ct_int4_g32")
@dataclass(frozen=True)
class CtInt4G32(CtInt4):
    """INT4 weights (W4A16) with a scale per 32 elements; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("int4", "1x32")
    columns_multiple = 32
    weights: ClassVar = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@EXPORT_FORMATS.register("ct_nvfp4")
@dataclass(frozen=True)
class CtNvFp4(CompressedTensors):
    """NVFP4 weights (W4A16), an e4m3 scale per 16 and one per tensor; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("e2m1", "1x16", torch.float8_e4m3fn)
    columns_multiple = 16
    scale_rounding = "the tensor's scale is stored inverted"
    layout = "nvfp4-pack-quantized"
    weights: ClassVar = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": blocks(weight)[1],
        "scale_dtype": "torch.float8_e4m3fn",
    }

    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        return {
            "weight_packed": codes.codes,
            "weight_scale": codes.scale,
            "weight_global_scale": codes.tensor_scale.reciprocal(),
        }


@EXPORT_FORMATS.register("ct_mxfp8")
@dataclass(frozen=True)
class CtMxFp8(CompressedTensors):
    """OCP MXFP8, weights and activations, a power-of-two scale per 32; compressed-tensors (vLLM, transformers)"""

    weight = OperandFormat("e4m3", "1x32", torch.float8_e8m0fnu)
    columns_multiple = 32
    layout = "mxfp8-quantized"
    weights: ClassVar = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    }
    activations: ClassVar = {"strategy": "group", "group_size": 32, "dynamic": True}
