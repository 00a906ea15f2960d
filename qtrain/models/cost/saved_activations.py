"""What the layers of a decoder keep for backward, by tensor, from its config alone.

Letters: T tokens of a micro-batch, C width, I feed-forward width, Q all query heads, KV all key heads, QKV = Q + 2·KV,
H query heads, b bytes per element of the model's dtype.

Bytes per token that one layer keeps, by tensor (`saved_per_token`); `again`: recomputed. selective and full: the sets
of kinds ["norm", "swiglu"] and ["block"]; other sets follow below:

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
    norms' 1/rms                - (***)          - (***)       again            again

Low-bit linears keep codes instead of their X (`LinearBytes.kept_input`), and nothing of down's X where backward
recomputes it (`LowBitBytes.down_input_recomputed`).

Where several processes compute a part of each sequence (`StepShape.sequence_parts`), attention's output by heads is
kept besides o_proj's X, QK-norm keeps v too, and key-value heads that are fewer than the processes are repeated.

BitNet's norms before the output projections add norms' 1/rms, o_proj's X, and the input of down's norm: on a GPU a
compiler does not recompute the kernel that makes it.

(*) (Q + KV)·b with QK-norm, where v stays a view of the kept qkv output. (**) kept as o_proj's output, from which the
sum is recomputed. (***) with QK-norm over all heads together 8; the kernels of a layer's norms, and of each head's,
keep none. The compiled column is what PyTorch's min-cut partitioner chooses for this layer's graph: it recomputes
elementwise results, but keeps what forward has to write out for a matrix product. tests/models/test_memory.py measures
what real layers keep.

Other kinds (`native/recompute.py`), in the half of the layer that recomputes some, against the column selective:

    qkv            no qkv output
    attention      no attention output, no logsumexp
    ffn            no gate_up output, no down output
    not norm       the norm's output (C·b). Compiled, a low-bit linear's X is computed again from
                   after attention, or the layer input, and 4 bytes of 1/rms instead. Eager, after attention twice where
                   attention recomputes
    norm alone     silu(gate)·up too, as one operator computes it: of low-bit linears the codes of down's X, eager those
                   that forward reads too

With gate_up's output in 8 bits (`LowBitBytes.gate_up_8bit`; not with ffn and block) it takes 1 + 4/128 bytes per
element, the fp32 scale of 128 elements included. `swiglu` is then no region: of down's X nothing is kept, all else is
as without.

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

from collections.abc import Mapping
from typing import NamedTuple

from qtrain.kernels.quantize.keep_8bit import BYTES_PER_ELEMENT
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import LayerKind, LowBitBytes
from qtrain.models.cost.parameters import attention_input_size, layer_linears
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.native.recompute import ATTENTION_KINDS, MLP_KINDS, Kinds


def saved_per_token(
    config: ModelConfig,
    kinds: Kinds,
    compiled: bool,
    element: int,
    low_bit: LowBitBytes | None = None,
    rows: float = 0.0,
    sequence_parts: int = 1,
) -> dict[str, float]:
    """Bytes per token that one layer keeps for backward, by tensor: the tables above. kinds: what is recomputed.
    low_bit: None for plain linears. rows: `LayerKind.rows`. sequence_parts: as of `StepShape`."""
    low_bit = low_bit or LowBitBytes.plain(element)
    kept: dict[str, float] = {"layer input": config.hidden_size * element}
    if "block" in kinds:
        return kept
    # Eager attention's region keeps o_proj's output, and the norm after it its input.
    twice = not compiled and "norm" not in kinds and bool(kinds & {"qkv", "attention"})
    kept["after attention"] = config.hidden_size * element * (1 + twice)
    shape = LayerShape(config, kinds, compiled, element, low_bit, sequence_parts)
    attention = _latent_attention if config.mla else _attention
    mlp = _mixture(shape, rows) if rows else _mlp(shape)
    return kept | attention(shape) | mlp


def saved_of_kind(config: ModelConfig, step: StepShape, kind: LayerKind, recompute: Kinds) -> dict[str, float]:
    """The same of a layer of this kind in a step, if it recomputes so."""
    return saved_per_token(config, recompute, step.compiled, step.element, kind.low_bit, kind.rows, step.sequence_parts)


def mlp_tensors(config: ModelConfig, compiled: bool, element: int, low_bit: LowBitBytes) -> set[str]:
    """Names of those tensors that the dense MLP of a layer keeps, where nothing is recomputed."""
    return set(_mlp(LayerShape(config, frozenset(), compiled, element, low_bit)))


class LayerShape(NamedTuple):
    """The arguments of `saved_per_token`."""

    config: ModelConfig
    kinds: Kinds
    compiled: bool
    element: int
    low_bit: LowBitBytes
    sequence_parts: int = 1

    @property
    def exchanges(self) -> bool:
        """Whether attention reads and writes whole heads, which are tensors of their own."""
        return self.sequence_parts > 1

    def input_bytes(self, name: str) -> float:
        """Bytes per element of what is kept of a linear's input."""
        size = self.low_bit.layer[name].kept_input
        return self.element if size is None else size

    @property
    def gate_up_bytes(self) -> float:
        """Bytes per element of gate_up's output."""
        return BYTES_PER_ELEMENT if self.low_bit.gate_up_8bit else self.element

    @property
    def mlp_kinds(self) -> Kinds:
        """The kinds by which the MLP is in a region."""
        return self.kinds & (MLP_KINDS - {"swiglu"} if self.low_bit.gate_up_8bit else MLP_KINDS)

    @property
    def recomputes_down_input(self) -> bool:
        """Whether the MLP's own function does, outside of regions."""
        in_8_bits = self.low_bit.gate_up_8bit and "swiglu" in self.kinds
        return self.low_bit.down_input_recomputed or in_8_bits

    def region_input(self, name: str) -> float:
        """Bytes of the output of a norm that is not recomputed, where a region begins with the linear `name`."""
        # Compiled, the codes of a low-bit linear's input are computed again from the norm's input and its fp32 1/rms.
        coded = self.compiled and self.low_bit.layer[name].kept_input is not None
        return 4 if coded else self.config.hidden_size * self.element

    def swiglu_output(self, down: str) -> float:
        """Bytes per element of what a region keeps of the input of the linear `down`: an operator's results, or without
        a compiler all of them, the codes that only forward reads too."""
        codes = self.low_bit.layer[down].kept_input
        if codes is None or not self.low_bit.swiglu_codes:
            return self.element
        return codes * (1 + (not self.compiled) - self.low_bit.down_input_recomputed)


