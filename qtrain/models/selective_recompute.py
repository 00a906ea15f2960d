"""Selective recomputation: backward keeps what a matrix product or attention made and computes the rest again.

Norms, rotary positions, activations and, under a low-bit scheme, quantization are cheap to compute again and as large
as what they read. A kept operation is found by its operator, so a linear of any scheme takes part: PyTorch's products
below, and custom operators of this package that have `mm` in their name. `_int_mm` is left out on purpose, for its
int32 output is twice the size of the bf16 result that is made from it. What is computed again must give the same
values: stochastic rounding here is counter-based, so it does. A product over few columns, such as that of an adapter's
B, is no dearer to make than to read, and is made again.
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}


_FEW = 128
"""Terms of a sum: at 2 operations each, a GPU takes less time for so many than for moving the 2 bytes of the result."""


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy for `create_selective_checkpoint_contexts`: keep products and attention, recompute the rest."""
    if op is _aten.mm.default and args[0].shape[1] < _FEW <= args[1].shape[1]:
        return CheckpointPolicy.PREFER_RECOMPUTE
    own = getattr(op, "namespace", "") == "qtrain" and "mm" in op.__name__
    return CheckpointPolicy.MUST_SAVE if own or op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
