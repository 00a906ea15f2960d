"""GGUF, the file of llama.cpp: rows of blocks, each with codes and one fp16 scale.

    gguf_q8_0    32 elements: the scale, then 32 int8 codes
    gguf_tq1_0   256 ternary elements: five to a byte, then the scale
    gguf_tq2_0   256 ternary elements: four to a byte, then the scale
    gguf_f16     no codes

The package gguf packs ternary codes and writes the file; `gguf_export.py` names tensors and settings.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from qtrain.kernels.numerics.formats import unpack
from qtrain.models.config.model import ModelConfig
from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

if TYPE_CHECKING:
    import numpy as np

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "bitnet": "bitnet",
}
"""model_type -> what llama.cpp calls it."""


class Gguf(ExportFormat):
    """What the formats share."""

    package = "gguf"
    loaded_by = "llama.cpp loads it; transformers with gguf_file='model.gguf'"
    scale_rounding = "scales rounded to fp16"
    type_name: ClassVar[str]
    """Of GGMLQuantizationType, and after MOSTLY_ of LlamaFileType."""

    def refuses_model(self, config: ModelConfig) -> str | None:
        if config.model_type not in ARCHITECTURES:
            return f"is written for {', '.join(ARCHITECTURES)}, not for {config.model_type}"
        if config.sub_norm and not config.tie_word_embeddings:
            return "is written for BitNet with a head that shares the embedding's matrix, as llama.cpp has it"
        if config.rope.kind != "default":
            return f"is written without scaling of rotary positions, and the model has {config.rope.kind}"
        return "is written without a sliding window, and the model has one" if config.sliding_window else None

    def encode(self, codes: QuantizedTensor, columns: int) -> "np.ndarray":
        """Codes of a matrix [N, K] -> its bytes, uint8 [N, bytes of a row]."""
        import gguf
        import numpy as np

        kind = gguf.GGMLQuantizationType[self.type_name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        numbers = unpack(codes.codes, codes.format.fmt, columns).cpu()
        scale = codes.scale.cpu().half().expand(len(numbers), columns // elements)[..., None].contiguous()
        scale_bytes = scale.view(torch.uint8).numpy()  # [N, K / elements, 2]
        if self.type_name == "Q8_0":
            blocks = numbers.view(torch.uint8).unflatten(1, (-1, elements)).numpy()
            return np.concatenate([scale_bytes, blocks], axis=2).reshape(len(numbers), -1)
        # The scale of codes -1, 0 and 1 is 1: the package packs them as they are, and the last two bytes are replaced.
        blocks = gguf.quants.quantize(numbers.float().numpy(), kind).reshape(len(numbers), -1, size)
        return np.concatenate([blocks[..., :-2], scale_bytes], axis=2).reshape(len(numbers), -1)


@EXPORT_FORMATS.register("gguf_f16")
@dataclass(frozen=True)
class GgufF16(Gguf):
    """dense fp16 matrices; llama.cpp, transformers"""

    type_name = "F16"
    scale_rounding = ""


@EXPORT_FORMATS.register("gguf_q8_0")
@dataclass(frozen=True)
class GgufQ8(Gguf):
    """INT8 with an fp16 scale per 32 elements; llama.cpp, transformers"""

    weight = OperandFormat("int8", "1x32")
    columns_multiple = 32
    type_name = "Q8_0"


class GgufTernary(Gguf):
    """Ternary weights."""

    weight = OperandFormat("ternary", "tensorwise")
    columns_multiple = 256


@EXPORT_FORMATS.register("gguf_tq1_0")
@dataclass(frozen=True)
class GgufTq1(GgufTernary):
    """ternary weights of --quantize bitnet in 1.69 bits; llama.cpp, transformers"""

    type_name = "TQ1_0"


@EXPORT_FORMATS.register("gguf_tq2_0")
@dataclass(frozen=True)
class GgufTq2(GgufTernary):
    """ternary weights of --quantize bitnet in 2.06 bits; llama.cpp, transformers"""

    type_name = "TQ2_0"
