"""BitNet with one bit: binary weights times INT8 activations, trained through latent weights in high precision.

    w -> sign(w - mean w) in {-1, 1}, with the scale mean |w|, one per linear;  x -> INT8, one scale per token

The sign of 0 is 1. All else is that of BitNet b1.58 (`bitnet.py`), options and straight-through gradients included: no
gradient is masked. With `sub_norm` a native decoder gets the same two norms, and is exported as that architecture.
Codes are packed eight to a byte where processes gather them; GEMMs read them as int8.

Source: Wang et al. 2023, "BitNet: Scaling 1-bit Transformers for Large Language Models", arXiv:2310.11453; signs of
weights: Courbariaux et al. 2015, arXiv:1511.00363; their scale: Rastegari et al. 2016, arXiv:1603.05279.
"""

from dataclasses import dataclass

from qtrain.quant.scheme import SCHEMES
from qtrain.quant.schemes.bitnet import BitNet
from qtrain.tensors.quantized_tensor import OperandFormat


@SCHEMES.register("binary")
@dataclass(frozen=True)
class Binary(BitNet):
    """BitNet with one bit: signs of latent weights, INT8 activations; backward in bf16 or INT8"""

    packed_weight = OperandFormat("binary", "tensorwise")
