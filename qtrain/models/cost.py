"""What a shape costs: parameters, arithmetic a token, memory by kind. From the config alone; nothing is allocated.

Letters: T tokens of a micro-batch, L layers, C width, I feed-forward width, Q all query heads, KV all key heads,
QKV = Q + 2·KV, H query heads, V vocabulary, b bytes of an element of the model's dtype.

Memory that backward needs. A token's bytes in one layer, by tensor (`saved_per_token`); `again` is computed again:

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

Low-bit linears keep codes in place of their X (`LinearBytes.kept_input`), and none of down's where backward recomputes
it (`down_input_recomputed`).

BitNet's norms before the output projections add norms' 1/rms, o_proj's X, and, eager, the down norm's input.

(*) (Q + KV)·b with QK-norm, where v stays a part of the kept qkv output. (**) kept as o_proj's output, from which the
sum is made again. (***) with QK-norm 4·(H + KV heads) more. The compiled column is the choice of PyTorch's min-cut
partitioner for this layer's graph: it computes elementwise results again, but keeps what the forward pass has to write
out for a matrix product. tests/models/test_cost.py counts what real layers keep.

The largest moment is one of four (`MemoryEstimate.moments`):
- build: all weights in the model's dtype, also those that are then stored in low bits, and the largest in fp32, as
  random weights are drawn, or as loaded;
- loss: every layer's kept tensors, and the loss: final hidden states, their gradient, the head's gradient in fp32
  (4·V·C) and one chunk of logits;
- backward: at its start (all kept tensors, and either the head's gradient in fp32 and again in the weight's dtype, or
  the latter and the widest temporaries of one layer: gradients of gate_up and of its activation, or attention's; after
  recomputation also that layer's own tensors) or at its end (all gradients, one layer);
- optimizer: weights, gradients, states, and what the step takes beside them. A fused step takes nothing.

Where the optimizer runs within the backward pass, `gradients` are those of the largest part that is updated at once: a
layer's, or an embedding's; a tied one's is there from the head's part on, beside a layer's.
"""

import dataclasses
from collections.abc import Mapping

from qtrain.models.config import ModelConfig
from qtrain.models.loss import chunk_rows
from qtrain.models.trained_cost import TrainedPart

CUDA_WORKSPACE = 96 * 2**20
"""cuBLAS keeps a workspace of 32 MiB for each thread that calls it (forward, backward), cuBLASLt one of its own."""


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. A tied embedding counts once."""

    embedding: int
    """Embedding, and the head where it is not tied to it."""
    linear: int
    """Weights of the linears inside the layers: what a scheme quantizes."""
    other: int
    """Biases and norms."""

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.other

    @property
    def non_embedding(self) -> int:
        return self.linear + self.other


LAYER_LINEARS = ("qkv", "o_proj", "gate_up", "down_proj")
"""The linears of a layer, by the last part of their names."""


@dataclasses.dataclass(frozen=True)
class LinearBytes:
    """Bytes per element of a linear: of its weight, of the low-bit codes kept beside it, and of the codes of its input
    that backward keeps in place of the input (None: the input itself).

    dequantized: the weight is dequantized as a whole while it is read.
    """

    weight: float
    codes: float = 0.0
    kept_input: float | None = None
    dequantized: bool = False


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(in-features, out-features) of a layer's linears, in the order of LAYER_LINEARS."""
    c, inner = config.hidden_size, config.intermediate_size
    return [(c, config.qkv_size), (config.q_size, c), (c, 2 * inner), (inner, c)]


def count_parameters(config: ModelConfig) -> ParameterCount:
    c, inner = config.hidden_size, config.intermediate_size
    linear = sum(k * n for k, n in linear_shapes(config))
    other = 2 * c
    other += config.qkv_size * config.qkv_bias + c * config.o_bias
    other += (2 * inner + c) * config.mlp_bias
    other += 2 * config.head_dim * config.qk_norm
    other += (config.q_size + inner) * config.sub_norm
    layers = config.num_hidden_layers
    matrices = 1 if config.tie_word_embeddings else 2
    return ParameterCount(matrices * config.vocab_size * c, layers * linear, layers * other + c)


def parameter_shapes(config: ModelConfig) -> list[tuple[tuple[int, ...], int, bool, tuple[int, ...]]]:
    """(shape, how many, whether a hidden layer's matrix, rows of the projections fused in it) of all parameters.

    Biases and norms are one entry, as a vector.
    """
    c, inner, kv = config.hidden_size, config.intermediate_size, config.kv_size
    fused = [(config.q_size, kv, kv), (), (inner, inner), ()]
    shapes = zip(linear_shapes(config), fused, strict=True)
    matrices = [((n, k), config.num_hidden_layers, True, parts) for (k, n), parts in shapes]
    embeddings = 1 if config.tie_word_embeddings else 2
    other = count_parameters(config).other
    return [*matrices, ((config.vocab_size, c), embeddings, False, ()), ((other,), 1, False, ())]


