"""Recomputation by kind: which tensors of a layer backward computes again instead of keeping (the kinds are llm.q's).

    x - norm - qkv - rotary - attention - o_proj - + - norm - gate_up - silu(gate) * up - down - +
        norm   qkv            attention                norm   ffn       swiglu

A layer that recomputes its norms runs as one checkpointed region, any other one as two, attention and MLP, each from
its norm's output. Within a region a policy decides by operator what is kept: results of matrix products and attention,
unless their kind is recomputed. Everything between them is computed again whatever the kinds: rotary positions and,
under a low-bit scheme, quantization are as large as what they are computed from, and cheap. So the policy covers the
linears of every scheme, and a new operator without a word about it. With `block` the region keeps nothing.

`aten._int_mm` is not kept: its int32 output is twice the size of the bf16 result computed from it. A product that sums
over few columns, such as that of an adapter's B, is no more expensive to compute than to read, and is recomputed.
Recomputed values must be identical; stochastic rounding is counter-based, so they are.

With `gate_up` kept in 8 bits (--keep_8bit) the MLP's products are not kept in a region, but the codes of gate_up's
output are. Backward reads nothing else of the products, so a compiler drops them from the recomputation. `swiglu` is
then no region: the MLP's own autograd function computes from the codes (`quant/swiglu_mlp.py`).
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qtrain.core.errors import unknown_name
from qtrain.kernels.attention.causal import OPERATOR
from qtrain.kernels.attention.packed import PACKED_OPERATOR

KINDS = {
    "norm": "norms, from the residual stream",
    "swiglu": "silu(gate) * up, from gate_up's output",
    "qkv": "the qkv projection, from its input",
    "attention": "attention, from queries, keys and values",
    "ffn": "gate_up and silu(gate) * up, from the MLP's input",
    "block": "the whole layer, from its input",
}
"""What --recompute may list."""
ATTENTION_KINDS, MLP_KINDS = frozenset({"norm", "qkv", "attention"}), frozenset({"norm", "swiglu", "ffn"})
"""Those of either half of a layer."""

Kinds = frozenset[str]

TENSORS_8BIT = {"gate_up": "the output of gate_up, which the gradient of silu(gate) * up reads"}
"""What --keep_8bit may list."""

SETS: dict[str, Kinds] = {"none": frozenset(), "selective": frozenset({"norm", "swiglu"}), "full": frozenset({"block"})}
"""What --activation_checkpointing may be: names of sets of kinds."""


def as_kinds(names: Iterable[str]) -> Kinds:
    """The set of these kinds. UserError for a name that is none."""
    for name in names:
        if name not in KINDS:
            raise unknown_name("--recompute", "kind", name, KINDS)
    return frozenset(names)


def as_8bit(names: Iterable[str]) -> frozenset[str]:
    """The set of these tensors. UserError for a name that is none."""
    for name in names:
        if name not in TENSORS_8BIT:
            raise unknown_name("--keep_8bit", "tensor", name, TENSORS_8BIT)
    return frozenset(names)


# ---- what a region keeps ---------------------------------------------------------------------------------------------

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    OPERATOR,
    PACKED_OPERATOR,
}
_SOFTMAX = {_aten._softmax.default, _aten._safe_softmax.default}
"""Of attention that is not one operator."""
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._scaled_mm.default}
GEMM_OPERATORS = (
    *("scaled_mm", "low_rank_mm", "int8_mm", "int4_mm", "scaled_int4_mm", "blockwise_mm", "mx_mm", "codes_mm"),
    *("codes_grad_mm", "fp16_mm", "fp32_mm", "bf16_mm", "plain_low_rank_mm"),
)
"""This project's matrix products (`kernels/gemm`)."""
GROUPED_OPERATORS = tuple(
    f"{over}_grouped_{kind}mm" for over in ("m", "k") for kind in ("", "blockwise_", "plain_", "int4_")
)
"""Products of groups of rows (`kernels/grouped`)."""
_TENSOR_RANKS_SUMS = ("group_scatter_sum", "group_sum")
"""Sums over tensor ranks: a rank's tokens alone, and what would otherwise be sent again."""
_PRODUCT_NAMES = {f"qtrain::{name}" for name in (*GEMM_OPERATORS, *GROUPED_OPERATORS, *_TENSOR_RANKS_SUMS)}
SWIGLU_OPERATORS = ("swiglu", "quantize_swiglu", "quantize_swiglu_delayed", "quantize_swiglu_rowwise")
"""silu(gate) * up, or its codes (`kernels/swiglu`)."""
_SWIGLU_NAMES = {f"qtrain::{name}" for name in SWIGLU_OPERATORS}

