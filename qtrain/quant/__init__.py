"""Schemes: what each of a linear's three GEMMs does. Importing this package registers every scheme."""

from qtrain.quant import (  # noqa: F401  (each registers itself)
    bf16,
    bitnet,
    fp8_blockwise,
    fp8_rowwise,
    fp8_rowwise_gw_hp,
    fp8_tensorwise,
    int4,
    int4_weight,
    int8,
    int8_blockwise,
    int8_weight,
    mxfp8,
    switchback,
)
from qtrain.quant.auto import Auto, PerShape, choose_per_shape, linear_shapes
from qtrain.quant.convert import QuantizedModel, describe_choices, quantize_linears
from qtrain.quant.export import exported_tensors
from qtrain.quant.frozen import BASES, base_scheme
from qtrain.quant.gated import gated_mlp, takes_gated_mlp
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme

__all__ = [
    "BASES",
    "SCHEMES",
    "Auto",
    "LowBitLinear",
    "LowBitScheme",
    "PerShape",
    "QuantizedModel",
    "Scheme",
    "base_scheme",
    "choose_per_shape",
    "describe_choices",
    "exported_tensors",
    "gated_mlp",
    "linear_shapes",
    "quantize_linears",
    "takes_gated_mlp",
]
