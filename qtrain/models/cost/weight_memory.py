"""Memory of weights, from a model's config alone: with their codes, as masters that are sharded, and in the build.

weights     each linear's weight (`LinearBytes.weight`) and codes; embedding, norms and biases in the model's dtype;
            with adapters these
masters     of several ranks: a shard of each that is not the model's own weight is added; full weights of which only
            codes are read are gone
build       what stays in high precision outside of layers, with its largest matrix in fp32, in which random weights
            are drawn, or as loaded; then all weights and codes, and what the largest matrix in layers takes besides:
            the same of it, and its value in the model's dtype if that does not stay (`tensors/lazy.py`)
"""

from typing import NamedTuple

from qtrain.core.maybe_none import MaybeNone
from qtrain.models.config.model import ModelConfig
from qtrain.models.cost.linear_bytes import LinearBytes, LowBitBytes
from qtrain.models.cost.parameters import count_parameters, embedding_elements
from qtrain.models.cost.trained import TrainedPart


class RankShare(NamedTuple):
    """What one of several GPUs holds: of the optimizer states, of the master weights that are not the model's own
    weights, and of the gradients that are not those of the model's weights. experts, others: of the states of a
    mixture's experts, and of all else, which may be sharded over different ranks; None: they are not sharded."""

    states: float
    masters: float
    gradients: float
    experts: float | None
    others: float | None

    def linear(self, key: str) -> float | MaybeNone:
        """Of the states of a linear; None: it is not sharded."""
        return self.experts if key.startswith("experts.") else self.others


ONE_GPU = RankShare(1.0, 1.0, 0.0, None, None)


def model_weight_bytes(config: ModelConfig, element: int, low_bit: LowBitBytes, trained: TrainedPart) -> int:
    # Against a plain linear: its weight may be smaller, and there are codes beside it.
    added = sum(size * (linear.weight - element + linear.codes) for size, linear in low_bit.sizes(config))
    if low_bit.head is not None:
        added += embedding_elements(config) * (low_bit.head.weight - element + low_bit.head.codes)
    return round(count_parameters(config).total * element + added) + trained.added_bytes


def master_bytes(
    config: ModelConfig, element: int, low_bit: LowBitBytes, trained: TrainedPart, share: float, whole_matrices: bool
) -> int:
    """Bytes by which masters that are sharded change the weights. share: `RankShare.masters`; whole_matrices: each
    weight is updated on one rank. A weight that is stored in low bits, or updated as a whole, is its own master."""
    if share == 1:
        return 0
    linears = low_bit.sizes(config)
    if low_bit.head is not None and not config.tie_word_embeddings:
        linears.append((embedding_elements(config), low_bit.head))
    gone = sum(size * linear.weight for size, linear in linears if linear.codes_only)
    own = [size for size, linear in linears if linear.weight != element or (whole_matrices and not linear.codes_only)]
    masters = trained.bytes - (0 if trained.adapters else sum(own) * element)
    return round(masters * share - gone)


def build_bytes(
    config: ModelConfig, element: int, low_bit: LowBitBytes, weights: int, sharded: bool, pretrained: bool
) -> dict[str, int]:
    """The largest moment of a build in which each matrix is made by itself, those outside of layers first. weights:
    when it is over; sharded: a weight of which only codes are read is made for its master."""
    drawn, matrix = element if pretrained else 4, embedding_elements(config)

    def besides(linear: LinearBytes) -> float:
        """Bytes per element besides those that stay. A weight that is stored may be dequantized for codes."""
        stays = linear.weight == element and not (sharded and linear.codes_only)
        return max(drawn - linear.codes, 0) if stays else element + 4

    sizes = [elements * besides(linear) for _, _, elements, linear in low_bit.linears(config)]
    count = count_parameters(config)
    outside = element * (count.total - count.linear)
    if low_bit.head is not None and not config.tie_word_embeddings:
        sizes.append(matrix * besides(low_bit.head))
        outside -= element * matrix
    found, initialization = max((outside, drawn * matrix), (weights, round(max(sizes))), key=sum)
    return {"weights": found, "initialization": initialization}
