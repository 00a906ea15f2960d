"""Memory of training a decoder by kind, from its config alone; nothing is allocated.

Letters: T tokens of a micro-batch, L layers, C width, V vocabulary, b bytes per element of the model's dtype.

What backward needs is in `saved_activations.py`.

The peak is one of these moments (`MemoryEstimate.moments`):
- build: what stays in high precision outside of layers, with its largest matrix in fp32, in which random weights are
  drawn, or as loaded; then all weights and codes, and what the largest matrix in layers takes besides: the same of it,
  and its value in the model's dtype if that does not stay (`tensors/lazy.py`);
- loss: the kept tensors of every layer, and the loss: final hidden states, their gradient, the head's gradient in fp32
  (4·V·C) and one chunk of logits, of a quantized head with the codes of their gradient;
- backward: at its start (all kept tensors, and either the head's gradient in fp32 and again in the weight's dtype, or
  the latter and the widest temporaries of one layer: gradients of gate_up and of its activation, or attention's; after
  recomputation also that layer's own tensors) or at its end (one layer, and all gradients but the embedding's and those
  that this layer is still to compute; or all of them);
- optimizer: weights, gradients, states, and the temporaries of the step. A fused step has none.

Where the optimizer runs within the backward pass, `gradients` are those of the largest partition that is updated at
once: a layer or an embedding. A tied embedding's gradient exists from the head's backward on, together with a layer's.
Where layers are sharded too, they are those outside of layers, and no sums are kept of the others.

Where layers' inputs are in host memory (`models/native/residual_offload.py`), all but that of the last layer leave the
device, T·C·b·(L - 1) bytes. That of the layer before comes back while a layer's backward runs.

Where gradients are in host memory (`parallel/sharding/host_gradients.py`), the device has those of two units at most;
of several ranks their sums are there (`parallel/sharding/gradients.py`), which the optimizer's step has on the device.
Where MLPs run in chunks of t tokens (`models/native/mlp_chunks.py`), a layer's own tensors are those of attention, of
all tokens; the stream after attention, whose memory its gradient takes over; and either those of the MLP and of its
backward, of t tokens, or attention's temporaries. Several chunks add the gradients of the MLP's weights in fp32.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from qtrain.core.host_memory import PIECE_BYTES
from qtrain.kernels.quantize.keep_8bit import BYTES_PER_ELEMENT
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.full_shard_memory import comes_and_goes, full_shard_memory, host_gradients, trained_ends
from qtrain.models.cost.parameters import count_parameters, layer_linears, parameter_shapes
from qtrain.models.cost.saved_activations import (
    LayerKind,
    LinearBytes,
    LowBitBytes,
    layer_kinds,
    mlp_tensors,
    repeated_kv_size,
    rows_per_token,
    saved_per_token,
)
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.native.loss import chunk_rows
from qtrain.models.native.mlp_chunks import mlp_chunk_rows
from qtrain.models.native.recompute import Kinds

CUDA_WORKSPACE = 96 * 2**20
"""cuBLAS has a workspace of 32 MiB for each thread that calls it (forward, backward), and cuBLASLt one of its own."""


@dataclasses.dataclass(frozen=True)
class StepShape:
    """How a training step runs. element: bytes of weights, gradients and activations; accumulates: more than one
    micro-batch per step; in_backward: the optimizer runs within the backward pass; residuals_on_host: layers' inputs
    are in host memory between their passes; weights_on_host: weights are while what reads them does not run;
    gradients_on_host: so are the weights that train, and the sums of their gradients; mlp_chunks: of the tokens of
    dense MLPs, with the kind `block`; 0: all at once; documents: positions restart within a sequence;
    sequence_parts: processes that compute a part of each sequence, and exchange the heads of attention."""

    micro_batch_size: int
    seq_len: int
    element: int = 2
    recompute: Kinds = frozenset()
    compiled: bool = True
    loss_chunks: int = 0
    accumulates: bool = False
    in_backward: bool = False
    residuals_on_host: bool = False
    weights_on_host: bool = False
    gradients_on_host: bool = False
    mlp_chunks: int = 0
    documents: bool = False
    sequence_parts: int = 1

    @property
    def tokens(self) -> int:
        """Of this process."""
        return self.micro_batch_size * self.seq_len // self.sequence_parts

    @property
    def mlp_rows(self) -> int:
        """Tokens that a dense MLP reads at once."""
        return min(self.tokens, mlp_chunk_rows(self.tokens, self.mlp_chunks)) if self.mlp_chunks else self.tokens


class RankShare(NamedTuple):
    """What one of several GPUs holds: of the optimizer states, of the master weights that are not the model's own
    weights, and of the gradients that are not those of the model's weights. experts, others: of the states of a
    mixture's experts, and of all else, which may be sharded over different ranks; None: they are not sharded."""

    states: float
    masters: float
    gradients: float
    experts: float | None
    others: float | None

    def linear_bytes(self, key: str) -> float | None:
        """Of the states of a linear; None: it is not sharded."""
        return self.experts if key.startswith("experts.") else self.others


