"""Memory of full sharding: what a rank keeps of a decoder, and what exists in full while a layer or the loss runs.

Layers are sharded, and an embedding and a head of their own (`decoder_units`), also where they do not train.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import LinearBytes, LowBitBytes
from qtrain.models.cost.parameters import embedding_elements, layer_linears, layer_weights
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.cost.weight_memory import RankShare

HEAD = "lm_head"


class FullShardBytes(NamedTuple):
    """Bytes on the fullest rank. weights: kept, and of the two layers that are gathered in the backward pass; build: at
    the largest moment of the build, by kind; sums: of gradients, in fp32; last: gradients and messages at the end of
    the backward pass besides; at_loss, at_last_layer: by how much more is gathered at the loss, and in the last layer's
    forward pass, while the head comes; head_message: of the head's gradient, while the last layer's backward pass runs.
    """

    weights: int
    build: dict[str, int]
    sums: int
    last: int
    at_loss: int
    at_last_layer: int
    head_message: int


def full_shard_memory(
    config: ModelConfig,
    element: int,
    low_bit: LowBitBytes,
    trained: TrainedPart,
    share: RankShare,
    weights: int,
    *,
    whole_matrices: bool,
    pretrained: bool,
) -> FullShardBytes:
    """weights: in full, and its masters apart from them, without full sharding. See `estimate_memory` for the
    others."""
    matrix, layers = embedding_elements(config), config.num_hidden_layers
    layer = trained.bytes / layers if trained.adapters else element * layer_weights(config).largest
    embedding, head = trained.ends(config)
    head_bytes, untied = low_bit.head or LinearBytes(element), not config.tie_word_embeddings
    # What adapters train in layers, without those of experts that no other rank has, which stay; one process, which
    # has frozen layers in host memory, keeps all of it.
    in_full = trained.bytes - (trained.expert_bytes if share.experts is None else 0)
    in_full *= bool(trained.adapters) and share.states < 1
    sharded = [name for name in layer_linears(config) if share.linear(name) is not None]
    masters = weights - in_full - _gathered(config, low_bit, sharded)
    # An embedding and a head of their own are sharded too.
    masters -= untied * matrix * (element + head_bytes.in_full)
    # A frozen embedding's shard; the master of one that trains is in `weights`.
    masters += (untied and not embedding) * matrix * element * share.linear(HEAD)
    codes = 0.0
    for name, count, linear in _sharded(config, low_bit, element, sharded):
        hidden, own = name != HEAD, share.linear(name)
        frozen = bool(trained.adapters) or not (hidden or head)
        if frozen or linear.weight != element or (hidden and whole_matrices and not linear.codes_only):
            masters += count * linear.weight * own  # those that are the model's weights where these stay in full
        codes += count * linear.wire * own
    kept = masters + codes
    one, two = (_gathered(config, low_bit, sharded, some) + some * in_full / layers for some in (1, 2))
    others = trained.bytes - layers * layer - (embedding + head) * matrix * element
    # On one process a weight of which codes are kept passes through memory of its own, while the layer before it runs.
    staged = [size * linear.weight for _, _, size, linear in low_bit.linears(config) if linear.codes_only]
    staging = round(max(staged, default=0)) if share.states == 1 else 0
    # The last layer stays for its backward pass.
    at_loss = (round(matrix * head_bytes.in_full + one - two) if untied else 0) - staging
    head_staging = matrix * head_bytes.weight * (untied and head_bytes.codes_only and share.states == 1)
    # Of two layers, one of which is sent, with both of its messages; then of the embedding.
    last = max(4 * layer, embedding * (element * matrix + 2 * layer), embedding * 2 * element * matrix)
    return FullShardBytes(
        weights=round(kept + two) + staging,
        build=_build(config, element, pretrained, masters + in_full, kept + in_full),
        # fp32, whatever the dtype of the gradients that are added.
        sums=round(4 * (trained.bytes // trained.element) * share.states),
        last=round(others + last),
        at_loss=at_loss,
        at_last_layer=at_loss + round(head_staging),
        head_message=head * matrix * element,
    )


def comes_and_goes(config: ModelConfig, low_bit: LowBitBytes, element: int) -> float:
    """Bytes of all weights that exist in full only while what reads them runs."""
    linears = _sharded(config, low_bit, element, layer_linears(config))
    embedding = 0 if config.tie_word_embeddings else embedding_elements(config) * element
    return embedding + sum(elements * linear.weight for _, elements, linear in linears)


def host_gradient_bytes(config: ModelConfig, element: int, low_bit: LowBitBytes, trained: TrainedPart) -> int:
    """Of the sums of gradients of weights that train in host memory."""
    embedding, _ = trained.ends(config)
    linears = _sharded(config, low_bit, element, layer_linears(config))
    return element * (embedding * embedding_elements(config) + sum(elements for _, elements, _ in linears))


def _sharded(
    config: ModelConfig, low_bit: LowBitBytes, element: int, sharded: Iterable[str]
) -> Iterator[tuple[str, int, LinearBytes]]:
    """(key, elements, of what kind) of the linears of layers that are `sharded`, and of a head of its own."""
    sharded = set(sharded)
    for name, count, weights, linear in low_bit.linears(config):
        if name in sharded:
            yield name, count * weights, linear
    if not config.tie_word_embeddings:
        yield HEAD, embedding_elements(config), low_bit.head or LinearBytes(element)


def _gathered(config: ModelConfig, low_bit: LowBitBytes, sharded: Collection[str], layers: int | None = None) -> float:
    """What `layers` layers read of their `sharded` linears, in full, at most; None: all of them."""
    sizes: dict[str, list[float]] = {}
    for name, count, weights, linear in low_bit.linears(config):
        if name in sharded:
            sizes.setdefault(name, []).extend([weights * linear.in_full] * count)
    # The largest `layers` of each kind; [:None] is all of them.
    return sum(sum(sorted(linear_sizes, reverse=True)[:layers]) for linear_sizes in sizes.values())


def _build(config: ModelConfig, element: int, pretrained: bool, masters: float, kept: float) -> dict[str, int]:
    """The largest moment of a build in which each sharded matrix exists until its master is cut from it, and a tied
    embedding before all others. masters: bytes of all masters, and of what is not sharded; kept: with the codes that
    are quantized last."""
    # Random weights are drawn in fp32; loaded ones come in the model's dtype.
    drawn, matrix = element if pretrained else 4, embedding_elements(config)
    sharded = [n.weights for n in layer_linears(config).values()] + [matrix] * (not config.tie_word_embeddings)
    # (what stays, what is being made): a tied embedding first, the largest sharded matrix, then all codes.
    moments = ((element * matrix, drawn * matrix), (round(masters), (element + drawn) * max(sharded)), (round(kept), 0))
    weights, initialization = max(moments, key=sum)
    return {"weights": weights, "initialization": initialization}
