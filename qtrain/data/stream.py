"""The interface of text datasets: a stream of samples, each at a position that it can be resumed from.

A dataset type is a frozen dataclass in DATASETS whose fields are its JSON options. It opens as a `Stream`. A position
is a small JSON object taken after a sample. Seeking a fresh stream to it gives exactly the next sample, across file and
epoch boundaries.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrain.core.checks import shown
from qtrain.core.errors import UserError
from qtrain.core.maybe_none import MaybeNone
from qtrain.core.registry import Registry
from qtrain.data.batch import Sample
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class StreamContext:
    """What a stream needs to know about the run. `epochs`: the stream ends after them; None: it never ends.

    `tokenizer`: the run's, if known; a dataset with another one is refused. `vocab_size`: the model's; larger ids are
    refused.

    For examples with a beginning and an end (instructions, chats): `seq_len_multiple` 0 packs several into a sample; N
    makes each a sample of its own, padded to a multiple of N tokens, with `micro_batch_size` of similar length
    together."""

    seq_len: int
    seed: int = 0
    shuffle: bool = True
    tokenizer: Tokenizer | MaybeNone = None
    epochs: int | None = None
    vocab_size: int | None = None
    seq_len_multiple: int = 0
    micro_batch_size: int = 1


@dataclass(frozen=True)
class Extent:
    """A file, or a split of a hub dataset, and the part of it that a stream reads: its items whose keys hash to
    [start, end) of the unit interval (`files.split_of`)."""

    source: str
    start: float = 0.0
    end: float = 1.0


def shared_sources(reads: Sequence[Extent], others: Sequence[Extent]) -> list[str]:
    """The sources of `reads` of which a part is in `others` too."""
    known: dict[str, list[Extent]] = {}
    for other in others:
        known.setdefault(other.source, []).append(other)
    return [
        extent.source
        for extent in reads
        if any(extent.start < o.end and o.start < extent.end for o in known.get(extent.source, ()))
    ]


ESTIMATED_FROM = 256  # documents or rows that `Stream.estimated_samples` reads

SKIPPED = "skipped"
"""In a position: bad records that were passed over before it."""


class Stream(ABC):
    """Samples in order, with positions."""

    reopen: Callable[[], "Stream"]
    """Opens the same data again, at its start, also in another process. `open_stream` sets it."""

    samples_per_epoch: int | None = None
    """None where it is known only after reading everything."""

    def estimated_samples(self) -> float | None:
        """About as many, from a part of the data; None where its size is not known. The stream stays where it is."""
        return self.samples_per_epoch

    files: Sequence[Path] = ()
    """The local files that it reads, in the order that positions count in; none where it does not know them."""

    reads: Sequence[Extent] = ()
    """All that it reads, so that evaluation data can be told from training data."""

    @abstractmethod
    def next_sample(self) -> Sample:
        """The next sample. Raises StopIteration after `ctx.epochs`."""

    def skip(self, count: int) -> None:
        """Pass over `count` samples, which other ranks read. Raises StopIteration like `next_sample`."""
        for _ in range(count):
            self.next_sample()

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where the next sample comes from: small and JSON-serializable."""

    @abstractmethod
    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at a position of this stream or of one opened with the same options. UserError if the data
        changed."""


class Dataset(ABC):
    """A dataset type's options. Registered ones are frozen dataclasses."""

    tokenizer: str | None = None
    """Name of the tokenizer, an option of most types."""

    @abstractmethod
    def open(self, ctx: StreamContext, flag: str) -> Stream:
        """Open the stream. Whatever can be refused is refused here, as UserError naming `flag`."""

    def load_tokenizer(self, flag: str) -> Tokenizer | None:
        """The tokenizer of its ids, or None where the dataset names none."""
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer, flag)

    def tokenizes(self, flag: str) -> bool:
        """Whether it reads text, which needs a tokenizer: its own or the model's."""
        return True

    def chat_template(self, tokenizer: Tokenizer, flag: str) -> str | None:
        """The Jinja template, as a tokenizer has one, that renders messages as the text of this dataset: the exported
        tokenizer gets it. None: it keeps its own, or has none."""
        return None


DATASETS: Registry[Dataset] = Registry(
    "dataset type",
    modules=[
        "qtrain.data.examples.chat_dataset",
        "qtrain.data.examples.instruct_dataset",
        "qtrain.data.text.mix_dataset",
        "qtrain.data.text.text_datasets",
        "qtrain.data.text.token_dataset",
    ],
)


def open_stream(spec: Mapping[str, Any], ctx: StreamContext, flag: str) -> Stream:
    """Open the dataset that the JSON `spec` of `flag` describes. Raises UserError naming `flag`."""
    stream = DATASETS.make_typed(spec, flag).open(ctx, flag)
    # Pickled to the data process, which opens the files itself.
    stream.reopen = functools.partial(open_stream, spec, ctx, flag)
    return stream


COUNTED_TOKENS = 300e6
"""As many are tokenized to count the samples of an epoch, in a few minutes."""


