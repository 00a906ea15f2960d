"""Logits of the next token of every row: from a pass over the prompts, then over one new token per row.

Prompts of different lengths are padded at their end. A row's next token overwrites its first padding token, so keys are
at their positions and a query sees the places up to its own.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from qtrain.models.generation.cache import StaticKVCache
from qtrain.models.generation.fused_step import FusedStep, runs_fused
from qtrain.models.native.attention import Mask, SequenceInfo
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.decoder_layer import outputs
from qtrain.models.native.rope import rope_tables


class Reader(ABC):
    """A model that reads `batch` rows of at most `places` tokens.

    `token`, `at` int64 [B]: each row's newest token and its place, which whoever samples writes in place.
    """

    def __init__(self, batch: int, places: int, device: torch.device):
        self.token, self.at = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self.places = places

    @abstractmethod
    def read_prompts(self, ids: Tensor) -> Tensor:
        """Logits [B, V] of the last tokens of prompts int64 [B, S], which are at `at`."""

    @abstractmethod
    def step(self) -> Tensor:
        """Logits [B, V] of `token` at `at`."""

    def close(self) -> None:  # noqa: B027  # most models are not changed
        """Leave the model as it was."""


def reader_of(model: nn.Module, batch: int, places: int, fast: bool = False) -> Reader:
    """With a cache, for a native decoder; else one that reads the whole text again for every token. fast: by the
    kernels of generation, for models that they compute."""
    device = next(model.parameters()).device
    if fast and runs_fused(model):
        return FusedReader(model, batch, places, device)
    if isinstance(model, Decoder):
        return CachedReader(model, batch, places, device)
    return WholeTextReader(model, batch, places, device)


class WholeTextReader(Reader):
    """A model of transformers (--model_impl hf)."""

    def __init__(self, model: nn.Module, batch: int, places: int, device: torch.device):
        super().__init__(batch, places, device)
        self._model, self._rows = model, torch.arange(batch, device=device)
        self._ids = torch.zeros(batch, places, dtype=torch.int64, device=device)

    def read_prompts(self, ids: Tensor) -> Tensor:
        self._ids[:, : ids.shape[1]] = ids
        return self._logits()

    def step(self) -> Tensor:
        self._ids[self._rows, self.at] = self.token
        return self._logits()

    def _logits(self) -> Tensor:
        return self._model(self._ids[:, : int(self.at.max()) + 1])[self._rows, self.at]


class CachedReader(Reader):
    """qtrain's own decoder. `step` runs the same kernels over the same memory every time: it has no branch on values
    and does not synchronize with the device."""

    def __init__(self, model: Decoder, batch: int, places: int, device: torch.device):
        super().__init__(batch, places, device)
        config = self._config = model.config
        self._model, self._rows = model, torch.arange(batch, device=device)
        cos, sin = rope_tables(config.rope, config.rope_dim, places, device)
        self._cos, self._sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [T, 1, D/2]: the same for all heads
        self._caches = [StaticKVCache(places, self.at, config.sliding_window) for _ in model.layers]
        for layer, cache in zip(model.layers, self._caches, strict=True):
            layer.attn.cache = cache

    def read_prompts(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self._layers(ids, self._cos[:length], self._sin[:length], self._prompt_mask(length))
        for cache in self._caches:
            cache.reading_prompts = False
        return self._output(x[self._rows, self.at])

    def step(self) -> Tensor:
        positions = self.at.unsqueeze(1)  # [B, 1]
        return self._output(self._layers(self.token.unsqueeze(1), self._cos[positions], self._sin[positions])[:, 0])

    def _prompt_mask(self, length: int) -> Mask:
        """bool [S, S] for a sliding window that prompts exceed. On GPUs too: a block mask would be compiled for each
        length."""
        window, places = self._config.sliding_window, torch.arange(length, device=self.at.device)
        if window is None or length <= window:
            return None
        distance = places[:, None] - places
        return (distance >= 0) & (distance < window)

    def _layers(self, ids: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        """The stream [B, S, C] that leaves the last layer."""
        info, x = SequenceInfo(ids.shape[0], ids.shape[1], cos, sin, mask), self._model.embed_tokens(ids)
        for layer in self._model.layers:
            x, *_ = outputs(layer(x, info))
        return x

    def _output(self, x: Tensor) -> Tensor:
        return self._model.output(self._model.norm(x), self._model.lm_head)

    def close(self) -> None:
        for layer in self._model.layers:
            layer.attn.cache = None


class FusedReader(CachedReader):
    """The prompts by the model's own forward pass, then five launches a layer (`fused_step.py`)."""

    def __init__(self, model: Decoder, batch: int, places: int, device: torch.device):
        super().__init__(model, batch, places, device)
        self._step = FusedStep(model, self._cos.squeeze(-2), self._sin.squeeze(-2))

    def step(self) -> Tensor:
        return self._step(self.token, self.at, [(cache.keys, cache.values) for cache in self._caches])