ONE_GPU = RankShare(1.0, 1.0, 0.0, None, None)


class Peak(NamedTuple):
    """Bytes by kind at the moment of a step when a device holds most."""

    moment: str
    kinds: Mapping[str, int]
    host: Mapping[str, int] = {}
    """Bytes of pinned host memory, at all times, by the names of --offload."""

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for backward at the end of a micro-batch's forward pass."""
    loss: int
    """Final hidden states and their gradient, the head's gradient in fp32, a chunk of logits."""
    backward: int
    """The largest temporaries: of the head's gradient, or of one layer's backward beside it."""
    at_end: int
    """The same at the end of the backward pass, of the first layer or of the embedding."""
    workspace: int
    held: int
    """Gradients of earlier micro-batches, which exist during the forward pass."""
    one_layer: int
    """What is left of `activations` at the end of the backward pass."""
    build: Mapping[str, int]
    """While the model is built: the weights that are there, and what the one that gets its value takes besides."""
    at_step: int
    """Gradients from which the optimizer's step updates."""
    step: int
    """Temporaries of the optimizer's step."""
    in_backward: bool
    """The optimizer steps within the backward pass."""
    host: Mapping[str, int]
    """In pinned host memory, by the names of --offload."""
    teacher: int = 0
    """Temporaries of a teacher's forward pass, before that of the model (`teacher.py`)."""

    @property
    def moments(self) -> dict[str, Mapping[str, int]]:
        """Bytes by kind at each moment of a step that can be the peak."""
        resident = {"weights": self.weights, "optimizer": self.optimizer, "workspace": self.workspace}
        # (gradients, activations, temporaries), as `kinds` below names them.
        moments = {
            **({"the teacher's forward pass": (self.held, 0, self.teacher)} if self.teacher else {}),
            "the loss": (self.held, self.activations, self.loss),
            "the start of backward": (self.held, self.activations, self.backward),
            "the end of backward": (self.gradients, self.one_layer, self.at_end),
            "the optimizer's step": (self.at_step, self.activations if self.in_backward else 0, self.step),
        }
        kinds = ("gradients", "activations", "temporaries")
        return {
            "the model's build": self.build,
            **{name: {**resident, **dict(zip(kinds, sizes, strict=True))} for name, sizes in moments.items()},
        }

    @property
    def at_peak(self) -> Peak:
        return max((Peak(*moment, self.host) for moment in self.moments.items()), key=lambda peak: peak.total)

    @property
    def peak(self) -> int:
        return self.at_peak.total


def all_of(config: ModelConfig, element: int) -> TrainedPart:
    """A model in which everything trains."""
    return TrainedPart(parameter_shapes(config), element, head=True)


