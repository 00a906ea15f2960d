"""qtrain: train and fine-tune transformers with low-bit arithmetic.

    qtrain.quantize(model, "fp8_rowwise")                       any nn.Module's linears
    qtrain.optim.AdamW8bit(model.parameters(), lr=1e-3)         optimizers over low-bit states
    qtrain.save_quantized(model, "folder", "ct_fp8_row")        weights as they were multiplied
    qtrain.kernels                                              tensors in, tensors out

docs/python.md has all of it; the scripts do whole runs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qtrain import kernels as kernels
    from qtrain import optim as optim
    from qtrain.models.hf.save_module import save_quantized as save_quantized
    from qtrain.quant.any_model import Quantized as Quantized
    from qtrain.quant.any_model import quantize as quantize

SCRIPTS = ("llm_pretrain", "llm_finetune", "timm_finetune", "tokenize_data", "benchmark_mm")

__version__ = "0.2.0"

_WHERE = {
    "quantize": "qtrain.quant.any_model",
    "Quantized": "qtrain.quant.any_model",
    "save_quantized": "qtrain.models.hf.save_module",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the scripts prepare the process before torch is imported."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in ("optim", "kernels"):
        return importlib.import_module(f"qtrain.{name}")
    raise AttributeError(f"module 'qtrain' has no attribute {name!r}")
