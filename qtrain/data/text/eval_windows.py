"""The windows that a run is evaluated on: always the same ones, for any seed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qtrain.core.errors import UserError
from qtrain.data.batch import Batch
from qtrain.data.stream import StreamContext, open_stream

EVALUATION_SEED = 0


@dataclasses.dataclass(frozen=True)
class EvalWindows:
    """`batches`, and the number of windows in them."""

    batches: list[Batch]
    n_sequences: int


def eval_batches(
    spec: Mapping[str, Any], ctx: StreamContext, micro_batch_size: int, n_sequences: int, flag: str
) -> EvalWindows:
    """Up to `n_sequences` windows in a fixed shuffled order, in batches, of which the last may be smaller. Raises
    UserError when there is no window."""
    whole = dataclasses.replace(ctx, seed=EVALUATION_SEED, shuffle=True, epochs=1)
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
    starts = range(0, len(samples), micro_batch_size)
    return EvalWindows([Batch.of(samples[start : start + micro_batch_size]) for start in starts], len(samples))