def estimate_memory(
    config: ModelConfig,
    step: StepShape,
    *,
    optimizer_bytes: float = 4.0,
    host_bytes: Mapping[str, float] | None = None,
    step_bytes: float = 0.0,
    pretrained: bool = False,
    low_bit: LowBitBytes | None = None,
    trained: TrainedPart | None = None,
    share: RankShare = ONE_GPU,
    whole_matrices: bool = False,
    reshards: bool = False,
) -> MemoryEstimate:
    """Memory of training on one GPU, or on one of several that hold a share each of the master weights and states.

    whole_matrices: the optimizer updates each linear's weight on one of them. reshards: layers exist in full only while
    they run.

    optimizer_bytes: of states per parameter. host_bytes: of all states that are in host memory, by their names.
    step_bytes: temporaries of the optimizer's step. pretrained: weights are loaded instead of drawn. low_bit: None for
    a model that is not quantized. trained: None where everything trains.
    """
    trained = trained or all_of(config, step.element)
    low_bit = low_bit or LowBitBytes.plain(step.element)

    def tensors(kind: LayerKind, kinds: Kinds) -> dict[str, float]:
        saved = saved_per_token(
            config, kinds, step.compiled, step.element, kind.low_bit, kind.rows, step.sequence_parts
        )
        return trained.kept(saved, step.element, kind.rows, kinds)

    def kept(kind: LayerKind, kinds: Kinds) -> float:
        return sum(tensors(kind, kinds).values())

    kinds = layer_kinds(config, step.tokens, low_bit)
    saved = [kept(kind, step.recompute) for kind in kinds]

    def in_backward(kind: LayerKind, own: float) -> LayerBackward:
        every = tensors(kind, frozenset())
        names = set() if kind.rows else mlp_tensors(config, step.compiled, step.element, kind.low_bit)
        of_mlp = sum(size for name, size in every.items() if name in names)
        recomputed = at_mlp = max(0.0, sum(every.values()) - own)
        # A layer that keeps the stream between its halves computes attention's half again after the MLP's backward,
        # without a compiler if it is a region of its own.
        if not kind.rows and "block" not in step.recompute and (step.compiled or "norm" not in step.recompute):
            kept_of_mlp = sum(size for name, size in tensors(kind, step.recompute).items() if name in names)
            at_mlp = min(recomputed, max(0.0, of_mlp - kept_of_mlp))
        return _backward_bytes(config, step, kind.low_bit, trained, Recomputed(recomputed, at_mlp, of_mlp))

    parameters, gradients = count_parameters(config).total, trained.bytes
    if step.in_backward:
        gradients = min(gradients, step.element * _largest_partition(config))
    at_step, held, master_bytes = gradients, gradients if step.accumulates else 0, gradients * share.gradients
    weights = _weight_bytes(config, step.element, low_bit, trained)
    weights += _master_bytes(config, step.element, low_bit, trained, share.masters, whole_matrices)
    built = weights - trained.added_bytes(step.element)
    build = _build_bytes(config, step.element, low_bit, built, share.masters < 1, pretrained)
    loss = _loss_bytes(config, step, low_bit, trained)
    # Of each moment the widest layer.
    layer = LayerBackward(*map(max, zip(*map(in_backward, kinds, saved), strict=True)))
    in_head = _head_backward_bytes(config, step, low_bit, trained)
    head_bytes = step.element * _head_elements(config, trained)
    # The head's gradient is there while layers run; where it is added to another, or its weight updated, at once it is
    # not, unless it waits for that of a tied embedding.
    at_layers = head_bytes if config.tie_word_embeddings or not (step.accumulates or step.in_backward) else 0
    if reshards:
        full = full_shard_memory(
            config,
            step.element,
            low_bit,
            trained,
            share.states,
            share.linear_bytes,
            weights,
            largest_layer=_largest_layer(config),
            whole_matrices=whole_matrices,
            pretrained=pretrained,
        )
        sums = 0 if step.in_backward else full.sums
        weights, build, at_step, held = full.weights, full.build, sums, sums if step.accumulates else 0
        gradients, loss, at_layers = sums + full.last, loss + full.at_loss, head_bytes + full.head_message
        master_bytes = 0 if sums else master_bytes  # rounded in the memory of the sums
    on_host = {name: round(size * share.states) for name, size in (host_bytes or {}).items()}
    if step.weights_on_host:
        on_host["weights"] = round(comes_and_goes(config, low_bit, step.element))
    if step.gradients_on_host and reshards and share.states < 1:  # sums of ranks
        at_step, held = round(trained.bytes * share.states) + PIECE_BYTES, PIECE_BYTES
        gradients, on_host["gradients"] = PIECE_BYTES + full.last, full.sums
    elif step.gradients_on_host and share.states == 1:
        moved = host_gradients(config, step.element, low_bit, trained, largest_layer=_largest_layer(config))
        stays = trained.bytes - moved.sums
        at_step, held = stays + moved.buffer, moved.buffer + (stays if step.accumulates else 0)
        # Of the head, or of the layer before, while they are added to the sums.
        gradients, at_layers = at_step + moved.last, max(head_bytes, moved.layer)
        layer = LayerBackward(layer.mlp + moved.arriving, layer.attention + moved.arriving)
        on_host["gradients"] = moved.sums
    residual = step.tokens * config.hidden_size * step.element
    residuals = residual * (config.num_hidden_layers - 1) if step.residuals_on_host else 0
    if residuals:
        on_host["residuals"] = residuals
    # That of the layer before comes back while a layer's backward runs.
    last_layer = layer.at_most(_layer_gradients(config, trained, config.num_hidden_layers - 1))
    backward = max(last_layer + (residual if residuals else 0) + at_layers, in_head)
    # Cosines and sines, fp32 [S, D/2] each, are kept for all steps; those of documents' positions until backward ends.
    of_position = 4 * config.rope_dim
    gathered = step.documents * step.tokens * of_position
    one_layer = step.tokens * max(saved) + gathered
    end = EndOfBackward(gradients, one_layer, max(layer))
    if not (reshards or step.in_backward or step.gradients_on_host):
        end = _end_of_backward(config, step, trained, layer, one_layer)
    return MemoryEstimate(
        weights=weights,
        gradients=round(end.gradients),
        optimizer=round(parameters * optimizer_bytes * share.states),
        activations=round(step.tokens * sum(kind.count * own for kind, own in zip(kinds, saved, strict=True)))
        - residuals
        + gathered,
        loss=round(loss),
        backward=round(backward),
        at_end=round(end.temporaries),
        workspace=CUDA_WORKSPACE + step.seq_len * of_position,
        held=held,
        one_layer=round(end.activations),
        build=build,
        at_step=at_step,
        step=round(step_bytes * share.states + master_bytes),
        in_backward=step.in_backward,
        host=on_host,
    )


