"""Attention of one new token per sequence over a static cache of keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.models.native.row_attention import attend_rows, flash_rows, flash_takes


def attend_cached(
    q: Tensor, keys: Tensor, values: Tensor, at: Tensor, window: int | None, scale: float | None = None
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
