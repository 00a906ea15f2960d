"""Micro-batches of text, prefetched by a thread or by a separate process.

One producer per rank reads, tokenizes and packs, so the order of samples and every position are the same for any number
of workers. With `num_workers` 0 the producer is a thread of this process. With N it is a process whose tokenizer runs
on N threads, so that the GIL never delays the training loop.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qtrain.data.batch import Batch, Sample
from qtrain.data.prefetch import PrefetchLoader, PrefetchProcess, PrefetchThread
from qtrain.data.stream import Stream

Item = tuple[Batch, dict[str, Any]]


class Loader(PrefetchLoader):
    """Iterates (Batch, position after it) from the current place of `stream`; ends when the stream does.

    position: seek there first. prefetch: micro-batches that are produced ahead."""

    def __init__(
        self,
        stream: Stream,
        micro_batch_size: int,
        *,
        num_workers: int = 0,
        position: Mapping[str, Any] | None = None,
        prefetch: int = 8,
        pin_memory: bool | None = None,
    ):
        if position is not None:
            stream.seek(position)
        if num_workers:
            args = (stream.reopen, stream.position(), micro_batch_size, num_workers, prefetch)
            producer = PrefetchProcess(_batches_in_process, args)
        else:
            producer = PrefetchThread(batches(stream, micro_batch_size), prefetch)
        super().__init__([producer], pin_memory=pin_memory)


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


def _batches_in_process(
    reopen: Callable[[], Stream], position: dict[str, Any], micro_batch_size: int, threads: int, prefetch: int
) -> Iterator[Item]:
    """`batches` from `position` on, with a tokenizer of `threads` threads."""
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM=str(threads > 1).lower())
    with contextlib.suppress(ImportError):  # the lock of `datasets`' progress bars would be reported as leaked
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())
    stream = reopen()
    stream.seek(position)
    yield from PrefetchThread(batches(stream, micro_batch_size), prefetch)
