"""torchao's weight-only formats, as transformers loads them (`TorchAoConfig`) from safetensors.

A weight's tensors are `_weight_qdata` and `_weight_scale` fp32 [N, 1], of INT8 `_weight_zero_point` too, all zeros. The
metadata of the file says of every weight which tensor subclass they make: the loader reads that, not config.json.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtrain.models.config.model import ModelConfig
from qtrain.models.hf.formats.format import EXPORT_FORMATS, SafetensorsFormat
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor


class TorchAo(SafetensorsFormat):
    """What the formats share."""

    subclass: ClassVar[str]
    """torchao's class of a weight."""
    options: ClassVar[dict[str, Any]]
    """Its other arguments."""
    names: ClassVar[tuple[str, ...]]
    """Its tensors."""
    quant_type: ClassVar[dict[str, Any]]
    """torchao's config by which it would quantize."""

    def refuses_model(self, config: ModelConfig) -> str | None:
        return "has no reader for a mixture of experts" if config.moe_layers else None

    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        scale = codes.scale.reshape(-1, 1)
        made = {"qdata": codes.codes, "scale": scale, "zero_point": torch.zeros_like(scale, dtype=torch.int8)}
        return {f"_weight_{name}": made[name] for name in self.names}

    def metadata(self, columns: Mapping[str, int | None], dtype: torch.dtype) -> dict[str, str]:
        named = {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}
        found = {"tensor_names": json.dumps([*columns])}
        for name, width in columns.items():
            data = {"block_size": [1, width], "act_quant_kwargs": None, "dtype": named, **self.options}
            in_codes = {"_type": self.subclass, "_data": data, "_tensor_data_names": self.names}
            found[name] = json.dumps({"_type": "Tensor"} if width is None else in_codes)
        return found

    def quantization_config(self, left: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "torchao",
            "quant_type": {"default": self.quant_type},
            "modules_to_not_convert": list(left),
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }


@EXPORT_FORMATS.register("torchao_int8")
@dataclass(frozen=True)
class TorchAoInt8(TorchAo):
    """INT8 weights with a scale per row; transformers with torchao 0.17 or newer"""

    weight = OperandFormat("int8", "rowwise")
    subclass = "Int8Tensor"
    options: ClassVar = {}
    names = ("qdata", "scale", "zero_point")
    quant_type: ClassVar = {
        "_type": "Int8WeightOnlyConfig",
        "_version": 2,
        "_data": {"granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}, "group_size": None},
    }


@EXPORT_FORMATS.register("torchao_fp8")
@dataclass(frozen=True)
class TorchAoFp8(TorchAo):
    """FP8 weights with a scale per row; transformers with torchao 0.15 or newer"""

    weight = OperandFormat("e4m3", "rowwise")
    subclass = "Float8Tensor"
    options: ClassVar = {"mm_config": None, "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"}}
    names = ("qdata", "scale")
    quant_type: ClassVar = {
        "_type": "Float8WeightOnlyConfig",
        "_version": 2,
        "_data": {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}},
    }
