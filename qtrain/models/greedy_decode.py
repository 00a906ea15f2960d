"""Greedy answers to a batch of prompts, with a KV cache.

Prompts of different lengths are padded at their end. A row's next token overwrites its first padding token, so keys are
at their positions and a query sees the places up to its own. A model of transformers (--model_impl hf) has no cache
here and reads the whole text for every token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qtrain.models.native.attention import SequenceInfo
from qtrain.models.native.decoder import Decoder, outputs
from qtrain.models.native.rope import rope_tables

CACHE_BYTES = 4 * 2**30
"""Size of all layers' caches together at most."""
MAX_ROWS, ROWS_WITHOUT_CACHE = 256, 64


def rows_at_once(model: nn.Module, places: int) -> int:
    """How many prompts to answer together, of at most `places` tokens with their answers. A step has the same Python
    overhead for one as for many."""
    if (decoder := _cacheable(model, places)) is None:
        return ROWS_WITHOUT_CACHE
    config, element = decoder.config, decoder.norm.weight.element_size()
    # Bytes of one prompt's keys and values, of all layers.
    row = config.num_hidden_layers * 2 * decoder.kv_heads * config.head_dim * places * element
    return min(max(CACHE_BYTES // row, 1), MAX_ROWS)


class StaticKVCache:
    """Keys and values [B, KV heads, T, D] of one layer, for at most T places per row."""

    def __init__(self, batch: int, heads: int, places: int, head_dim: int, like: Tensor):
        self.keys, self.values = like.new_zeros(2, batch, heads, places, head_dim)
        self.at: Tensor | None = None  # int64 [B]: where each row's one new token goes; None: many, from 0 on

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, KV heads, S, D]; returns the keys and values to attend to."""
        if self.at is None:
            self.keys[:, :, : k.shape[2]], self.values[:, :, : v.shape[2]] = k, v
            return k, v
        rows = torch.arange(len(self.at), device=k.device)
        self.keys[rows, :, self.at], self.values[rows, :, self.at] = k[:, :, 0], v[:, :, 0]
        return self.keys, self.values


@torch.no_grad()
def answer(
    model: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_id: int | None, vocab_size: int | None
) -> list[list[int]]:
    """The greedy continuation of each prompt (of at least one id), up to and without eos_id; for a model with a table
    of positions (`max_positions`), as far as that goes."""
    device, was_training = next(model.parameters()).device, model.training
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    if (longest := getattr(model, "max_positions", None)) is not None:
        max_new_tokens = max(1, min(max_new_tokens, longest + 1 - int(lengths.max())))
    places = int(lengths.max()) + max_new_tokens
    ids = torch.zeros(len(prompts), places, dtype=torch.int64, device=device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    decoder = _cacheable(model, places)
    read = _Whole(model) if decoder is None else _Cached(decoder, len(prompts), places)
    model.eval()
    rows, done = torch.arange(len(prompts), device=device), torch.zeros(len(prompts), dtype=torch.bool, device=device)
    try:
        with torch.compiler.set_stance("force_eager"):  # every length is a new shape
            for step in range(max_new_tokens):
                at = lengths + step
                token = read(ids, at, step)[:, :vocab_size].argmax(dim=-1)
                ids[rows, at] = token
                done = done | (token == eos_id) if eos_id is not None else done
                if step % 8 == 7 and bool(done.all()):  # synchronizes with the device
                    break
    finally:
        if isinstance(read, _Cached):
            read.close()
        model.train(was_training)
    written = [row[start:].tolist() for row, start in zip(ids[:, : int(at.max()) + 1], lengths.tolist(), strict=True)]
    written = [row[: step + 1] for row in written]
    return [row[: row.index(eos_id)] if eos_id in row else row for row in written]


def _cacheable(model: nn.Module, places: int) -> Decoder | None:
    """The model if it can use the cache, which has no mask for a sliding window shorter than the text, and none of
    latent vectors."""
    if not isinstance(model, Decoder) or model.config.mla is not None:
        return None
    return model if model.config.sliding_window is None or places <= model.config.sliding_window else None


class _Whole:
    """Logits of the last tokens, [B, V], from a pass over the whole text."""

    def __init__(self, model: nn.Module):
        self._model = model

    def __call__(self, ids: Tensor, at: Tensor, step: int) -> Tensor:
        logits = self._model(ids[:, : int(at.max())])
        return logits[torch.arange(len(ids), device=ids.device), at - 1]


class _Cached:
    """The same from a pass over the prompts, then over one token per row."""

    def __init__(self, model: Decoder, batch: int, places: int):
        config = model.config
        self._model, like = model, model.norm.weight
        self._tables = rope_tables(config.rope, config.head_dim, places, like.device)
        for layer in model.layers:
            layer.attn.cache = StaticKVCache(batch, model.kv_heads, places, config.head_dim, like)

    def __call__(self, ids: Tensor, at: Tensor, step: int) -> Tensor:
        model, last = self._model, at - 1  # the place of the newest token
        cos, sin = self._tables
        mask = None
        if step == 0:
            width = int(at.max())
            x, positions = model.embed_tokens(ids[:, :width]), torch.arange(width, device=ids.device).unsqueeze(0)
        else:
            x, positions = model.embed_tokens(ids.gather(1, last.unsqueeze(1))), last.unsqueeze(1)
            mask = (torch.arange(ids.shape[1], device=ids.device) <= positions)[:, None, None]  # [B, 1, 1, T]
        info = SequenceInfo(len(ids), x.shape[1], cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), mask)
        for layer in model.layers:
            layer.attn.cache.at = last if step else None
            x, *_ = outputs(layer(x, info))
        # [B, C]: the last token of each prompt, or the only one.
        x = x[torch.arange(len(ids), device=ids.device), last] if step == 0 else x[:, 0]
        return model.output(model.norm(x), model.lm_head)

    def close(self) -> None:
        for layer in self._model.layers:
            layer.attn.cache = None
