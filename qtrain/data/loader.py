"""Micro-batches ahead of time: (batch, position after it), made by a thread or by a process of its own.

One producer per rank reads, tokenizes and packs, so the order of samples and every position are the same for any number
of workers. With `num_workers` 0 the producer is a thread of this process; with N it is a separate process whose
tokenizer runs on N threads, so that Python's lock never holds up the training loop. The position that comes with a
batch is the one right after it, however far the producer has run ahead.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qtrain.data.prefetch import PrefetchLoader, PrefetchProcess, PrefetchThread
from qtrain.data.stream import Batch, Sample, Stream, StreamContext, open_stream

Item = tuple[Batch, dict[str, Any]]
Opener = Callable[[], Stream]


class Loader(PrefetchLoader):
    """Iterates (Batch, position); ends only when the stream does.

    `position`: continue there. `stream`: the dataset, opened already and at its start. A UserError of the producer is
    raised here, once."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        ctx: StreamContext,
        micro_batch_size: int,
        flag: str,
        *,
        num_workers: int = 0,
        position: Mapping[str, Any] | None = None,
        prefetch: int = 8,
        pin_memory: bool | None = None,
        stream: Stream | None = None,
    ):
        # Opened here as well as in a producer process: what is wrong with the dataset is said before anything starts.
        stream = stream or open_stream(spec, ctx, flag)
        if position is not None:
            stream.seek(position)
        if num_workers == 0:
            super().__init__(PrefetchThread(batches(stream, micro_batch_size), prefetch), pin_memory)
            return
        opener = functools.partial(open_stream, spec, ctx, flag)
        work = (opener, stream.position(), micro_batch_size, num_workers, prefetch)
        super().__init__(PrefetchProcess(_batches_of_process, work), pin_memory)


def batches(stream: Stream, micro_batch_size: int) -> Iterator[Item]:
    """Full micro-batches of `stream`, each with the position after it. Samples left over at the end are dropped."""
    while True:
        samples: list[Sample] = []
        while len(samples) < micro_batch_size:
            try:
                samples.append(stream.next_sample())
            except StopIteration:
                return
        yield Batch.of(samples), stream.position()


def _batches_of_process(
    opener: Opener, position: dict[str, Any], micro_batch_size: int, threads: int, prefetch: int
) -> Iterator[Item]:
    """`batches` from `position` on, in a process of their own whose tokenizer runs on `threads` threads."""
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM=str(threads > 1).lower())
    with contextlib.suppress(ImportError):  # progress bars of `datasets` make a lock that would be reported as leaked
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())
    stream = opener()
    stream.seek(position)
    yield from PrefetchThread(batches(stream, micro_batch_size), prefetch)
