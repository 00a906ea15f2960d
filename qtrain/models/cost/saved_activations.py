"""What the layers of a decoder keep for backward, by tensor, from its config alone.

Letters: T tokens of a micro-batch, C width, I feed-forward width, Q all query heads, KV all key heads, QKV = Q + 2·KV,
H query heads, b bytes per element of the model's dtype.

Bytes per token that one layer keeps, by tensor (`saved_per_token`); `again`: recomputed:

                                none, compiled   none, eager   selective        full
    layer input (residual)      C·b              C·b           C·b              C·b
    attn_norm output (qkv's X)  C·b              C·b           again            again
    qkv output                  QK-norm: QKV·b   as compiled   QKV·b            again
    q, k rotated, and v         QKV·b (*)        as compiled   again            again
    attention output            Q·b              Q·b           Q·b              again
    attention's logsumexp       4·H              4·H           4·H              again
    after attention (residual)  C·b (**)         C·b           C·b (**)         again
    mlp_norm output             C·b              C·b           again            again
    gate_up output              2·I·b            2·I·b         2·I·b            again
    silu(gate)·up (down's X)    I·b              I·b           again            again
    down output                 -                -             eager: C·b       again
    norms' 1/rms                8 (***)          8 (***)       again            again

Low-bit linears keep codes instead of their X (`LinearBytes.kept_input`), and nothing of down's X where backward
recomputes it (`LowBitBytes.down_input_recomputed`).

BitNet's norms before the output projections add norms' 1/rms, o_proj's X, and the input of down's norm: on a GPU a
compiler does not recompute the kernel that makes it.

(*) (Q + KV)·b with QK-norm, where v stays a view of the kept qkv output. (**) kept as o_proj's output, from which the
sum is recomputed. (***) with QK-norm over all heads together 8 more; the kernel that norms each head keeps none. The
compiled column is what PyTorch's min-cut partitioner chooses for this layer's graph: it recomputes elementwise results,
but keeps what forward has to write out for a matrix product. tests/models/test_memory.py measures what real layers
keep.

A mixture of experts has r rows per token, one for each of its experts and the padding of row groups, and keeps in place
of the MLP's tensors, with E experts, k of them per token, the width I of an expert and S of the shared ones:

    mlp_norm output             C·b              C·b           again            again     what the router reads
    experts' rows of it         r·C·b            r·C·b         again            again     gate_up's X
    gate_up output              r·2·I·b          r·2·I·b       r·2·I·b          again
    silu(gate)·up (down's X)    r·I·b            r·I·b         again            again
    down output                 -                -             eager: r·C·b     again
    routing                     8·E + 16·k + 4·r as compiled   4·E              again
    shared gate_up output       2·S·b            2·S·b         2·S·b            again
    shared silu(gate)·up        S·b              S·b           again            again
    shared down output          Qwen2-MoE: C·b   as compiled   C·b              again

Latent attention, with qkv_a's width A of which latent vectors are N, and V for all value heads:

    qkv_a output                A·b              A·b           A·b              again
    normed latent vectors       N·b              N·b           again            again     X of q_b and kv_b
    q_b and kv_b outputs        -                -             outputs of both  again
    q, k and v                  (2·Q + V)·b      as compiled   again            again
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from qtrain.kernels.grouped.token_permutation import padded_rows
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.parameters import LAYER_LINEARS, layer_linears


@dataclasses.dataclass(frozen=True)
class LinearBytes:
    """Bytes per element of a linear: of its weight, of the low-bit codes beside it, and of the codes of its input that
    backward keeps instead of the input (None: the input itself).

    dequantized: the whole weight is dequantized while it is read. codes_only: codes are all that is read; where masters
    are sharded, there is no full weight. wire: of the codes that ranks exchange in its place; 0: the weight itself.
    """

    weight: float
    codes: float = 0.0
    kept_input: float | None = None
    dequantized: bool = False
    codes_only: bool = False
    wire: float = 0.0


@dataclasses.dataclass(frozen=True)
class LowBitBytes:
    """Bytes of a model's linears under a scheme. layer: of each of LAYER_LINEARS; head: None for a plain output head;
    down_input_recomputed: backward recomputes down's input from gate_up's output instead of keeping it."""

    layer: Mapping[str, LinearBytes]
    head: LinearBytes | None = None
    down_input_recomputed: bool = False

    @classmethod
    def plain(cls, element: int) -> "LowBitBytes":
        """The linears of a model that is not quantized."""
        return cls(dict.fromkeys(LAYER_LINEARS, LinearBytes(element)))


class LayerKind(NamedTuple):
    """`count` layers that are alike. rows: per token that a mixture's experts compute, with padding; 0: a plain MLP."""

    count: int
    rows: float = 0.0


def layer_kinds(config: ModelConfig, tokens: int) -> list[LayerKind]:
    """The layers of a model that reads micro-batches of this many tokens."""
    routed = len(config.moe_layers)
    kinds = [LayerKind(config.num_hidden_layers - routed), LayerKind(routed, rows_per_token(config, tokens))]
    return [kind for kind in kinds if kind.count]


def rows_per_token(config: ModelConfig, tokens: int) -> float:
    """Rows that a mixture's experts compute for each of `tokens`, with padding; 0 without a mixture."""
    mixture = config.moe
    return 0.0 if mixture is None else padded_rows(tokens * mixture.per_token, mixture.experts) / tokens


