"""Evaluation data: one dataset or several by name, and the windows of each, the same ones in every run."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtrain.core.checks import shown
from qtrain.core.errors import UserError
from qtrain.data.batch import Batch, Sample
from qtrain.data.stream import Extent, Stream, StreamContext, open_stream

_SET_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # as all trackers take it in the name of a metric


def eval_sets(spec: Mapping[str, Any] | None, flag: str) -> dict[str, Mapping[str, Any]]:
    """The datasets that `spec` describes, by name: a dataset alone is called "", and {"NAME": DATASET, ...}, without a
    key "type" of its own, are several. UserError naming `flag`. See `set_flag`."""
    if spec is None:
        return {}
    if "type" in spec or not any(isinstance(inner, Mapping) for inner in spec.values()):
        return {"": spec}
    for name, inner in spec.items():
        if not isinstance(inner, Mapping):
            raise UserError(
                f'{flag}: {shown(name)} is no dataset; give {{"type": ...}}, or {{"NAME": {{"type": ...}}, ...}}.'
            )
        if not _SET_NAME.fullmatch(name):
            raise UserError(
                f"{flag}: {shown(name)} cannot name a dataset; use letters, digits and _ . - only, 64 at most."
            )
    return dict(spec)


def set_flag(flag: str, name: str) -> str:
    """How errors name the dataset `name` of `flag`."""
    return f"{flag}.{name}" if name else flag


EVALUATION_SEED = 0


@dataclass(frozen=True)
class EvalWindows:
    """`batches`, and the number of windows in them; `reads`: what the stream of all windows reads; `n_all`: how many
    those are, where that is known before they are read."""

    batches: list[Batch]
    n_sequences: int
    n_all: int | None = None
    reads: Sequence[Extent] = ()


def all_eval_batches(spec: Mapping[str, Any], ctx: StreamContext, micro_batch_size: int, flag: str) -> Iterator[Batch]:
    """Every window once, in a fixed shuffled order, in batches, of which the last may be smaller."""
    return _batches(_eval_stream(spec, ctx, flag), micro_batch_size)


def eval_batches(
    spec: Mapping[str, Any], ctx: StreamContext, micro_batch_size: int, n_sequences: int, flag: str
) -> EvalWindows:
    """The first `n_sequences` windows of `all_eval_batches`. Raises UserError when there is no window."""
    stream = _eval_stream(spec, ctx, flag)
    batches = list(_batches(stream, micro_batch_size, n_sequences))
    if not batches:
        raise UserError(
            f"{flag}: it holds less than one window of seq_len+1 = {ctx.seq_len + 1} tokens. Give more data or a "
            "smaller --seq_len."
        )
    found = sum(len(batch.input_ids) for batch in batches)
    return EvalWindows(batches, found, stream.samples_per_epoch, stream.reads)


def _eval_stream(spec: Mapping[str, Any], ctx: StreamContext, flag: str) -> Stream:
    # Not the run's seed: losses of runs with different seeds are over the same windows.
    return open_stream(spec, dataclasses.replace(ctx, seed=EVALUATION_SEED, shuffle=True, epochs=1), flag)


def _batches(stream: Stream, micro_batch_size: int, n_sequences: int | None = None) -> Iterator[Batch]:
    """Batches of the stream's first `n_sequences` samples; None: of all."""

    def samples() -> Iterator[Sample]:
        with contextlib.suppress(StopIteration):  # the stream's end
            while True:
                yield stream.next_sample()

    found = itertools.islice(samples(), n_sequences)
    while batch := list(itertools.islice(found, micro_batch_size)):
        yield Batch.of(batch)