def repeated_kv_size(config: ModelConfig, sequence_parts: int) -> int:
    """Elements of a token's keys that are added where fewer key-value heads than processes are repeated."""
    missing = 0 if config.mla else max(sequence_parts - config.num_key_value_heads, 0)
    return missing * config.head_dim


def _attention(shape: LayerShape) -> dict[str, float]:
    config, kinds, element = shape.config, shape.kinds, shape.element
    c, q, kv, qkv = config.hidden_size, config.q_size, config.kv_size, config.qkv_size * element
    repeated = repeated_kv_size(config, shape.sequence_parts)
    kept = _attention_output(shape, q)
    if kinds & ATTENTION_KINDS:
        return kept | _attention_region(shape, "qkv", {"qkv output": qkv})
    # fp32 1/rms of BitNet's norm before o_proj.
    kept["attention's norm statistics"] = 4 * config.sub_norm
    if config.qk_norm:
        kept["qk-norm statistics"] = 8 * (config.qk_norm == "whole")  # those of heads are computed again
        kept["qkv output"] = qkv
        kept["q, k rotated"] = (q + kv + repeated) * element
        kept["v of all tokens"] = (kv + repeated) * element * shape.exchanges
    else:
        kept["q, k rotated, and v"] = qkv + 2 * repeated * element
    kept["attn_norm output"] = c * shape.input_bytes("qkv")
    # A plain o_proj without a norm before it reads the attention output, which is kept anyway.
    own_input = config.sub_norm or shape.exchanges or shape.low_bit.layer["o_proj"].kept_input is not None
    kept["o_proj input"] = q * shape.input_bytes("o_proj") if own_input else 0
    return kept