def count_samples(spec: Mapping[str, Any], stream: Stream, ctx: StreamContext, flag: str) -> int:
    """The samples of an epoch of the dataset `spec`, open as `stream`: as it knows them, or by reading all of it.
    UserError naming `flag` where that has no end, or would take long."""
    if stream.samples_per_epoch is not None:
        return stream.samples_per_epoch
    kind, about = shown(spec["type"]), stream.estimated_samples()
    if about is None:
        raise UserError(f"{flag}: the size of data of type {kind} is not known before all are read; give --n_steps.")
    if about * ctx.seq_len > COUNTED_TOKENS:
        raise UserError(
            f"{flag}: some {about:,.0f} sequences of data of type {kind} would have to be tokenized to count them; "
            "give --n_steps, or tokenize them first with tokenize_data.py."
        )
    # A stream of its own, which ends after an epoch: `stream` stays where it is.
    epoch = open_stream(spec, dataclasses.replace(ctx, epochs=1), flag)
    count = 0
    try:
        while True:
            epoch.next_sample()
            count += 1
    except StopIteration:
        return count


def dataset_tokenizer(spec: Mapping[str, Any], flag: str) -> Tokenizer | None:
    """The tokenizer of the dataset that `spec` describes: named in it, or stored with its token shards."""
    return DATASETS.make_typed(spec, flag).load_tokenizer(flag)


def tokenizer_needed(data: str, flags: str) -> UserError:
    """The error for data of the flag `data` that name no tokenizer, which `flags` need."""
    return UserError(f'{data}: it does not say its tokenizer, needed for {flags}; add "tokenizer":"NAME" to it.')


def with_chat_template(tokenizer: Tokenizer, spec: Mapping[str, Any], flag: str) -> Tokenizer:
    """The tokenizer with the chat template of the dataset that `spec` describes, if that has one."""
    template = DATASETS.make_typed(spec, flag).chat_template(tokenizer, flag)
    return tokenizer if template is None else tokenizer.with_chat_template(template)


def checked_tokenizer(name: str | None, ctx: StreamContext, flag: str) -> Tokenizer:
    """The tokenizer `name` of a text dataset; None: the run's. UserError unless it fits the run's tokenizer and the
    model's vocabulary, and has an end token."""
    name = name or (None if ctx.tokenizer is None else ctx.tokenizer.name)
    if name is None:
        raise UserError(
            f'{flag}: it does not say its tokenizer; add "tokenizer":"NAME" to it (--pretrained models have their own).'
        )
    if ctx.tokenizer is not None and ctx.tokenizer.name == name:
        tokenizer = ctx.tokenizer
    else:
        tokenizer = load_tokenizer(name, flag)
        check_same_tokenizer(ctx, name, tokenizer.fingerprint(), flag)
    # Documents follow each other without a gap: the end token alone tells them apart.
    if tokenizer.eos_id is None:
        raise UserError(f"{flag}: the tokenizer {name!r} names no end-of-text token, which separates documents.")
    if ctx.vocab_size is not None and tokenizer.vocab_size > ctx.vocab_size:
        raise UserError(
            f"{flag}: the tokenizer {name!r} has {tokenizer.vocab_size} ids, the model's vocabulary is "
            f"{ctx.vocab_size}. Use the model's own tokenizer, or a model with a larger vocab_size."
        )
    return tokenizer


def check_same_tokenizer(ctx: StreamContext, name: str, fingerprint: str, flag: str) -> None:
    """Refuse data of another tokenizer than the run's: the same ids would mean different text."""
    if ctx.tokenizer is not None and ctx.tokenizer.fingerprint() != fingerprint:
        raise UserError(
            f"{flag}: its tokenizer {name!r} differs from the run's, {ctx.tokenizer.name!r}. All datasets of a run "
            "must use the same tokenizer."
        )


def check_kind(position: Any, like: Any, flag: str) -> None:
    """Refuse a position in which something else stands where `like`, a position of this stream, has a count."""
    if isinstance(like, dict) and isinstance(position, Mapping):
        for key in like.keys() & position.keys():
            check_kind(position[key], like[key], flag)
    elif isinstance(like, list) and isinstance(position, list):
        for inner, like_inner in zip(position, like, strict=False):  # a mix checks its own number of components
            check_kind(inner, like_inner, flag)
    elif isinstance(like, int) and not (isinstance(position, int) and position >= 0):
        raise UserError(f"{flag}: cannot resume: the checkpoint's data position has {shown(position)} for a count.")


FLAG_OF = {
    "batch_size": "--batch_size",
    "multiple": "--seq_len_multiple",
    "seed": "--seed",
    "seq_len": "--seq_len",
    "together": "--micro_batch_size",
}
"""Keys of a position that are a setting of the run, not of its data, and the flag that sets them."""


def check_position(position: Mapping[str, Any], expected: Mapping[str, Any], flag: str) -> None:
    """Refuse a position that was taken with other values of `expected` (what determines the order of samples). The
    UserError names the flag of the value, or else `flag`, that of the data."""
    for key, value in expected.items():
        if position.get(key) != value:
            if key in position and (own := FLAG_OF.get(key)):
                raise UserError(
                    f"{own}: cannot resume: the checkpoint's run had {own} {shown(position[key])}, this one has "
                    f"{shown(value)}, so its place in the data means nothing here. Give {own} {shown(position[key])}, "
                    "or start a new run from its export."
                )
            raise UserError(
                f"{flag}: cannot resume: the checkpoint's data position has {key} {position.get(key)!r}, this run has "
                f"{value!r}. Use the dataset and settings of the interrupted run."
            )
