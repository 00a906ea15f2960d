"""The static cache of one layer's keys and values, attention over it, and how many sequences a cache serves."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.models.native.attention import Mask, attend
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.row_attention import attend_rows, flash_rows, flash_takes

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


def attend_cached(
    q: Tensor, keys: Tensor, values: Tensor, at: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """softmax(scale·q·kᵀ)·v over the places that each row's token sees: q [B, H, 1, D], keys [B, KV heads, T, D],
    values [B, KV heads, T, Dv], at int64 [B] -> [B, H, 1, Dv].

    at: the place of the token, whose keys and values are in the cache. window: it sees the last `window` places up to
    its own; None: all of them. scale: None: 1/√D.
    """
    in_one_order = torch.are_deterministic_algorithms_enabled()
    if in_one_order and flash_takes(q, values) and window is None:
        return flash_rows(q, keys, values, at + 1, scale)
    places = torch.arange(keys.shape[2], device=q.device)
    mask = places <= at[:, None]  # [B, T]
    if window is not None:
        mask &= places > at[:, None] - window
    if in_one_order and not q.is_cuda:
        return attend_rows(q, keys, values, mask[:, None, None], scale)
    # The query heads that share a key head, as its queries [B, KV heads, H / KV heads, D]: they see the same places,
    # and keys are read once for all of them.
    grouped = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
    y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask[:, None, None], scale=scale)
    return y.reshape(q.shape[0], q.shape[1], 1, values.shape[-1])