def _latent_attention(shape: LayerShape) -> dict[str, float]:
    config, kinds, element = shape.config, shape.kinds, shape.element
    linears, v = layer_linears(config), config.value_size
    kept = _attention_output(shape, v)
    inner = [name for name in ("q_b", "kv_b") if name in linears]
    qkv_a = {"qkv_a output": linears["qkv_a"].out_features * element}
    if kinds & ATTENTION_KINDS:
        outputs = {"q_b and kv_b outputs": sum(linears[name].out_features for name in inner) * element}
        return kept | _attention_region(shape, "qkv_a", qkv_a | outputs)
    kept |= qkv_a
    # fp32 1/rms of the norms of latent vectors.
    kept["attention's norm statistics"] = 4 * len(inner)
    kept["q, k and v"] = attention_input_size(config) * element
    kept["latent vectors"] = sum(linears[name].in_features * shape.input_bytes(name) for name in inner)
    kept["attn_norm output"] = config.hidden_size * shape.input_bytes("qkv_a")
    if shape.exchanges or shape.low_bit.layer["o_proj"].kept_input is not None:
        kept["o_proj input"] = v * shape.input_bytes("o_proj")
    return kept


def _attention_output(shape: LayerShape, width: int) -> dict[str, float]:
    if "attention" in shape.kinds:
        return {}
    heads = shape.config.num_attention_heads
    return {"attention output": width * shape.element, "attention logsumexp": 4 * heads}


def _attention_region(shape: LayerShape, first: str, products: Mapping[str, float]) -> dict[str, float]:
    """What a region keeps besides attention's output. first: its first linear; products: bytes of those before
    attention."""
    kept = {} if "qkv" in shape.kinds else dict(products)
    if "norm" in shape.kinds:
        return kept
    return {**kept, "attention's input": shape.region_input(first)}


def _mlp(shape: LayerShape) -> dict[str, float]:
    config, element = shape.config, shape.element
    c, inner = config.hidden_size, config.intermediate_size
    gate_up = {"gate_up output": 2 * inner * shape.gate_up_bytes}
    if shape.mlp_kinds:
        products, swiglu = (
            {"down output": 0 if shape.compiled else c * element},
            inner * shape.swiglu_output("down_proj"),
        )
        return _mlp_region(shape, gate_up | products, shape.region_input("gate_up"), swiglu)
    kept = {**gate_up, "MLP's norm statistics": 4 * config.sub_norm}
    kept["mlp_norm output"] = c * shape.input_bytes("gate_up")
    kept["down input"] = 0 if shape.recomputes_down_input else inner * shape.input_bytes("down_proj")
    kept["down norm input"] = inner * element * config.sub_norm
    return kept


def _mixture(shape: LayerShape, rows: float) -> dict[str, float]:
    config, element, low_bit = shape.config, shape.element, shape.low_bit
    mixture, c, shared = config.mixture, config.hidden_size, config.mixture.shared_width
    products: dict[str, float] = {"experts' gate_up output": rows * 2 * mixture.width * shape.gate_up_bytes}
    products["shared gate_up output"] = 2 * shared * shape.gate_up_bytes
    # Qwen2-MoE multiplies it by its gate, whose gradient reads it.
    products["shared down output"] = c * element * mixture.shared_gate
    if shape.mlp_kinds:
        products["routing"] = 4 * mixture.experts  # the router's logits, an fp32 product
        products["experts' down output"] = 0 if shape.compiled else rows * c * element
        swiglu = rows * mixture.width * shape.swiglu_output("experts.down_proj")
        swiglu += shared * shape.swiglu_output("shared.down_proj") if shared else 0
        return _mlp_region(shape, products, c * element, swiglu)
    kept = dict(products)
    kept["routing"] = 8 * mixture.experts + 16 * mixture.per_token + 4 * rows
    kept["mlp_norm output"] = c * element
    kept["experts' input"] = rows * c * shape.input_bytes("experts.gate_up")
    if not shape.recomputes_down_input:
        kept["experts' down input"] = rows * mixture.width * shape.input_bytes("experts.down_proj")
    if shared:
        codes = low_bit.layer["shared.gate_up"].kept_input  # without codes, the mlp_norm output that is kept anyway
        kept["shared input"] = 0 if codes is None else c * codes
        if not shape.recomputes_down_input:
            kept["shared down input"] = shared * shape.input_bytes("shared.down_proj")
    return kept


def _mlp_region(
    shape: LayerShape, products: Mapping[str, float], region_input: float, swiglu: float
) -> dict[str, float]:
    """What a region keeps of bytes of its products, of its input, if the norm is not recomputed, and of SwiGLU."""
    kinds = shape.kinds
    kept = {} if "ffn" in kinds else dict(products)
    if not kinds & {"swiglu", "ffn"}:
        kept["SwiGLU output"] = swiglu
    if "norm" not in kinds:
        kept["MLP's input"] = region_input
    return kept
