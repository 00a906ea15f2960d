"""Prefetching: micro-batches are produced ahead of the training loop by threads or processes, and handed out in order.

The position that comes with a batch is the one right after it, however far a producer has run ahead, so a run resumes
exactly. A process sends a batch as the shapes and dtypes of its tensors, then their bytes, which are received in place:
where there is a GPU in pinned memory, from which they are copied to it while it computes.

Of text (`Loader`) there is one producer per rank. It reads, tokenizes and packs the samples of all ranks and keeps
every `ranks`-th micro-batch: the order of samples, and every position, are the same for any number of ranks and
workers. With `num_workers` 0 the producer is a thread of this process. With N it is a process whose tokenizer runs on N
threads, so that the GIL never delays the training loop.

Not a torch DataLoader: when one of its workers is killed by a signal to the process group, it raises in the middle of
whatever the main thread is doing, such as writing a checkpoint.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

import torch

from qtrain.core.errors import UserError
from qtrain.core.process import GROUP_SIGNALS, prepare_process
from qtrain.data.batch import Batch, TensorBatch
from qtrain.data.stream import Stream

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Item = tuple[TensorBatch, dict[str, Any]]  # A batch and the position right after it

T = TypeVar("T")

PIPES_ARE_FILES = hasattr(os, "readv")
"""Not on Windows."""
PIPE_BYTES = 1 << 20
"""That a pipe from a process holds, the most that Linux allows. The default is 64 KiB: a batch of images is 600."""


class PrefetchThread(Generic[T]):
    """Runs an iterator ahead in a daemon thread. An exception of the iterator is raised by `get`, once."""

    def __init__(self, items: Iterator[T], prefetch: int):
        # Bounded: the producer waits when the training loop is slower.
        self._queue: queue.Queue[T | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(items,), name="data", daemon=True)
        self._thread.start()
        atexit.register(_close, weakref.ref(self))  # an open one would disturb the interpreter's exit

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:
            self._put(error)

    def _put(self, item: T | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)  # not without a timeout: `close` could not end it
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        with contextlib.suppress(StopIteration):
            while True:
                yield self.get()

    def get(self) -> T:
        """The next item. Raises StopIteration at the end."""
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        # After all items that were produced before the error.
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        return item

    def close(self) -> None:
        self._ended = True
        self._stop.set()
        with contextlib.suppress(queue.Empty):  # a thread that waits for room goes on, and ends
            while True:
                self._queue.get_nowait()
        self._thread.join(timeout=10)  # it may be in a read of the network: the process may end without it


class PrefetchProcess(PrefetchThread[Item]):
    """Runs `produce(*args)`, a function of a module, in a process; a thread here receives its items.

    They are pickled here: torch would send tensors among them through /dev/shm, which may be read-only or full."""

    def __init__(self, produce: Callable[..., Iterator[Item]], args: tuple, prefetch: int = 2):
        # The child imports the module of `produce` by name, so that is a function of a module.
        context = multiprocessing.get_context("spawn")  # a forked process may not use the thread pools of its parent
        receiver, sender = context.Pipe(duplex=False)
        if fcntl is not None:
            with contextlib.suppress(OSError, AttributeError):  # AttributeError: only Linux sets it
                fcntl.fcntl(sender.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        # `start` writes the arguments of the process into a pipe. What does not fit waits until it reads them, which
        # is after it has imported torch: the work is sent by the thread, so that processes start together.
        read_work, send_work = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(sender, read_work), name="data", daemon=True)
        self.process.start()
        # Only the process holds them now: when the process dies, sending and receiving end.
        sender.close(), read_work.close()
        super().__init__(_receive(receiver, send_work, pickle.dumps((produce, args))), prefetch)

    def close(self) -> None:
        # SIGKILL: it may be in the middle of a read of the network, and holds nothing to be saved
        self.process.kill()
        self.process.join()
        super().close()


class PrefetchLoader(Iterator[Item]):
    """Iterates the items of `producers` in turn. `close`, or `with`, stops them. Where there is a GPU, batches are
    pinned for copies to it.

    finish: makes the (batch, position) of a produced item, in the thread of the caller; None: it is one.
    """

    def __init__(self, producers: Sequence[PrefetchThread], *, finish: Callable[[Any], Item] | None = None):
        self.producers, self._finish, self._turn = producers, finish, 0
        self._pin = torch.cuda.is_available()

    def __next__(self) -> Item:
        item = self.producers[self._turn % len(self.producers)].get()
        self._turn += 1
        batch, position = item if self._finish is None else self._finish(item)
        return (batch.pin_memory() if self._pin else batch), position

    def close(self) -> None:
        for producer in self.producers:
            producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(producer: weakref.ref) -> None:
    if (alive := producer()) is not None:
        alive.close()


# ---- across processes ------------------------------------------------------------------------------------------------


def _serve(sender: Connection, read_work: Connection) -> None:
    """The main function of the process. The end (None) and errors are sent like items."""
    prepare_process()
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a signal to the process group: training still finishes its step
    with contextlib.suppress(BrokenPipeError):  # the receiver is gone, perhaps with its process
        try:
            produce, args = read_work.recv()
            for batch, position in produce(*args):
                _send(sender, batch, position)
            sender.send(None)
        except BrokenPipeError:
            raise
        except UserError as error:
            sender.send(error)
        except BaseException:
            sender.send(RuntimeError(f"in a data process:\n{traceback.format_exc()}"))
    os._exit(0)  # the threads of pyarrow and datasets do not survive an orderly exit


def _send(sender: Connection, batch: TensorBatch, position: dict[str, Any]) -> None:
    # Shapes and dtypes first; the bytes follow, one message a tensor.
    sender.send((batch.each(lambda t: t.to("meta")), position))
    for tensor in batch.tensors():
        _write(sender, _bytes_of(tensor.contiguous()))


def _write(sender: Connection, data: memoryview) -> None:
    if not PIPES_ARE_FILES:
        sender.send_bytes(data)
        return
    while data:
        data = data[os.write(sender.fileno(), data) :]


def _read(receiver: Connection, data: memoryview) -> None:
    """Into `data`, all that `_write` was given. Not by `recv_bytes_into` where a pipe is a file: for each piece that it
    holds that allocates all that is left, and it copies twice."""
    if not PIPES_ARE_FILES:
        receiver.recv_bytes_into(data)
        return
    while data:
        received = os.readv(receiver.fileno(), [data])
        if not received:
            raise EOFError
        data = data[received:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _receive(receiver: Connection, send_work: Connection, work: bytes) -> Iterator[Item]:
    """The items that the process makes of `work`, the pickled function and its arguments."""
    pin = torch.cuda.is_available()

    def filled(shape: torch.Tensor) -> torch.Tensor:
        # Pinned memory is reused, so that its pages are there.
        tensor = torch.empty(shape.shape, dtype=shape.dtype, pin_memory=pin)
        _read(receiver, _bytes_of(tensor))
        return tensor

    with contextlib.suppress(OSError):  # it has died: receiving says so
        send_work.send_bytes(work)
    while True:
        try:
            item = receiver.recv()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            shapes, position = item
            batch = shapes.each(filled)
        except (EOFError, OSError):
            raise RuntimeError("the data process has died; was it killed for memory?") from None
        yield batch, position


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
    ):
        if position is not None:
            stream.seek(position)
        if num_workers:
            args = (stream.reopen, stream.position(), micro_batch_size, rank, ranks, num_workers, prefetch)
            producer = PrefetchProcess(_batches_in_process, args)
        else:
            producer = PrefetchThread(batches(stream, micro_batch_size, rank, ranks), prefetch)
        super().__init__([producer])


def batches(stream: Stream, micro_batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[Item]:
    """Number `rank` of each `ranks` full micro-batches of `stream`, with the position after all of them. Samples left
    over at the end are dropped."""
    while True:
        try:
            # Samples of lower ranks, its own, samples of higher ranks.
            stream.skip(rank * micro_batch_size)
            samples = [stream.next_sample() for _ in range(micro_batch_size)]
            stream.skip((ranks - 1 - rank) * micro_batch_size)  # all ranks' positions are the same
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
