"""What every dataset gives to training: samples one after the other, each at a position that can be returned to.

A dataset type is a frozen dataclass in DATASETS whose fields are its JSON options. It opens as a `Stream`. A position
is a small JSON object taken after a sample; seeking a fresh stream to it gives the next sample exactly, across file and
epoch ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch

from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from qtrain.errors import UserError
from qtrain.registry import Registry

IGNORED = -100
"""The label of a position that is not trained on."""


@dataclass(frozen=True)
class Sample:
    """`tokens` int64 [S+1]; `trained` bool [S] or None for all: whether the label of position i, token i+1, counts.

    `doc_ids` int64 [S]: the document that the token of a position belongs to, where samples know it."""

    tokens: np.ndarray
    trained: np.ndarray | None = None
    doc_ids: np.ndarray | None = None


class TensorBatch:
    """A micro-batch: a frozen dataclass whose fields are tensors, or None."""

    @property
    def size(self) -> int:
        """What a run counts: all tokens, trained on or not, or images."""
        raise NotImplementedError

    @property
    def n_trained(self) -> int:
        """How many of them the loss is summed over."""
        raise NotImplementedError

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that there are, in the order of the fields."""
        return tuple(t for f in fields(self) if (t := getattr(self, f.name)) is not None)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A batch of `change` of every tensor."""
        values = (getattr(self, f.name) for f in fields(self))
        return type(self)(*(None if t is None else change(t) for t in values))

    def pin_memory(self) -> Self:
        return self.each(lambda t: t.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self.each(lambda t: t.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class Batch(TensorBatch):
    """`input_ids` int64 [B, S]; `labels` int64 [B, S], already shifted: label i is token i+1, or -100 (IGNORED).

    `doc_ids` int64 [B, S], where samples know them: attention stays within equal ids, positions restart at each."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    doc_ids: torch.Tensor | None = None

    @staticmethod
    def of(samples: list[Sample]) -> "Batch":
        """Rows of `samples`; shorter ones are padded at their end, with tokens whose labels do not count."""
        length = max(len(s.tokens) for s in samples)
        tokens = torch.from_numpy(np.stack([_padded(s.tokens, length) for s in samples]).astype(np.int64, copy=False))
        labels = tokens[:, 1:].clone()
        for row, sample in zip(labels, samples, strict=True):
            row[len(sample.tokens) - 1 :] = IGNORED
            if sample.trained is not None:
                row[: len(sample.trained)][torch.from_numpy(~sample.trained)] = IGNORED
        doc_ids = None
        if any(s.doc_ids is not None for s in samples):
            of_each = [np.zeros(len(s.tokens) - 1, np.int64) if s.doc_ids is None else s.doc_ids for s in samples]
            doc_ids = torch.from_numpy(np.stack([_padded(ids, length - 1) for ids in of_each]))
        return Batch(tokens[:, :-1].contiguous(), labels, doc_ids)

    @property
    def size(self) -> int:
        return self.input_ids.numel()

    @property
    def n_trained(self) -> int:
        return int((self.labels >= 0).sum())


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """`values` with its last one repeated up to `length`."""
    return values if len(values) == length else np.pad(values, (0, length - len(values)), mode="edge")


@dataclass(frozen=True)
class StreamContext:
    """What a stream needs to know of the run. `epochs` None goes round for ever; otherwise the stream ends after it.

    `rank` of `world`: every rank reads its own share. `tokenizer` is the run's, if known: a dataset made with another
    one is refused. `vocab_size` is the model's: ids beyond it are refused.

    Of examples with a beginning and an end (instructions, chats): `seq_len_multiple` 0 packs several into a sample; N
    makes each a sample of its own, padded to a multiple of N tokens, `micro_batch_size` of like length in a row."""

    seq_len: int
    seed: int = 0
    shuffle: bool = True
    rank: int = 0
    world: int = 1
    tokenizer: Tokenizer | None = None
    epochs: int | None = None
    vocab_size: int | None = None
    seq_len_multiple: int = 0
    micro_batch_size: int = 1


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
