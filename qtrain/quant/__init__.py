"""Schemes: what each of a linear's three GEMMs does. Importing this package registers every scheme."""

from qtrain.quant import bf16, int8  # noqa: F401  (each registers itself)
from qtrain.quant.convert import QuantizedModel, describe_choices, quantize_linears
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme

__all__ = [
    "SCHEMES",
    "LowBitLinear",
    "LowBitScheme",
    "QuantizedModel",
    "Scheme",
    "describe_choices",
    "quantize_linears",
]
