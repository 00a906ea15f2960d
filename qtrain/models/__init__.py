"""Models: the native decoder, Hugging Face load and export, the cost of a shape."""

from qtrain.models.build import MODEL_IMPLS, build_model
from qtrain.models.config import ModelConfig
from qtrain.models.decoder import Decoder
from qtrain.models.execution import RECOMPUTE_MODES, apply_activation_checkpointing, compile_layers
from qtrain.models.generate import generate
from qtrain.models.hf import export_hf
from qtrain.models.loss import LossSums, linear_cross_entropy
from qtrain.models.source import ModelSource, list_models, read_model_source

__all__ = [
    "MODEL_IMPLS",
    "RECOMPUTE_MODES",
    "Decoder",
    "LossSums",
    "ModelConfig",
    "ModelSource",
    "apply_activation_checkpointing",
    "build_model",
    "compile_layers",
    "export_hf",
    "generate",
    "linear_cross_entropy",
    "list_models",
    "read_model_source",
]