def _build_bytes(
    config: ModelConfig, element: int, low_bit: LowBitBytes, weights: int, sharded: bool, pretrained: bool
) -> dict[str, int]:
    """The largest moment of a build in which each matrix is made by itself, those outside of layers first. weights:
    when it is over; sharded: a weight of which only codes are read is made for its master."""
    drawn, matrix = element if pretrained else 4, config.vocab_size * config.hidden_size

    def besides(linear: LinearBytes) -> float:
        """Bytes per element besides those that stay. A weight that is stored may be dequantized for codes."""
        stays = linear.weight == element and not (sharded and linear.codes_only)
        return max(drawn - linear.codes, 0) if stays else element + 4

    sizes = [weights * besides(linear) for _, _, weights, linear in low_bit.linears(config)]
    count = count_parameters(config)
    outside = element * (count.total - count.linear)
    if low_bit.head is not None and not config.tie_word_embeddings:
        sizes.append(matrix * besides(low_bit.head))
        outside -= element * matrix
    found, initialization = max((outside, drawn * matrix), (weights, round(max(sizes))), key=sum)
    return {"weights": found, "initialization": initialization}


def _weight_bytes(config: ModelConfig, element: int, low_bit: LowBitBytes, trained: TrainedPart) -> int:
    linears = [(count * weights, linear) for _, count, weights, linear in low_bit.linears(config)]
    # Against a plain linear: its weight may be smaller, and there are codes beside it.
    added = sum(size * (linear.weight - element + linear.codes) for size, linear in linears)
    if low_bit.head is not None:
        added += config.vocab_size * config.hidden_size * (low_bit.head.weight - element + low_bit.head.codes)
    weights = round(count_parameters(config).total * element + added)
    return weights + trained.added_bytes(element)


