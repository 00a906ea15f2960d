"""Where the tensors of a Hugging Face checkpoint are in the native decoder.

The decoder fuses q, k, v and gate, up, and stacks the matrices of all experts; a checkpoint stores them separately,
each expert's projections too. Each tensor of a checkpoint is rows of a parameter or buffer.
"""

import dataclasses
import re
from collections.abc import Container, Iterator

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.models.config.model import ModelConfig
from qtrain.models.config.moe import MIXTURES


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """The checkpoint's tensor `hf_name` is rows [start, stop) of the parameter `name`; stop None: all rows.

    name None: it is zeros [stop], which the native decoder does not have.
    """

    hf_name: str
    name: str | MaybeNone
    start: int = 0
    stop: int | MaybeNone = None

    def of(self, parameter: Tensor) -> Tensor:
        return parameter[self.start : self.stop]

    def shape(self, parameter: torch.Size) -> tuple[int, ...]:
        """Its shape, given the parameter's."""
        return (len(range(parameter[0])[self.start : self.stop]), *parameter[1:])


@dataclasses.dataclass(frozen=True)
class Projection:
    """A projection fused in a linear: its name in a Hugging Face model, and its rows."""

    hf_name: str
    start: int
    stop: int

    @property
    def word(self) -> str:
        """The last part of its name: q_proj, up_proj, ..."""
        return self.hf_name.rpartition(".")[2]


def layout(config: ModelConfig) -> Iterator[TensorSlice]:
    """Every tensor of a checkpoint, without a tied head."""
    yield TensorSlice("model.embed_tokens.weight", "embed_tokens.weight")
    routed = set(config.moe_layers)
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        yield TensorSlice(there + "input_layernorm.weight", here + "attn_norm.weight")
        yield TensorSlice(there + "post_attention_layernorm.weight", here + "mlp_norm.weight")
        attention = _attention if config.mla is None else _latent_attention
        yield from attention(config, there + "self_attn.", here + "attn.")
        if i in routed:
            yield from _mixture(config, there, here + "mlp.")
        else:
            yield from _mlp(there + "mlp.", here + "mlp.", config.intermediate_size, config.mlp_bias)
        if config.sub_norm:
            yield TensorSlice(there + "mlp.ffn_sub_norm.weight", here + "mlp.sub_norm.weight")
    yield TensorSlice("model.norm.weight", "norm.weight")
    if not config.tie_word_embeddings:
        yield TensorSlice("lm_head.weight", "lm_head.weight")


def weights_of(config: ModelConfig, owners: Container[str]) -> dict[str, list[TensorSlice]]:
    """Name of each of these modules -> the tensors of a checkpoint that its weight consists of."""
    found: dict[str, list[TensorSlice]] = {}
    for entry in layout(config):
        owner, _, kind = (entry.name or "").rpartition(".")
        if kind == "weight" and owner in owners:
            found.setdefault(owner, []).append(entry)
    return found


def is_ignored(hf_name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may have this tensor besides: tables that are computed, and DeepSeek-V3's layers beyond the
    last, which predict further tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
    beyond = layer is not None and int(layer[1]) >= config.num_hidden_layers
    return hf_name.endswith("rotary_emb.inv_freq") or (beyond and config.model_type == "deepseek_v3")


def _attention(config: ModelConfig, there: str, here: str) -> Iterator[TensorSlice]:
    # Where q's rows end and where k's end in the fused [q, k, v].
    q, k = config.q_size, config.q_size + config.kv_size
    if config.qk_norm:
        yield TensorSlice(there + "q_norm.weight", here + "q_norm.weight")
        yield TensorSlice(there + "k_norm.weight", here + "k_norm.weight")
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        yield TensorSlice(f"{there}q_proj.{kind}", f"{here}qkv.{kind}", 0, q)
        yield TensorSlice(f"{there}k_proj.{kind}", f"{here}qkv.{kind}", q, k)
        yield TensorSlice(f"{there}v_proj.{kind}", f"{here}qkv.{kind}", k, config.qkv_size)
    for kind in ("weight", "bias") if config.o_bias else ("weight",):
        yield TensorSlice(f"{there}o_proj.{kind}", f"{here}o_proj.{kind}")
    if config.sub_norm:
        yield TensorSlice(there + "attn_sub_norm.weight", here + "sub_norm.weight")
        if config.qkv_bias and not config.o_bias:  # Qwen2's; transformers' BitNet has all biases or none
            yield TensorSlice(there + "o_proj.bias", None, 0, config.hidden_size)


def _latent_attention(config: ModelConfig, there: str, here: str) -> Iterator[TensorSlice]:
    # Without a latent vector of the queries q's own rows are first in qkv_a, and there is no q_b.
    q = config.latent.q_rank or config.q_size
    first = "q_a_proj" if config.latent.q_rank else "q_proj"
    yield TensorSlice(f"{there}{first}.weight", here + "qkv_a.weight", 0, q)
    # kv_rank rows of the latent vector, then rope_dim rows of the key's rotated part.
    yield TensorSlice(there + "kv_a_proj_with_mqa.weight", here + "qkv_a.weight", q, None)
    if config.latent.q_rank:
        yield TensorSlice(there + "q_a_layernorm.weight", here + "q_norm.weight")
        yield TensorSlice(there + "q_b_proj.weight", here + "q_b.weight")
    yield TensorSlice(there + "kv_a_layernorm.weight", here + "kv_norm.weight")
    yield TensorSlice(there + "kv_b_proj.weight", here + "kv_b.weight")
    yield TensorSlice(there + "o_proj.weight", here + "o_proj.weight")


def _mlp(there: str, here: str, width: int, bias: bool = False) -> Iterator[TensorSlice]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield TensorSlice(f"{there}gate_proj.{kind}", f"{here}gate_up.{kind}", 0, width)
        yield TensorSlice(f"{there}up_proj.{kind}", f"{here}gate_up.{kind}", width, 2 * width)
        yield TensorSlice(f"{there}down_proj.{kind}", f"{here}down_proj.{kind}")


def _mixture(config: ModelConfig, layer: str, here: str) -> Iterator[TensorSlice]:
    """All experts' rows of one parameter come one after the other."""
    mixture, keys, c = config.mixture, MIXTURES[config.model_type], config.hidden_size
    there = f"{layer}{keys.block}."
    yield TensorSlice(there + "gate.weight", here + "router.weight")
    if mixture.selection_bias:
        yield TensorSlice(there + "gate.e_score_correction_bias", here + "router.bias")
    for e in range(mixture.experts):
        # gate_up is [E * 2 * width, C], of each expert gate's rows, then up's; down_proj is [E * C, width].
        expert, start = f"{there}experts.{e}.", 2 * mixture.width * e
        middle, stop = start + mixture.width, start + 2 * mixture.width
        yield TensorSlice(f"{expert}{keys.gate}.weight", here + "experts.gate_up.weight", start, middle)
        yield TensorSlice(f"{expert}{keys.up}.weight", here + "experts.gate_up.weight", middle, stop)
    for e in range(mixture.experts):
        name = f"{there}experts.{e}.{keys.down}.weight"
        yield TensorSlice(name, here + "experts.down_proj.weight", c * e, c * (e + 1))
    if mixture.shared_width:
        yield from _mlp(f"{there}{keys.shared}.", here + "shared.", mixture.shared_width)
    if mixture.shared_gate:
        yield TensorSlice(there + "shared_expert_gate.weight", here + "shared_gate")
