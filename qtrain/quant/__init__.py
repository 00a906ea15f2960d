"""Schemes: what each of a linear's three GEMMs does. Importing this package registers every scheme."""

from qtrain.quant.convert import LinearChoice, QuantizedModel, choose_linears, describe_choices, quantize_linears
from qtrain.quant.export import exported_tensors
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.schemes.auto import Auto, PerShape, choose_per_shape, linear_shapes
from qtrain.quant.schemes.frozen_base import BASES, base_scheme
from qtrain.quant.swiglu_mlp import supports_swiglu_mlp, swiglu_mlp
from qtrain.quant.token_gather import gathers_codes

__all__ = [
    "BASES",
    "SCHEMES",
    "Auto",
    "LinearChoice",
    "LowBitLinear",
    "LowBitScheme",
    "PerShape",
    "QuantizedModel",
    "Scheme",
    "base_scheme",
    "choose_linears",
    "choose_per_shape",
    "describe_choices",
    "exported_tensors",
    "gathers_codes",
    "linear_shapes",
    "quantize_linears",
    "supports_swiglu_mlp",
    "swiglu_mlp",
]
