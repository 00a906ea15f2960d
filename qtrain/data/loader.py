"""Micro-batches of text, prefetched by a thread or by a separate process.

One producer per rank reads, tokenizes and packs the samples of all ranks and keeps every `ranks`-th micro-batch: the
order of samples, and every position, are the same for any number of ranks and workers. With `num_workers` 0 the
producer is a thread of this process. With N it is a process whose tokenizer runs on N threads, so that the GIL never
delays the training loop.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qtrain.data.batch import Batch
from qtrain.data.prefetch import PrefetchLoader, PrefetchProcess, PrefetchThread
from qtrain.data.stream import Stream

Item = tuple[Batch, dict[str, Any]]


class Loader(PrefetchLoader):
    """Iterates (Batch, position after it) from the current place of `stream`; ends when the stream does.

    position: seek there first. rank, ranks: of each `ranks` micro-batches take number `rank`; the position is that
    after all of them. prefetch: micro-batches that are produced ahead."""

    def __init__(
        self,
        stream: Stream,
        micro_batch_size: int,
        *,
        num_workers: int = 0,
        position: Mapping[str, Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
        prefetch: int = 8,
        pin_memory: bool | None = None,
    ):
        if position is not None:
            stream.seek(position)
        if num_workers:
            args = (stream.reopen, stream.position(), micro_batch_size, rank, ranks, num_workers, prefetch)
            producer = PrefetchProcess(_batches_in_process, args)
        else:
            producer = PrefetchThread(batches(stream, micro_batch_size, rank, ranks), prefetch)
        super().__init__([producer], pin_memory=pin_memory)


def batches(stream: Stream, micro_batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[Item]:
    """Number `rank` of each `ranks` full micro-batches of `stream`, with the position after all of them. Samples left
    over at the end are dropped."""
    while True:
        try:
            stream.skip(rank * micro_batch_size)
            samples = [stream.next_sample() for _ in range(micro_batch_size)]
            stream.skip((ranks - 1 - rank) * micro_batch_size)
        except StopIteration:
            return
        yield Batch.of(samples), stream.position()


def _batches_in_process(
    reopen: Callable[[], Stream],
    position: dict[str, Any],
    micro_batch_size: int,
    rank: int,
    ranks: int,
    threads: int,
    prefetch: int,
) -> Iterator[Item]:
    """`batches` from `position` on, with a tokenizer of `threads` threads."""
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM=str(threads > 1).lower())
    with contextlib.suppress(ImportError):  # the lock of `datasets`' progress bars would be reported as leaked
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())
    stream = reopen()
    stream.seek(position)
    yield from PrefetchThread(batches(stream, micro_batch_size, rank, ranks), prefetch)
