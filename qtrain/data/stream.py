"""What every dataset gives to training: samples one after the other, each at a position that can be returned to.

A dataset type is a frozen dataclass in DATASETS whose fields are its JSON options. It opens as a `Stream`. A position
is a small JSON object taken after a sample; seeking a fresh stream to it gives the next sample exactly, across file and
epoch ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qtrain.data.tokenizer import Tokenizer, load_tokenizer
from qtrain.errors import UserError
from qtrain.registry import Registry

IGNORED = -100
"""The label of a position that is not trained on."""


@dataclass(frozen=True)
class Sample:
    """`tokens` int64 [S+1]; `trained` bool [S] or None for all: whether the label of position i, token i+1, counts."""

    tokens: np.ndarray
    trained: np.ndarray | None = None


@dataclass(frozen=True)
class Batch:
    """`input_ids` int64 [B, S]; `labels` int64 [B, S], already shifted: label i is token i+1, or -100 (IGNORED)."""

    input_ids: torch.Tensor
    labels: torch.Tensor

    @staticmethod
    def of(samples: list[Sample]) -> "Batch":
        tokens = torch.from_numpy(np.stack([s.tokens for s in samples]).astype(np.int64, copy=False))
        labels = tokens[:, 1:].clone()
        for row, sample in zip(labels, samples, strict=True):
            if sample.trained is not None:
                row[torch.from_numpy(~sample.trained)] = IGNORED
        return Batch(tokens[:, :-1].contiguous(), labels)

    def pin_memory(self) -> "Batch":
        return Batch(self.input_ids.pin_memory(), self.labels.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return Batch(*(t.to(device, non_blocking=non_blocking) for t in (self.input_ids, self.labels)))


@dataclass(frozen=True)
class StreamContext:
    """What a stream needs to know of the run. `epochs` None goes round for ever; otherwise the stream ends after it.

    `rank` of `world`: every rank reads its own share. `tokenizer` is the run's, if known: a dataset made with another
    one is refused. `vocab_size` is the model's: ids beyond it are refused."""

    seq_len: int
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world: int = 1
    tokenizer: Tokenizer | None = None
    epochs: int | None = None
    vocab_size: int | None = None


class Stream(ABC):
    """Samples in order, with positions."""

    @abstractmethod
    def next_sample(self) -> Sample:
        """The next sample. Raises StopIteration once `ctx.epochs` are over."""

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where the next sample comes from: JSON-able and small."""

    @abstractmethod
    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at `position`, which this stream or one opened alike gave. UserError if the data has changed."""


class Dataset(ABC):
    """A dataset type's options. Registered ones are frozen dataclasses."""

    @abstractmethod
    def open(self, ctx: StreamContext, flag: str) -> Stream:
        """Open the stream; everything that can be refused is refused here."""

    @abstractmethod
    def load_tokenizer(self, flag: str) -> Tokenizer | None:
        """The tokenizer its ids come from, or None when the dataset does not say."""


DATASETS: Registry[Dataset] = Registry("dataset type")


def make_dataset(spec: Mapping[str, Any], flag: str) -> Dataset:
    """The checked options of a dataset, from the JSON of a flag such as --train_ds."""
    if "type" not in spec:
        raise UserError(f"{flag}: the key 'type' is missing; allowed: {', '.join(DATASETS.names())}.")
    return DATASETS.make(str(spec["type"]), {k: v for k, v in spec.items() if k != "type"}, flag)


def open_stream(spec: Mapping[str, Any], ctx: StreamContext, flag: str) -> Stream:
    """Open the dataset that `spec` describes. Raises UserError that names `flag`."""
    return make_dataset(spec, flag).open(ctx, flag)


def dataset_tokenizer(spec: Mapping[str, Any], flag: str) -> Tokenizer | None:
    """The tokenizer of the dataset that `spec` describes: named in it, or stored beside its token shards."""
    return make_dataset(spec, flag).load_tokenizer(flag)


def run_tokenizer(name: str, ctx: StreamContext, flag: str) -> Tokenizer:
    """The tokenizer `name` for a dataset of text, held against the run's tokenizer and the model's vocabulary."""
    if ctx.tokenizer is not None and ctx.tokenizer.name == name:
        tokenizer = ctx.tokenizer
    else:
        tokenizer = load_tokenizer(name, flag)
        check_same_tokenizer(ctx, name, tokenizer.fingerprint(), flag)
    if tokenizer.eos_id is None:
        raise UserError(f"{flag}: the tokenizer {name!r} names no end-of-text token, which separates documents.")
    if ctx.vocab_size is not None and tokenizer.vocab_size > ctx.vocab_size:
        raise UserError(
            f"{flag}: the tokenizer {name!r} has {tokenizer.vocab_size} ids, the model's vocabulary is "
            f"{ctx.vocab_size}. Use the model's own tokenizer, or a model with a larger vocab_size."
        )
    return tokenizer


def check_same_tokenizer(ctx: StreamContext, name: str, fingerprint: str, flag: str) -> None:
    """Refuse data whose tokenizer is not the run's: the same ids would mean other text."""
    if ctx.tokenizer is not None and ctx.tokenizer.fingerprint() != fingerprint:
        raise UserError(
            f"{flag}: its tokenizer {name!r} differs from the run's, {ctx.tokenizer.name!r}. All datasets of a run "
            "must be tokenized alike."
        )


def check_position(position: Mapping[str, Any], expected: Mapping[str, Any], flag: str) -> None:
    """Refuse to resume where `expected` (sizes that decide the order) differs from what the position was taken with."""
    for key, value in expected.items():
        if position.get(key) != value:
            raise UserError(
                f"{flag}: cannot resume: the checkpoint's data position has {key} {position.get(key)!r}, this run has "
                f"{value!r}. Give the dataset and settings of the interrupted run."
            )