@dataclasses.dataclass(frozen=True)
class Flops:
    """Arithmetic of training on one token, forward and backward, two operations a multiply-add; no recomputation."""

    blocks: float
    """The layers' linears: these run in the scheme's dtype."""
    head: float
    attention: float
    """q·kᵀ and p·v over the keys that a causal query sees, on average half of the sequence."""

    @property
    def total(self) -> float:
        return self.blocks + self.head + self.attention


def flops_per_token(config: ModelConfig, seq_len: int) -> Flops:
    linear = count_parameters(config).linear
    return Flops(
        blocks=6.0 * linear,
        head=6.0 * config.vocab_size * config.hidden_size,
        attention=6.0 * config.num_hidden_layers * config.q_size * seq_len,
    )


def saved_per_token(
    config: ModelConfig,
    checkpointing: str,
    compiled: bool,
    element: int,
    linears: Mapping[str, LinearBytes] | None = None,
    down_input_recomputed: bool = False,
) -> dict[str, float]:
    """Bytes that one layer keeps for backward, a token, by tensor: the table above.

    element: bytes of the model's dtype. linears: of LAYER_LINEARS; None: all plain. down_input_recomputed: backward
    recomputes down's input from gate_up's output instead of keeping it.
    """
    c, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    sub = config.sub_norm
    kept: dict[str, float] = {"layer input": c * element}
    if checkpointing == "full":
        return kept
    kept["attention output"] = q * element
    kept["attention logsumexp"] = 4 * config.num_attention_heads
    kept["after attention"] = c * element
    kept["gate_up output"] = 2 * inner * element
    if checkpointing == "selective":
        kept["qkv output"] = config.qkv_size * element
        kept["down output"] = 0 if compiled else c * element
        return kept
    kept["norm statistics"] = 8 + 8 * sub
    if config.qk_norm:
        kept["norm statistics"] += 4 * (config.num_attention_heads + config.num_key_value_heads)
        kept["qkv output"] = config.qkv_size * element
        kept["q, k rotated"] = (q + kv) * element
    else:
        kept["q, k rotated, and v"] = config.qkv_size * element
    codes = {name: None if linears is None else linears[name].kept_input for name in LAYER_LINEARS}
    of_input = {name: element if size is None else size for name, size in codes.items()}
    kept["attn_norm output"], kept["mlp_norm output"] = c * of_input["qkv"], c * of_input["gate_up"]
    kept["down input"] = 0 if down_input_recomputed else inner * of_input["down_proj"]
    # A plain o_proj without a norm before it reads the attention output, which is kept anyway.
    kept["o_proj input"] = q * of_input["o_proj"] if sub or codes["o_proj"] is not None else 0
    kept["down norm input"] = 0 if compiled else inner * element * sub
    return kept


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward when the forward pass of a micro-batch ends."""
    loss: int
    """Final hidden states and their gradient, the head's gradient in fp32, a chunk of logits."""
    backward: int
    """The widest temporaries: of the head's gradient, or of one layer's backward beside it."""
    workspace: int
    accumulates: bool
    """Gradients of earlier micro-batches are there during the forward pass."""
    one_layer: int
    """Of `activations`, one layer's share."""
    plain_weights: int
    """All weights in the model's dtype, before any is stored in low bits."""
    initialization: int
    """The largest weight in fp32, as it is drawn, or as it is loaded."""
    step: int
    """Temporaries of the optimizer's step."""
    in_backward: bool
    """The optimizer steps within the backward pass."""

    @property
    def moments(self) -> dict[str, dict[str, int]]:
        """Bytes by kind at each moment of a step that can be its largest."""
        resident = {"weights": self.weights, "optimizer": self.optimizer, "workspace": self.workspace}
        held = self.gradients if self.accumulates else 0
        moments = {
            "loss": (held, self.activations, self.loss),
            "backward's start": (held, self.activations, self.backward),
            "backward's end": (self.gradients, self.one_layer, self.backward),
            "optimizer": (self.gradients, self.activations if self.in_backward else 0, self.step),
        }
        kinds = ("gradients", "activations", "temporaries")
        return {
            "build": {"weights": self.plain_weights, "initialization": self.initialization},
            **{name: {**resident, **dict(zip(kinds, sizes, strict=True))} for name, sizes in moments.items()},
        }

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the largest of the moments."""
        return max(self.moments.values(), key=lambda kinds: sum(kinds.values()))

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def all_of(config: ModelConfig, element: int) -> TrainedPart:
    """A model in which everything trains."""
    return TrainedPart(parameter_shapes(config), element, head=True)


def estimate_memory(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    element: int = 2,
    optimizer_bytes: float = 4.0,
    step_bytes: float = 0.0,
    pretrained: bool = False,
    checkpointing: str = "none",
    compiled: bool = True,
    loss_chunks: int = 0,
    accumulates: bool = False,
    in_backward: bool = False,
    linears: Mapping[str, LinearBytes] | None = None,
    head_linear: LinearBytes | None = None,
    down_input_recomputed: bool = False,
    trained: TrainedPart | None = None,
) -> MemoryEstimate:
    """Memory of training on one GPU.

    element: bytes of the dtype of weights, gradients and activations. optimizer_bytes: states' bytes a parameter.
    step_bytes: temporaries of the optimizer's step. pretrained: weights are loaded instead of drawn. accumulates: more
    than one micro-batch a step. in_backward: the optimizer runs within the backward pass. linears,
    down_input_recomputed: see `saved_per_token`. head_linear: a quantized output head; None: a plain one. trained: what
    trains, where not everything does (`trained_cost.py`).
    """
    trained = trained or all_of(config, element)
    linears = linears or dict.fromkeys(LAYER_LINEARS, LinearBytes(element))
    parameters = count_parameters(config)
    tokens = micro_batch_size * seq_len
    c, inner, q = config.hidden_size, config.intermediate_size, config.q_size
    matrix = config.vocab_size * c
    head = matrix if trained.head else 0  # what of it has a gradient

    def kept(mode: str) -> float:
        saved = saved_per_token(config, mode, compiled, element, linears, down_input_recomputed)
        return sum(trained.kept(saved, element).values())

    saved = kept(checkpointing)
    again = kept("none") - saved
    again = again if checkpointing != "none" else 0.0

    logits = chunk_rows(tokens, loss_chunks, large=True) * config.vocab_size * element
    hidden = tokens * (2 * c * element + 4 + 16)  # the last layer's output, normed, 1/rms; token ids and labels
    loss = hidden + tokens * c * element + 4 * head + logits
    if head_linear is not None:
        # Its backward is autograd's, chunk by chunk: the gradient of the logits is scaled in fp32, out of place unless
        # it is fp32 itself, and a chunk's gradient of the weight is added to the others'.
        scaled = logits * (8 if element == 2 else 4) / element
        loss = hidden + tokens * c * element + 2 * head * element + logits + scaled

    # The gradient of the residual comes in and goes out. Between them, beyond what the layer kept: gate_up's and its
    # activation's gradients, when down's input, as large as the latter, is free; or attention's in fp32 with keys and
    # values spread to all query heads, when all that the MLP kept is free.
    # With adapters down's input has two gradients, and their sum. Where down's input is recomputed, there are its
    # codes, both gradients whole, and the codes of gate_up's in both layouts.
    in_mlp = (3 if trained.adapters else 2) * inner * element
    if down_input_recomputed:
        in_mlp = inner * (1 + 3 * element + 4)
    in_attention = q * (4 + 2 * element) + config.qkv_size * element - (3 * inner + c) * element
    widest = max(in_mlp, in_attention)
    sizes = {name: k * n for name, (k, n) in zip(LAYER_LINEARS, linear_shapes(config), strict=True)}
    in_layer = tokens * (2 * c * element + widest + again) + head * element
    in_layer += max((sizes[name] * element for name, of in linears.items() if of.dequantized), default=0)
    in_head = tokens * c * (2 * element + 4) + head * ((4 if head_linear is None else element) + element)

    low_bit = config.num_hidden_layers * sum(
        sizes[name] * (of.weight - element + of.codes) for name, of in linears.items()
    )
    if head_linear is not None:
        low_bit += matrix * (head_linear.weight - element + head_linear.codes)
    return MemoryEstimate(
        weights=round(parameters.total * element + low_bit) + trained.added_bytes(config.num_hidden_layers, element),
        gradients=min(trained.bytes, element * _largest_part(config)) if in_backward else trained.bytes,
        optimizer=round(parameters.total * optimizer_bytes),
        activations=round(config.num_hidden_layers * tokens * saved),
        loss=round(loss),
        backward=round(max(in_layer, in_head)),
        workspace=CUDA_WORKSPACE,
        accumulates=accumulates,
        one_layer=round(tokens * saved),
        plain_weights=parameters.total * element,
        initialization=matrix * (element if pretrained else 4),
        step=round(step_bytes),
        in_backward=in_backward,
    )


def _largest_part(config: ModelConfig) -> int:
    """Parameters whose gradients exist at once where each layer, and each embedding, is updated by itself."""
    parameters, matrix = count_parameters(config), config.vocab_size * config.hidden_size
    layer = (parameters.non_embedding - config.hidden_size) // config.num_hidden_layers
    return layer + matrix if config.tie_word_embeddings else max(layer, matrix)
