"""Selective recomputation: backward keeps the results of matrix products and attention, and recomputes everything else.

Norms, rotary positions, activations and, under a low-bit scheme, quantization are cheap to recompute and as large as
their inputs. The policy decides by operator, so it covers the linears of every scheme. `aten._int_mm` is not kept: its
int32 output is twice the size of the bf16 result computed from it. Recomputed values must be identical; stochastic
rounding is counter-based, so they are. A product that sums over few columns, such as that of an adapter's B, is no more
expensive to compute than to read, and is recomputed.
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
GEMM_OPERATORS = ("scaled_mm", "int8_mm", "int4_mm", "scaled_int4_mm", "blockwise_mm", "mx_mm", "fp16_mm", "fp32_mm")
"""This project's matrix products (`kernels/gemm`)."""
GROUPED_OPERATORS = tuple(
    f"{over}_grouped_{kind}mm" for over in ("m", "k") for kind in ("", "blockwise_", "plain_", "int4_")
)
"""Products of groups of rows (`kernels/grouped`)."""
_TENSOR_RANKS_SUMS = ("group_scatter_sum", "group_sum")
"""Sums over tensor ranks: a rank's tokens alone, and what would otherwise be sent again."""
_KEPT_NAMES = {f"qtrain::{name}" for name in (*GEMM_OPERATORS, *GROUPED_OPERATORS, *_TENSOR_RANKS_SUMS)}

_FEW_COLUMNS = 128
"""At 2 FLOPs per term, a GPU sums fewer terms than this in less time than it moves the 2 bytes of the result."""


def _sums_few_columns(op: Any, args: Any) -> bool:
    """Whether this is the product of an adapter's B, of a linear or of experts [E * N, r]."""
    if op is _aten.mm.default:
        return args[0].shape[1] < _FEW_COLUMNS <= args[1].shape[1]
    if op.name() == "qtrain::m_grouped_plain_mm":
        experts = args[3].shape[0] - 1
        return args[0].shape[1] < _FEW_COLUMNS <= args[1].shape[0] // experts
    return False


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy for `create_selective_checkpoint_contexts`: keep products and attention, recompute the rest."""
    if _sums_few_columns(op, args):
        return CheckpointPolicy.PREFER_RECOMPUTE
    kept = op in _KEPT or op.name() in _KEPT_NAMES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
