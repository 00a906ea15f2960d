"""The windows that a run is evaluated on: always the same ones, for any seed and number of ranks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtrain.data.batch import Batch
from qtrain.data.stream import StreamContext, open_stream
from qtrain.errors import UserError

EVALUATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class EvalWindows:
    """This rank's `batches`, and the number of windows of all ranks."""

    batches: list[Batch]
    n_sequences: int


def eval_batches(
    spec: Mapping[str, Any], ctx: StreamContext, micro_batch_size: int, n_sequences: int, flag: str
) -> EvalWindows:
    """Up to `n_sequences` windows in a fixed shuffled order; those of this rank in batches.

    The last batch may be smaller. All ranks get equally many rows, padded with rows whose labels are all ignored
    (-100), so that ranks which run collectives on each batch stay in step. Raises UserError when there is no window."""
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
    padding = dataclasses.replace(samples[0], trained=np.zeros(len(samples[0].tokens) - 1, dtype=bool))
    own = (samples + [padding] * (-len(samples) % ctx.world))[ctx.rank :: ctx.world]
    starts = range(0, len(own), micro_batch_size)
    return EvalWindows([Batch.of(own[start : start + micro_batch_size]) for start in starts], len(samples))