def _master_bytes(
    config: ModelConfig, element: int, low_bit: LowBitBytes, trained: TrainedPart, share: float, whole_matrices: bool
) -> int:
    """Bytes by which masters that are sharded change the weights: a shard of each is added, and the full weights that
    only codes are computed from are gone. A weight that is stored in low bits, or updated as a whole, is its own
    master on one rank."""
    if share == 1:
        return 0
    linears = [(count * weights, linear) for _, count, weights, linear in low_bit.linears(config)]
    if low_bit.head is not None and not config.tie_word_embeddings:
        linears.append((config.vocab_size * config.hidden_size, low_bit.head))
    gone = sum(size * linear.weight for size, linear in linears if linear.codes_only)
    if trained.adapters:
        return round(trained.bytes * share - gone)
    own = [size for size, linear in linears if linear.weight != element or (whole_matrices and not linear.codes_only)]
    return round((trained.bytes - sum(own) * element) * share - gone)


def _head_elements(config: ModelConfig, trained: TrainedPart) -> int:
    """Elements of the output head that have a gradient."""
    return config.vocab_size * config.hidden_size if trained.head else 0


def _loss_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    c, element, tokens, head = config.hidden_size, step.element, step.tokens, _head_elements(config, trained)
    logits = chunk_rows(tokens, step.loss_chunks, large=True) * config.vocab_size * element
    hidden = tokens * (2 * c * element + 4 + 16)  # the last layer's output, normed, 1/rms; token ids and labels
    # And the gradient of hidden states, that of the head, and a chunk of logits.
    loss = hidden + tokens * c * element + head * _head_gradient_element(step, low_bit) + logits
    if low_bit.head is None:
        return loss
    # Of a chunk besides: the codes of its logits' gradient in both layouts, and a gradient of the weight to be added.
    return loss + logits + head * element * _has_chunks(step)


def _has_chunks(step: StepShape) -> bool:
    return chunk_rows(step.tokens, step.loss_chunks, large=True) < step.tokens


def _head_gradient_element(step: StepShape, low_bit: LowBitBytes) -> int:
    """Bytes per element of the gradient of the head's weight that the loss keeps: fp32 where chunks are added up."""
    return 4 if low_bit.head is None or _has_chunks(step) else step.element


class LayerGradients(NamedTuple):
    """Bytes of the gradients of a layer's weights, by half."""

    mlp: float
    attention: float


class LayerBackward(NamedTuple):
    """Bytes of temporaries of a layer's backward pass at its two widest moments, without gradients of weights."""

    mlp: float
    attention: float

    def at_most(self, gradients: LayerGradients) -> float:
        """With the gradients of weights that exist by then: none in the MLP, in attention those of the MLP."""
        return max(self.mlp, self.attention + gradients.mlp)


class Recomputed(NamedTuple):
    """Bytes per token of a layer's own tensors that backward computes again. at_mlp: those that exist while the MLP's
    backward runs; of_mlp: all that the MLP keeps where nothing is recomputed."""

    layer: float
    at_mlp: float
    of_mlp: float


class EndOfBackward(NamedTuple):
    """Bytes at the widest moment of the end of the backward pass."""

    gradients: float
    activations: float
    temporaries: float


