"""The dense export: weights in the model's dtype, whatever the scheme of the training."""

from dataclasses import dataclass

from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat


@EXPORT_FORMATS.register("hf")
@dataclass(frozen=True)
class Dense(ExportFormat):
    """dense weights in the model's dtype, codes dequantized; transformers, vLLM, llama.cpp's converter"""
