"""Temporaries of a layer's passes, from a model's config alone: what exists beyond the tensors that forward keeps
(`saved_activations.py`), without gradients of weights (`gradient_memory.py`). The forward pass's are fewer, and count
where the head comes from host memory meanwhile (`memory.py`).

Letters: T tokens of a micro-batch, t of a chunk, C width, I feed-forward width, Q all query heads, QKV what attention
reads, b bytes per element of the model's dtype.

Alive at every moment are the gradient of the residual that comes in and the one that goes out, 2·T·C·b (in the MLP of
adapters the first alone), and while a product runs, its weight in the form that it reads (`LinearBytes.temporary`).
Besides, at the moments that can be the widest of a dense layer, in the order of the backward pass:

    down_proj's grad_input    the gradient of SwiGLU's output, T·I·b
    SwiGLU's backward         that, and gate_up's gradient, 2·T·I·b, or its codes; down's input is freed
    gate_up's quantizer       gate_up's gradient and its codes, where no kernel quantizes it as it is computed; a
                              gate_up that was kept is freed by then, and this is no wider than SwiGLU's backward
    gate_up's grad_input      gate_up's gradient, and its input's, T·C·b; gate_up's output and the gradient of SwiGLU's
                              output are freed
    attention's backward      gradients of its output, of q, k and v, and one in fp32, T·(Q·(4 + 2·b) + QKV·b); all that
                              the MLP kept is freed

and the layer's own tensors that backward computes again (`Recomputed`): in the MLP its own, in attention all. Of a
mixture SwiGLU's backward is the MLP's widest moment, of all rows of experts; what the MLP kept is not taken as freed.

Where MLPs run in chunks of t tokens (`models/native/mlp_chunks.py`), a layer's own tensors are those of attention, of
all tokens; the stream after attention, whose memory its gradient takes over; and either those of the MLP and of its
backward, of t tokens, or attention's temporaries. Several chunks add the gradients of the MLP's weights in fp32.
"""

import dataclasses
from functools import cached_property
from typing import NamedTuple

from qtrain.kernels.quantize.keep_8bit import BYTES_PER_ELEMENT
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import LayerKind, LinearBytes, rows_per_token
from qtrain.models.cost.parameters import DENSE_MLP, attention_input_size
from qtrain.models.cost.saved_activations import mlp_tensors, repeated_kv_size, saved_of_kind
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.native.recompute import Kinds


class ByHalf(NamedTuple):
    """Bytes of the halves of a layer."""

    mlp: float
    attention: float

    def with_gradients(self, gradients: "ByHalf") -> float:
        """Of a backward pass at its widest moment with the gradients of weights that exist by then: none in the MLP, in
        attention those of the MLP."""
        return max(self.mlp, self.attention + gradients.mlp)


