"""Models: the native decoder, Hugging Face load and export, adapters, generation, vision models, cost of training."""

from qtrain.models.adapters.adapted_original import AdaptedOriginal
from qtrain.models.adapters.lora import Lora, add_lora, check_merge_format, merge_lora
from qtrain.models.adapters.peft_format import as_lora, load_adapter, save_adapter
from qtrain.models.build import build_model, empty_model
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.vision import VisionCost
from qtrain.models.execution import apply_recompute, compile_layers
from qtrain.models.generation.engine import Decoding, Generation, continuations
from qtrain.models.generation.same_bits import why_other_bits
from qtrain.models.generation.sampling import Sampling
from qtrain.models.generation.streaming import Piece, stream_texts
from qtrain.models.generation.text import TextStream
from qtrain.models.hf.exports import check_export_folder, check_exports, export_as, left_by_training, read_formats
from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat
from qtrain.models.hf.formats.table import keeping
from qtrain.models.hf.io import export_hf, generation_config
from qtrain.models.hf.quantized_export import ExportOptions, HeldCodes
from qtrain.models.hf.source import ModelSource, list_models, models_within, read_model_source
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.distillation import Distillation, DistillOptions, as_distill
from qtrain.models.native.loss import LossSums, linear_cross_entropy
from qtrain.models.native.recompute import KINDS as RECOMPUTE_KINDS
from qtrain.models.native.recompute import SETS as RECOMPUTE_SETS
from qtrain.models.native.residual_offload import ResidualOffload
from qtrain.models.vision import (
    build_vision_model,
    check_vision_model,
    compile_vision,
    constructor_kwargs,
    empty_vision_model,
    export_timm,
    image_config,
    recompute_blocks,
    repeated_blocks,
)