def _layer_gradients(config: ModelConfig, trained: TrainedPart, index: int) -> LayerGradients:
    """Of the layer `index`; of adapters, which are small, those of a dense MLP."""
    if trained.adapters:
        return LayerGradients(trained.element * trained.mlp_elements(config), 0.0)
    sizes = {name: trained.element * n.weights for name, n in layer_linears(config).items()}
    dense = sum(sizes.pop(name, 0) for name in ("gate_up", "down_proj"))
    routed = sum(sizes.pop(name) for name in list(sizes) if name.startswith(("experts.", "shared.")))
    return LayerGradients(routed if index in config.moe_layers else dense, sum(sizes.values()))


def _end_of_backward(
    config: ModelConfig, step: StepShape, trained: TrainedPart, layer: LayerBackward, one_layer: float
) -> EndOfBackward:
    """Of a model whose gradients all stay. one_layer: what the first layer keeps."""
    matrix, (embedding, _) = step.element * config.vocab_size * config.hidden_size, trained_ends(config, trained)
    own, tied = _layer_gradients(config, trained, 0), config.tie_word_embeddings and trained.head
    # A tied embedding's gradient, and its sum with the head's, which waits for it; then what an earlier sum receives.
    at_embedding = matrix * ((embedding or tied) * step.accumulates + 2 * tied)
    ends = [EndOfBackward(trained.bytes, 0.0, step.tokens * config.hidden_size * step.element + at_embedding)]
    if step.accumulates:
        waiting = matrix * tied
        ends.append(EndOfBackward(trained.bytes, one_layer, layer.at_most(own) + waiting))
    else:
        # Those of the embedding, and of what is still to be computed in the first layer, do not exist yet.
        before = trained.bytes - matrix * embedding
        ends.append(EndOfBackward(before - own.mlp - own.attention, one_layer, layer.mlp))
        ends.append(EndOfBackward(before - own.attention, one_layer, layer.attention))
    return max(ends, key=sum)