class Recomputed(NamedTuple):
    """Bytes per token of a layer's own tensors that backward computes again. at_mlp: those that exist while the MLP's
    backward runs; mlp: all that the MLP keeps where nothing is recomputed."""

    layer: float
    at_mlp: float
    mlp: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of this kind in a training step."""

    config: ModelConfig
    step: StepShape
    trained: TrainedPart
    kind: LayerKind

    def backward(self) -> ByHalf:
        """Temporaries of its backward pass at the widest moment of each half, without the head's gradient."""
        if rows := rows_per_token(self.config, self.step.tokens):
            return self._mixture(rows)
        return self._in_chunks() if self.step.mlp_chunks else self._dense()

    def forward(self) -> float:
        """Temporaries of its forward pass at the MLP: gate_up's output, and beside it SwiGLU's, or the sum with what
        adapters add to it."""
        config, step = self.config, self.step
        width = config.mixture.width * self.kind.rows if self.kind.rows else config.intermediate_size
        adapted = {"gate_up", "experts.gate_up"} & {a.name for a in self.trained.adapters}
        kept = self.kept(step.recompute)
        kept_gate_up = sum(kept.get(name, 0) for name in ("gate_up output", "experts' gate_up output"))
        tokens = step.mlp_rows if step.mlp_chunks else step.tokens
        return tokens * (width * step.element * (4 if adapted else 3) - kept_gate_up)

    def kept(self, recompute: Kinds) -> dict[str, float]:
        """Bytes per token that it keeps for backward if it recomputes so, by tensor, adapters' included."""
        saved = saved_of_kind(self.config, self.step, self.kind, recompute)
        return self.trained.kept(saved, self.step.element, self.kind.rows, recompute)

    @cached_property
    def recomputed(self) -> Recomputed:
        step, kind = self.step, self.kind
        every, kept = self.kept(frozenset()), self.kept(step.recompute)
        names = set() if kind.rows else mlp_tensors(self.config, step.compiled, step.element, kind.low_bit)
        mlp, mlp_kept = (sum(size for name, size in found.items() if name in names) for found in (every, kept))
        recomputed = at_mlp = max(0.0, sum(every.values()) - sum(kept.values()))
        # A layer that keeps the stream between its halves computes attention's half again after the MLP's backward,
        # without a compiler if it is a region of its own.
        if not kind.rows and "block" not in step.recompute and (step.compiled or "norm" not in step.recompute):
            at_mlp = min(recomputed, max(0.0, mlp - mlp_kept))
        return Recomputed(recomputed, at_mlp, mlp)

    @property
    def residual(self) -> int:
        """Bytes per token of the gradient of the residual, coming in and going out."""
        return 2 * self.config.hidden_size * self.step.element

    @cached_property
    def read(self) -> dict[str, float]:
        """Bytes of weights in the form that one product reads, while it runs."""
        return {name: weights * linear.temporary for name, _, weights, linear in self.kind.low_bit.linears(self.config)}

    @property
    def swiglu(self) -> float:
        """Bytes per element of SwiGLU's output in its backward, beyond what the layer kept."""
        element, low_bit = self.step.element, self.kind.low_bit
        # Of 8 bits: gate_up's output in full.
        gate_up = 2 * element * low_bit.gate_up_8bit
        if low_bit.down_input_recomputed:
            # The codes of down's input, both whole gradients, and the codes of gate_up's in both layouts.
            return 1 + 3 * element + 4 + gate_up
        down = low_bit.layer.get("down_proj", LinearBytes(element))
        freed = element if down.kept_input is None else down.kept_input
        if low_bit.swiglu_codes:
            # The codes of gate_up's gradient in all layouts. A model whose layers are all mixtures has no dense MLP.
            up = low_bit.layer["gate_up" if "gate_up" in low_bit.layer else "experts.gate_up"]
            return element + 2 * up.dy_codes - freed + gate_up
        # With adapters down's input has two gradients, and their sum; on a low-bit base its GEMM adds them.
        added = bool(self.trained.adapters and down == LinearBytes(element)) * element
        return 3 * element - freed + added + gate_up

    @property
    def attention(self) -> float:
        """Bytes per token of gradients in attention's backward, one in fp32; keys and values are expanded to all query
        heads."""
        config, element, inputs = self.config, self.step.element, attention_input_size(self.config)
        gradients = config.q_size * (4 + 2 * element) + inputs * element
        if self.step.sequence_parts > 1:  # by heads, put together as one message, and what is received
            gradients += 2 * (inputs + 2 * repeated_kv_size(config, self.step.sequence_parts)) * element
        return gradients

    def _dense(self) -> ByHalf:
        """Of a model without mixtures, all tokens of whose MLPs run at once."""
        c, inner = self.config.hidden_size, self.config.intermediate_size
        element, tokens, in_swiglu = self.step.element, self.step.tokens, inner * self.swiglu
        gate_up = 2 * inner * (BYTES_PER_ELEMENT if self.kind.low_bit.gate_up_8bit else element)
        # down_proj's grad_input; SwiGLU's backward, which reads no weight; gate_up's grad_input.
        after_swiglu = in_swiglu - inner * element - gate_up
        own = {"down_proj": inner * element, "": in_swiglu, "gate_up": after_swiglu + c * element}
        at_mlp = max(tokens * size + self.read.get(name, 0.0) for name, size in own.items())
        fused = self.kind.low_bit.swiglu_codes or self.kind.low_bit.down_input_recomputed
        if not fused and {"ffn", "block"} & self.step.recompute:
            at_mlp = max(at_mlp, tokens * 2 * inner * (element + self.kind.low_bit.layer["gate_up"].dy_codes))
        # All that the MLP kept is freed.
        at_attention = tokens * (self.residual + self.attention + self.recomputed.layer)
        at_attention -= tokens * ((inner + c) * element + gate_up)
        at_attention += max(size for name, size in self.read.items() if name not in DENSE_MLP)
        # The residual's gradient that goes out does not exist yet. Where weights train, that of down_proj may: it is
        # taken to be as large.
        residual = self.residual / 2 if self.trained.adapters else self.residual
        return ByHalf(at_mlp + tokens * (residual + self.recomputed.at_mlp), at_attention)

    def _mixture(self, rows: float) -> ByHalf:
        """Of a model with mixtures, its dense layers included. rows: `rows_per_token`."""
        config, tokens, read = self.config, self.step.tokens, max(self.read.values())
        # Gradients of rows, with those of adapters, before they are added up to those of tokens.
        inputs = (1 + self.trained.adapts_experts) * config.hidden_size * self.step.element
        in_mlp = rows * (self.swiglu * config.mixture.width + inputs)
        if len(config.moe_layers) < config.num_hidden_layers:
            in_mlp = max(in_mlp, config.intermediate_size * self.swiglu)
        at_mlp = tokens * (self.residual + in_mlp + self.recomputed.at_mlp)
        return ByHalf(at_mlp + read, tokens * (self.residual + self.attention + self.recomputed.layer) + read)

    def _in_chunks(self) -> ByHalf:
        """Of a model without mixtures, whose MLPs run in chunks of tokens."""
        step, trained, read = self.step, self.trained, max(self.read.values())
        mlp, inner = trained.mlp_elements(self.config), self.config.intermediate_size
        outside = step.tokens * (self.recomputed.layer - self.recomputed.mlp)
        # The gradient that comes in; of a chunk its input, and the gradient of that; the gradients of weights, and
        # their sums.
        at_mlp = step.tokens * self.residual / 2
        at_mlp += step.mlp_rows * (self.recomputed.mlp + inner * self.swiglu + self.residual)
        at_mlp += mlp * trained.element + (step.mlp_rows < step.tokens) * mlp * 4 + outside
        # o_proj's backward has read its input.
        freed = step.tokens * self.kept(frozenset()).get("o_proj input", 0.0)
        return ByHalf(at_mlp + read, step.tokens * (self.residual + self.attention) + outside - freed + read)
