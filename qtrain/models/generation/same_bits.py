"""Which models generate with the bits of the training's forward pass (`generate --deterministic`).

A token's logits are the same bits in a batch of whole sequences and alone where every operation computes a row without
regard to the others: codes with a scale of their own row, integer sums, FP8 sums by one kernel in one order, attention
by rows (`native/row_attention.py`). It is refused where a scale or a library looks at the batch.
"""

from torch import Tensor, nn

from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.models.native.attention import Attention
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.mlp import MLP
from qtrain.quant.linear import LowBitLinear


def why_other_bits(model: nn.Module, places: int = 0) -> str | None:
    """Why the logits of this model depend on the batch; None: they do not. places: the longest text."""
    if not isinstance(model, Decoder):
        return "it runs in transformers, whose operations choose their kernels by the number of rows"
    if any(type(layer.attn) is not Attention for layer in model.layers):
        return "its latent attention has products in high precision, whose kernels are chosen by the number of rows"
    if any(type(layer.mlp) is not MLP for layer in model.layers):
        return "its experts get other numbers of rows in every batch, and its routers are in high precision"
    if (window := model.config.sliding_window) is not None and places > window:
        return f"texts are longer than its sliding window of {window}, for which there is no attention by rows"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            head = "; train and generate with --quantize_lm_head" if name == "lm_head" else ""
            return f"{name} is in high precision, for which cuBLAS chooses a kernel by the number of rows{head}"
        if isinstance(module, LowBitLinear) and (reason := _why_not(module)):
            return f"{name}: {reason}"
    return None


def _why_not(linear: LowBitLinear) -> str | None:
    x, w = linear.scheme.formats_of("x")[0], linear.weight_codes.operands().rows
    if x is None or isinstance(w, Tensor):
        return "its activations are in high precision, for which cuBLAS chooses a kernel by the number of rows"
    if getattr(w, "tensor_scale", None) is not None or x.scale_dtype.itemsize != 4:
        return f"products of {x.fmt} with scales below fp32 are a library's, or add in another order for each shape"
    if GRANULARITIES[x.granularity][0] == 1:  # a row's own
        return None
    if x.granularity != "tensorwise":
        return f"a scale of {x.granularity} blocks of its activations sees rows of other texts"
    if not linear.scheme.amax_history:
        return "a tensorwise scale of its activations sees the whole batch; delayed scaling knows one before"
    return None if float(linear.x_scale) > 0 else "its delayed scale has no history yet"
