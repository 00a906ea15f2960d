"""The windows that a run is evaluated on: the same ones every time, whatever the run's seed and number of ranks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtrain.data.stream import Batch, StreamContext, open_stream
from qtrain.errors import UserError

EVALUATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class EvalWindows:
    """This rank's `batches`, and how many windows there are over all ranks."""

    batches: list[Batch]
    n_sequences: int


def eval_batches(
    spec: Mapping[str, Any], ctx: StreamContext, micro_batch_size: int, n_sequences: int, flag: str
) -> EvalWindows:
    """Up to `n_sequences` windows in an order shuffled once for all, those of this rank in batches.

    The last batch may be smaller. Every rank gets as many rows as the others, filled up with rows of which nothing is
    trained on (labels -100), so that ranks which work together on each batch stay in step.
    Raises UserError when there is not one window."""
    whole = dataclasses.replace(ctx, seed=EVALUATION_SEED, shuffle=True, rank=0, world=1, epochs=1)
    stream, samples = open_stream(spec, whole, flag), []
    try:
        while len(samples) < n_sequences:
            samples.append(stream.next_sample())
    except StopIteration:
        pass
    if not samples:
        raise UserError(
            f"{flag}: it holds less than one window of seq_len+1 = {ctx.seq_len + 1} tokens. Give more data or a "
            "smaller --seq_len."
        )
    filling = dataclasses.replace(samples[0], trained=np.zeros(len(samples[0].tokens) - 1, dtype=bool))
    own = (samples + [filling] * (-len(samples) % ctx.world))[ctx.rank :: ctx.world]
    starts = range(0, len(own), micro_batch_size)
    return EvalWindows([Batch.of(own[start : start + micro_batch_size]) for start in starts], len(samples))
