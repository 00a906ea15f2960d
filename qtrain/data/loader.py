"""Micro-batches ahead of time: (batch, position after it), made by a thread or by a process of its own.

One producer per rank reads, tokenizes and packs, so the order of samples and every position are the same for any number
of workers. With `num_workers` 0 the producer is a thread of this process; with N it is a separate process whose
tokenizer runs on N threads, so that Python's lock never holds up the training loop. The position that comes with a
batch is the one right after it, however far the producer has run ahead.
"""

import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from qtrain.data.stream import Batch, Sample, Stream, StreamContext, open_stream
from qtrain.errors import UserError

Item = tuple[Batch, dict[str, Any]]


class Loader:
    """Iterates (Batch, position); ends only when the stream does.

    `position`: continue there. `wait_s` adds up the seconds that the caller waited for data; set it to 0 at will.
    A UserError of the producer is raised here, once. Call `close` (or use `with`) to stop the producer."""

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
    ):
        self.wait_s = 0.0
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        # Opened here as well as in a producer process: what is wrong with the dataset is said before anything starts.
        stream = open_stream(spec, ctx, flag)
        if position is not None:
            stream.seek(position)
        start = stream.position()
        if num_workers == 0:
            self._producer: _Thread | _Process = _Thread(stream, micro_batch_size, prefetch)
        else:
            opener = functools.partial(open_stream, spec, ctx, flag)
            self._producer = _Process(opener, start, micro_batch_size, num_workers, prefetch)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Item:
        started = time.perf_counter()
        try:
            batch, position = self._producer.get()
        finally:
            self.wait_s += time.perf_counter() - started
        return (batch.pin_memory() if self._pin else batch), position

    def close(self) -> None:
        self._producer.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


class _Thread:
    """The producer as a daemon thread with a bounded queue."""

    def __init__(self, stream: Stream, micro_batch_size: int, prefetch: int):
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._ended = False
        work = (batches(stream, micro_batch_size),)
        self._thread = threading.Thread(target=self._run, args=work, name="data", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> Item:
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        return item

    def close(self) -> None:
        self._ended = True
        self._stop.set()
        self._thread.join(timeout=10)


class _Batches(IterableDataset):
    """The stream inside the producer process. A UserError travels as an item: raised there, torch would wrap it."""

    def __init__(self, opener: functools.partial, position: Mapping[str, Any], micro_batch_size: int):
        self._opener, self._position, self._micro_batch_size = opener, position, micro_batch_size

    def __iter__(self) -> Iterator[Item | UserError]:
        try:
            stream = self._opener()
            stream.seek(self._position)
            yield from batches(stream, self._micro_batch_size)
        except UserError as error:
            yield error


def _prepare_process(threads: int, worker: int) -> None:
    """In the producer process, before the tokenizer library starts its thread pool there."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a stop meant for the whole group: training still finishes its step
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM=str(threads > 1).lower())


class _Process:
    """The producer as one worker process of a torch DataLoader, which watches over its life and moves the tensors."""

    def __init__(self, opener: Any, position: Mapping[str, Any], micro_batch_size: int, threads: int, prefetch: int):
        loader = DataLoader(
            _Batches(opener, position, micro_batch_size),
            batch_size=None,
            num_workers=1,
            prefetch_factor=prefetch,
            worker_init_fn=functools.partial(_prepare_process, threads),
            multiprocessing_context="spawn",  # a forked process may not use the thread pools of its parent
        )
        self._items = iter(loader)

    def get(self) -> Item:
        item = next(self._items)
        if isinstance(item, UserError):
            raise item
        return item

    def close(self) -> None:
        self._items = iter(())  # the DataLoader's iterator stops its worker when it is collected
