"""The static cache of one layer's keys and values, and how many sequences a cache of some size serves."""

import torch
from torch import Tensor, nn

from qtrain.models.generation.cached_attention import attend_cached
from qtrain.models.native.attention import Mask, attend
from qtrain.models.native.decoder import Decoder

CACHE_BYTES = 4 * 2**30
"""Size of all layers' caches together at most."""
MAX_ROWS, ROWS_WITHOUT_CACHE = 256, 64


def rows_at_once(model: nn.Module, places: int) -> int:
    """How many prompts to continue together, of at most `places` tokens with what is generated. A step has the same
    Python overhead for one as for many."""
    if not isinstance(model, Decoder):
        return ROWS_WITHOUT_CACHE
    config, element = model.config, model.norm.weight.element_size()
    value_dim = config.head_dim if config.mla is None else config.mla.value_dim
    # Bytes of one prompt's keys and values, of all layers.
    row = config.num_hidden_layers * model.kv_heads * (config.head_dim + value_dim) * places * element
    return min(max(CACHE_BYTES // row, 1), MAX_ROWS)


class StaticKVCache:
    """Keys [B, KV heads, T, D] and values [B, KV heads, T, Dv] of one layer, for T places per row.

    The prompts come first, many tokens from place 0 on. From then on every call stores one token per row at `at`, int64
    [B], in place: the addresses never change, so that a CUDA graph may record it."""

    keys: Tensor
    values: Tensor

    def __init__(self, places: int, at: Tensor, window: int | None):
        self._places, self._at, self._window = places, at, window
        self._rows = torch.arange(len(at), device=at.device)
        self.reading_prompts = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """Store k [B, KV heads, S, D] and v, and attend to what q [B, H, S, D] sees -> [B, H, S, Dv]. mask: of the
        prompts."""
        if self.reading_prompts:
            # Made here, of the size, dtype and device that this process's heads have.
            self.keys, self.values = (t.new_zeros(*t.shape[:2], self._places, t.shape[3]) for t in (k, v))
            self.keys[:, :, : k.shape[2]], self.values[:, :, : v.shape[2]] = k, v
            return attend(q, k, v, mask, scale)
        self.keys[self._rows, :, self._at], self.values[self._rows, :, self._at] = k[:, :, 0], v[:, :, 0]
        return attend_cached(q, self.keys, self.values, self._at, self._window, scale)