def _backward_bytes(
    config: ModelConfig,
    step: StepShape,
    low_bit: LowBitBytes,
    trained: TrainedPart,
    recomputed: Recomputed,
) -> LayerBackward:
    """Of a layer, without the head's gradient. low_bit: of this layer."""
    c, inner, q = config.hidden_size, config.intermediate_size, config.q_size
    element, tokens = step.element, step.tokens
    # The gradient of the residual comes in and goes out. Between them, beyond what the layer kept: the gradients of
    # gate_up and of its activation, or the codes of gate_up's in all layouts, once down's input is freed; or
    # attention's in fp32, with keys and values expanded to all query heads, once all that the MLP kept is freed.
    # With adapters down's input has two gradients, and their sum; on a low-bit base its GEMM adds them. Where down's
    # input is recomputed, there are its codes, both whole gradients, and the codes of gate_up's gradient in both
    # layouts.
    down = low_bit.layer.get("down_proj", LinearBytes(element))
    freed = element if down.kept_input is None else down.kept_input
    in_mlp = (3 * element - freed + bool(trained.adapters and down == LinearBytes(element)) * element) * inner
    if low_bit.swiglu_codes and not low_bit.down_input_recomputed:
        # A model whose layers are all mixtures has no dense MLP.
        up = low_bit.layer["gate_up" if "gate_up" in low_bit.layer else "experts.gate_up"]
        in_mlp = (element + 2 * up.dy_codes - freed) * inner
    if low_bit.down_input_recomputed:
        in_mlp = inner * (1 + 3 * element + 4)
    # Of 8 bits: gate_up's output in full.
    gate_up_element = BYTES_PER_ELEMENT if low_bit.gate_up_8bit else element
    in_mlp += 2 * inner * element * low_bit.gate_up_8bit
    if rows := rows_per_token(config, tokens):
        # The same of all rows, and their gradients before they are added up to those of tokens, with those of adapters.
        own = rows * (in_mlp / inner * config.mixture.width + (1 + trained.adapts_experts) * c * element)
        in_mlp = max(own, in_mlp if len(config.moe_layers) < config.num_hidden_layers else 0)
    input_widths = config.qkv_size if config.mla is None else 2 * q + config.value_size
    in_attention = q * (4 + 2 * element) + input_widths * element
    if step.sequence_parts > 1:  # their gradients by heads, put together as one message, and what is received
        in_attention += 2 * (input_widths + 2 * repeated_kv_size(config, step.sequence_parts)) * element
    # Weights in the form that one product reads, while it runs.
    read = {name: weights * linear.temporary for name, _, weights, linear in low_bit.linears(config)}
    if step.mlp_chunks and not rows:
        # The gradient that comes in; of a chunk its input, and the gradient of that.
        at_chunk = tokens * c * element + step.mlp_rows * (recomputed.of_mlp + in_mlp + 2 * c * element)
        sums, outside = trained.mlp_elements(config) * trained.element, tokens * (recomputed.layer - recomputed.of_mlp)
        at_chunk += sums + (step.mlp_rows < tokens) * trained.mlp_elements(config) * 4 + outside
        at_attention = tokens * (2 * c * element + in_attention) + outside
        return LayerBackward(at_chunk + max(read.values()), at_attention + max(read.values()))
    stream = 2 * c * element
    at_attention = tokens * (stream + in_attention + recomputed.layer)
    if rows:
        at_mlp = tokens * (stream + in_mlp + recomputed.at_mlp)
        return LayerBackward(at_mlp + max(read.values()), at_attention + max(read.values()))
    gate_up = 2 * inner * gate_up_element
    at_attention -= tokens * ((inner + c) * element + gate_up)
    # The activation's gradient by down's product; then SwiGLU's backward, which reads no weight; then the gradient of
    # gate_up's input, when gate_up's output and the activation's gradient are freed.
    own = {"down_proj": inner * element, "": in_mlp, "gate_up": in_mlp - inner * element - gate_up + c * element}
    at_mlp = max(tokens * size + read.get(name, 0.0) for name, size in own.items())
    if not (low_bit.swiglu_codes or low_bit.down_input_recomputed):
        # gate_up's gradient is in memory when it is quantized, with its codes.
        at_mlp = max(at_mlp, tokens * 2 * inner * (element + low_bit.layer["gate_up"].dy_codes))
    in_halves = max(size for name, size in read.items() if name not in own)
    return LayerBackward(at_mlp + tokens * (stream + recomputed.at_mlp), at_attention + in_halves)


def _head_backward_bytes(config: ModelConfig, step: StepShape, low_bit: LowBitBytes, trained: TrainedPart) -> float:
    element, head = step.element, _head_elements(config, trained)
    hidden_bytes = step.tokens * config.hidden_size * (2 * element + 4)
    return hidden_bytes + head * (_head_gradient_element(step, low_bit) + element)


def _largest_partition(config: ModelConfig) -> int:
    """Parameters whose gradients exist at once where each layer, and each embedding, is updated by itself."""
    parameters, matrix = count_parameters(config), config.vocab_size * config.hidden_size
    # Norms, biases and routers are the layers', but for the last norm's C.
    layer = _largest_layer(config) + (parameters.other - config.hidden_size) // config.num_hidden_layers
    return layer + matrix if config.tie_word_embeddings else max(layer, matrix)


def _largest_layer(config: ModelConfig) -> int:
    """Weights of the linears of the layer that has most."""
    sizes = {name: n.weights for name, n in layer_linears(config).items()}
    # A layer has a dense MLP or a mixture, never both; attention is what remains.
    dense = sum(sizes.pop(name, 0) for name in ("gate_up", "down_proj"))
    routed = sum(sizes.pop(name) for name in list(sizes) if name.startswith(("experts.", "shared.")))
    return sum(sizes.values()) + max(dense, routed)