_KEPT_8BIT = "qtrain::keep_8bit"

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


Stage = Literal["qkv", "o_proj", "ffn"]


class KeptResults(NamedTuple):
    """Results of which operators a region keeps."""

    qkv: bool = True
    attention: bool = True
    ffn: bool = True
    """Products of the MLP."""
    swiglu: bool = False
    """Where it is one operator, as on a GPU."""


class Policy:
    """The policy of one run of a region, for `create_selective_checkpoint_contexts`.

    What a product belongs to follows from what has run before it. Those of qkv come before attention. Those of o_proj
    are kept whatever the kinds, as the residual stream is the sum of their result and the layer's input. After that
    sum, or that of a linear and its adapters, come the MLP's. first: the stage in which the region begins."""

    def __init__(self, kept: KeptResults, first: Stage = "qkv"):
        self.kept = kept
        self.stages = {False: first, True: first}
        """Of the forward pass, and of the recomputation."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        stage = self.stages[ctx.is_recompute]
        if op in _ATTENTION:
            kept = self.kept.attention
        elif op in _PRODUCTS or op.name() in _PRODUCT_NAMES:
            # `KeptResults` has no field o_proj: its products are kept whatever the kinds.
            kept = getattr(self.kept, stage, True) and not _sums_few_columns(op, args)
        else:
            kept = op.name() == _KEPT_8BIT or (self.kept.swiglu and op.name() in _SWIGLU_NAMES)
        if stage == "qkv" and (op in _ATTENTION or op in _SOFTMAX):
            self.stages[ctx.is_recompute] = "o_proj"
        # Equal shapes: a sum with the residual or with adapters, not with a bias.
        elif stage == "o_proj" and op is _aten.add.Tensor and args[0].shape == getattr(args[1], "shape", None):
            self.stages[ctx.is_recompute] = "ffn"
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(first: Stage, *kept: bool) -> tuple[AbstractContextManager, AbstractContextManager]:
    return create_selective_checkpoint_contexts(Policy(KeptResults(*kept), first))


@functools.cache  # compiled layers share their code if they share the function
def contexts(kept: KeptResults, first: Stage = "qkv") -> Callable[[], Any]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`."""
    # Of constants only: a named tuple comes out of torch 2.11's compiler with every field true.
    return functools.partial(_contexts, first, *kept)


selective_contexts = contexts(KeptResults())
"""Of a region that recomputes everything but products and attention."""

# ---- a layer's regions -----------------------------------------------------------------------------------------------


def keep_nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `block`."""
    return CheckpointPolicy.PREFER_RECOMPUTE


block_contexts = functools.partial(create_selective_checkpoint_contexts, keep_nothing)
"""What a compiler is to be given instead of no policy: in torch 2.11 a checkpoint without one does not reach into
autograd functions, as low-bit linears are, so that what their products compute stays in memory (pytorch#177396)."""


class Region(NamedTuple):
    """A part of a layer whose arguments are kept, and besides them what `context_fn` keeps; None: nothing."""

    context_fn: Callable[[], Any] | None = None
    random: bool = False
    """Whether it draws random numbers, as dropout does. A layer of the native decoder has none."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        context_fn = self.context_fn or (block_contexts if torch.compiler.is_compiling() else None)
        options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=self.random, **options, **kwargs)


def run(function: Callable[..., Any], *args: Any) -> Any:
    """What a region is where nothing is recomputed."""
    return function(*args)


class LayerRegions(NamedTuple):
    """The regions in which a layer runs: itself, or its attention and its MLP; `run` for one that keeps everything."""

    layer: Callable[..., Any] = run
    attention: Callable[..., Any] = run
    mlp: Callable[..., Any] = run

    @classmethod
    def of(cls, kinds: Kinds, gate_up_8bit: bool = False) -> "LayerRegions":
        assert not (gate_up_8bit and kinds & {"ffn", "block"}), "they compute again what is kept in 8 bits"
        if "block" in kinds:
            return cls(layer=Region())
        swiglu, ffn = not kinds & {"swiglu", "ffn"}, "ffn" not in kinds and not gate_up_8bit
        kept = KeptResults(qkv="qkv" not in kinds, attention="attention" not in kinds, ffn=ffn, swiglu=swiglu)
        if "norm" in kinds:
            return cls(layer=Region(contexts(kept)))
        return cls(
            attention=Region(contexts(kept)) if kinds & ATTENTION_KINDS else run,
            mlp=Region(contexts(kept, "ffn")) if kinds & MLP_KINDS and not gate_up_8bit else run,
        )
