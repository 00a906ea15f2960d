"""Low-bit linears: what a scheme declares, how it is executed, and the swap of a model's linears."""

from qtrain.quant.choices import LinearChoice, choose_linears, describe_choices
from qtrain.quant.export import exported_tensors
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.quantized_model import QuantizedModel
from qtrain.quant.reassign import reassign
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.swap import quantize_linears
from qtrain.quant.swiglu_mlp import KEEP_ALL, MLPMemory, supports_swiglu_mlp, swiglu_mlp
