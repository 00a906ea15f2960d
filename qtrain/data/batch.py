"""Samples of text, and micro-batches of tensors."""

from collections.abc import Callable
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import torch

IGNORED = -100  # the label of a position that is not trained on


@dataclass(frozen=True)
class Sample:
    """`tokens` int64 [S+1]. `trained` bool [S], or None for all: whether the label of position i, token i+1, counts.
    `doc_ids` int64 [S], where known: the document of each position's token."""

    tokens: np.ndarray
    trained: np.ndarray | None = None
    doc_ids: np.ndarray | None = None


class TensorBatch:
    """A micro-batch: a frozen dataclass whose fields are tensors or None."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def size(self) -> int:
        """What a run counts: all tokens, trained on or not; or images."""
        raise NotImplementedError

    @property
    def n_trained(self) -> int:
        """How many of them the loss is summed over."""
        raise NotImplementedError

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that are not None, in the order of the fields."""
        return tuple(t for f in fields(self) if (t := getattr(self, f.name)) is not None)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A batch of `change(tensor)` for every tensor."""
        values = (getattr(self, f.name) for f in fields(self))
        return type(self)(*(None if t is None else change(t) for t in values))

    def pin_memory(self) -> Self:
        return self.each(lambda t: t.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self.each(lambda t: t.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class Batch(TensorBatch):
    """`input_ids` int64 [B, S]. `labels` int64 [B, S], already shifted: label i is token i+1, or -100 (IGNORED).
    `doc_ids` int64 [B, S], where known: attention stays within equal ids, and positions restart at each document."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    doc_ids: torch.Tensor | None = None

    @staticmethod
    def of(samples: list[Sample]) -> "Batch":
        """One row per sample; shorter ones are padded at the end with tokens whose labels are ignored."""
        length = max(len(s.tokens) for s in samples)
        tokens = torch.from_numpy(np.stack([_padded(s.tokens, length) for s in samples]).astype(np.int64, copy=False))
        labels = tokens[:, 1:].clone()  # [B, S], shifted; a copy, since ignored positions are overwritten
        for row, sample in zip(labels, samples, strict=True):
            row[len(sample.tokens) - 1 :] = IGNORED  # the padding
            if sample.trained is not None:
                row[: len(sample.trained)][torch.from_numpy(~sample.trained)] = IGNORED
        # Without any ids attention is over the whole row, and takes a faster kernel.
        doc_ids = None
        if any(s.doc_ids is not None for s in samples):
            ids = [np.zeros(len(s.tokens) - 1, np.int64) if s.doc_ids is None else s.doc_ids for s in samples]
            doc_ids = torch.from_numpy(np.stack([_padded(row, length - 1) for row in ids]))
        return Batch(tokens[:, :-1].contiguous(), labels, doc_ids)  # input_ids [B, S]

    @property
    def size(self) -> int:
        return self.input_ids.numel()

    @property
    def n_trained(self) -> int:
        return int((self.labels >= 0).sum())


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """`values` padded to `length` by repeating the last one."""
    # The last document goes on: no id of its own for padding.
    return values if len(values) == length else np.pad(values, (0, length - len(values)), mode="edge")