def saved_per_token(
    config: ModelConfig,
    checkpointing: str,
    compiled: bool,
    element: int,
    low_bit: LowBitBytes | None = None,
    rows: float = 0.0,
) -> dict[str, float]:
    """Bytes per token that one layer keeps for backward, by tensor: the tables above. low_bit: None for plain linears.
    rows: `LayerKind.rows`."""
    low_bit = low_bit or LowBitBytes.plain(element)
    kept: dict[str, float] = {"layer input": config.hidden_size * element}
    if checkpointing == "full":
        return kept
    attention = _latent_attention if config.mla else _attention
    mlp = _mixture if rows else _mlp
    kept["after attention"] = config.hidden_size * element
    kept |= attention(config, checkpointing, element, low_bit)
    return kept | mlp(config, checkpointing, compiled, element, low_bit, rows)


def _input_bytes(low_bit: LowBitBytes, name: str, element: int) -> float:
    """Bytes per element of what is kept of a linear's input."""
    size = low_bit.layer[name].kept_input
    return element if size is None else size


def _attention(config: ModelConfig, checkpointing: str, element: int, low_bit: LowBitBytes) -> dict[str, float]:
    c, q, kv = config.hidden_size, config.q_size, config.kv_size
    kept: dict[str, float] = {"attention output": q * element, "attention logsumexp": 4 * config.num_attention_heads}
    if checkpointing == "selective":
        return {**kept, "qkv output": config.qkv_size * element}
    kept["norm statistics"] = 8 + 8 * config.sub_norm
    if config.qk_norm:
        kept["norm statistics"] += 8 * (config.qk_norm == "whole")  # those of heads are computed again
        kept["qkv output"] = config.qkv_size * element
        kept["q, k rotated"] = (q + kv) * element
    else:
        kept["q, k rotated, and v"] = config.qkv_size * element
    kept["attn_norm output"] = c * _input_bytes(low_bit, "qkv", element)
    # A plain o_proj without a norm before it reads the attention output, which is kept anyway.
    own_input = config.sub_norm or low_bit.layer["o_proj"].kept_input is not None
    kept["o_proj input"] = q * _input_bytes(low_bit, "o_proj", element) if own_input else 0
    return kept


def _latent_attention(config: ModelConfig, checkpointing: str, element: int, low_bit: LowBitBytes) -> dict[str, float]:
    linears, q, v = layer_linears(config), config.q_size, config.value_size
    kept: dict[str, float] = {"attention output": v * element, "attention logsumexp": 4 * config.num_attention_heads}
    kept["qkv_a output"] = linears["qkv_a"].out_features * element
    inner = [name for name in ("q_b", "kv_b") if name in linears]
    if checkpointing == "selective":
        return {**kept, "q_b and kv_b outputs": sum(linears[name].out_features for name in inner) * element}
    kept["norm statistics"] = 8 + 4 * len(inner)
    kept["q, k and v"] = (2 * q + v) * element
    kept["latent vectors"] = sum(linears[name].in_features * _input_bytes(low_bit, name, element) for name in inner)
    kept["attn_norm output"] = config.hidden_size * _input_bytes(low_bit, "qkv_a", element)
    if low_bit.layer["o_proj"].kept_input is not None:
        kept["o_proj input"] = v * _input_bytes(low_bit, "o_proj", element)
    return kept


def _mlp(
    config: ModelConfig, checkpointing: str, compiled: bool, element: int, low_bit: LowBitBytes, _: float
) -> dict[str, float]:
    c, inner = config.hidden_size, config.intermediate_size
    kept: dict[str, float] = {"gate_up output": 2 * inner * element}
    if checkpointing == "selective":
        return {**kept, "down output": 0 if compiled else c * element}
    kept["mlp_norm output"] = c * _input_bytes(low_bit, "gate_up", element)
    kept["down input"] = 0 if low_bit.down_input_recomputed else inner * _input_bytes(low_bit, "down_proj", element)
    kept["down norm input"] = inner * element * config.sub_norm
    return kept


def _mixture(
    config: ModelConfig, checkpointing: str, compiled: bool, element: int, low_bit: LowBitBytes, rows: float
) -> dict[str, float]:
    mixture, c, shared = config.moe, config.hidden_size, config.moe.shared_width
    kept: dict[str, float] = {"experts' gate_up output": rows * 2 * mixture.width * element}
    kept["shared gate_up output"] = 2 * shared * element
    kept["shared down output"] = c * element * mixture.shared_gate
    if checkpointing == "selective":
        kept["routing"] = 4 * mixture.experts
        return {**kept, "experts' down output": 0 if compiled else rows * c * element}
    kept["routing"] = 8 * mixture.experts + 16 * mixture.per_token + 4 * rows
    kept["mlp_norm output"] = c * element
    kept["experts' input"] = rows * c * _input_bytes(low_bit, "experts.gate_up", element)
    if not low_bit.down_input_recomputed:
        kept["experts' down input"] = rows * mixture.width * _input_bytes(low_bit, "experts.down_proj", element)
    if shared:
        codes = low_bit.layer["shared.gate_up"].kept_input  # without codes, the mlp_norm output that is kept anyway
        kept["shared input"] = 0 if codes is None else c * codes
        if not low_bit.down_input_recomputed:
            kept["shared down input"] = shared * _input_bytes(low_bit, "shared.down_proj", element)
    return kept
