"""Micro-batches ahead of time: (batch, position after it), made by a thread or by a process of its own.

One producer per rank reads, tokenizes and packs, so the order of samples and every position are the same for any number
of workers. With `num_workers` 0 the producer is a thread of this process; with N it is a separate process whose
tokenizer runs on N threads, so that Python's lock never holds up the training loop. The position that comes with a
batch is the one right after it, however far the producer has run ahead.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from qtrain.data.stream import Batch, Sample, Stream, StreamContext, open_stream
from qtrain.errors import UserError

Item = tuple[Batch, dict[str, Any]]
Opener = Callable[[], Stream]


class Loader:
    """Iterates (Batch, position); ends only when the stream does.

    `position`: continue there. A UserError of the producer is raised here, once. Call `close` (or use `with`) to stop
    the producer."""

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
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        # Opened here as well as in a producer process: what is wrong with the dataset is said before anything starts.
        stream = open_stream(spec, ctx, flag)
        if position is not None:
            stream.seek(position)
        start = stream.position()
        if num_workers == 0:
            self._producer: AheadThread | _Process = AheadThread(batches(stream, micro_batch_size), prefetch)
        else:
            opener = functools.partial(open_stream, spec, ctx, flag)
            self._producer = _Process(opener, start, micro_batch_size, num_workers, prefetch)
        atexit.register(_close_producer, weakref.ref(self._producer))  # a forgotten one would disturb Python's exit

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Item:
        batch, position = self._producer.get()
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


class AheadThread:
    """Runs an iterator ahead in a daemon thread; what it raises is raised by `get`, once."""

    def __init__(self, items: Iterator[Item], prefetch: int):
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(items,), name="data", daemon=True)
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


class _Process:
    """The producer as a process of its own, and a thread here that receives.

    Not a torch DataLoader: that one raises in the middle of whatever the main thread is doing, a checkpoint perhaps,
    when its worker is ended by a signal that was meant for the whole process group."""

    def __init__(self, opener: Opener, position: Mapping[str, Any], micro_batch_size: int, threads: int, prefetch: int):
        context = multiprocessing.get_context("spawn")  # a forked process may not use the thread pools of its parent
        receiver, sender = context.Pipe(duplex=False)
        work = (sender, opener, dict(position), micro_batch_size, threads, prefetch)
        self._process = context.Process(target=_produce, args=work, name="data", daemon=True)
        self._process.start()
        sender.close()  # now only the process holds it: when the process dies, receiving ends
        self._received = AheadThread(_receive(receiver), prefetch=2)

    def get(self) -> Item:
        return self._received.get()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._received.close()


def _close_producer(producer: weakref.ref) -> None:
    if (alive := producer()) is not None:
        alive.close()


def _receive(receiver: Connection) -> Iterator[Item]:
    while True:
        try:
            item = receiver.recv()
        except (EOFError, OSError):
            raise RuntimeError("the data process has died; was it killed for memory?") from None
        if item is None:
            return
        if isinstance(item, BaseException):
            raise item
        *arrays, position = item
        yield Batch(*(None if a is None else torch.from_numpy(a) for a in arrays)), position


def _produce(
    sender: Connection, opener: Opener, position: dict, micro_batch_size: int, threads: int, prefetch: int
) -> None:
    """What the producer process runs. The end of the stream (None) and errors travel as items."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a stop meant for the whole group: training still finishes its step
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM=str(threads > 1).lower())
    with contextlib.suppress(ImportError):  # progress bars of `datasets` make a lock that would be reported as leaked
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())
    try:
        stream = opener()
        stream.seek(position)
        ahead = AheadThread(batches(stream, micro_batch_size), prefetch)
        with contextlib.suppress(StopIteration):
            while True:
                batch, after = ahead.get()
                tensors = (batch.input_ids, batch.labels, batch.doc_ids)
                sender.send((*(None if t is None else t.numpy() for t in tensors), after))
        sender.send(None)
    except BrokenPipeError:
        pass  # the receiver is gone, and its process perhaps with it
    except UserError as error:
        sender.send(error)
    except BaseException:
        sender.send(RuntimeError(f"in the data process:\n{traceback.format_exc()}"))
    os._exit(0)  # the threads of pyarrow and datasets do not survive an orderly exit
