"""What makes micro-batches ahead of the training loop, in threads and processes, and the loader over it.

Every producer gives (batch, position right after it), however far it has run ahead, so that a run resumes exactly. A
batch comes out of a process as the shapes and dtypes of its tensors and then their bytes, which are received in place.

Not a torch DataLoader: that one raises in the middle of whatever the main thread is doing, a checkpoint perhaps, when
its worker is ended by a signal that was meant for the whole process group.
"""

import atexit
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

import numpy as np
import torch

from qtrain.data.stream import TensorBatch
from qtrain.errors import UserError

Item = tuple[TensorBatch, dict[str, Any]]


class Producer(Protocol):
    """Gives items until StopIteration; `close` ends what it has started."""

    def get(self) -> Item: ...
    def close(self) -> None: ...


class PrefetchLoader:
    """Iterates what a producer gives, pinned where there is a GPU. `close`, or `with`, stops what it started."""

    def __init__(self, producer: Producer, pin_memory: bool | None = None):
        self._producer = producer
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        atexit.register(_close, weakref.ref(producer))  # a forgotten one would disturb Python's exit

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        batch, position = self._producer.get()
        return (batch.pin_memory() if self._pin else batch), position

    def close(self) -> None:
        self._producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(producer: weakref.ref) -> None:
    if (alive := producer()) is not None:
        alive.close()


class PrefetchThread:
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

    def __iter__(self) -> Iterator[Item]:
        with contextlib.suppress(StopIteration):
            while True:
                yield self.get()

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


class PrefetchProcess:
    """Runs `produce(*args)`, a function of a module, in a process of its own; a thread here receives its items."""

    def __init__(self, produce: Callable[..., Iterator[Item]], args: tuple, prefetch: int = 2):
        context = multiprocessing.get_context("spawn")  # a forked process may not use the thread pools of its parent
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(sender, produce, args), name="data", daemon=True)
        self._process.start()
        sender.close()  # now only the process holds it: when the process dies, receiving ends
        self._received = PrefetchThread(_receive(receiver), prefetch)

    def get(self) -> Item:
        return self._received.get()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._received.close()


def _run(sender: Connection, produce: Callable[..., Iterator[Item]], args: tuple) -> None:
    """What the process runs. The end (None) and errors travel as items."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a stop meant for the whole group: training still finishes its step
    with contextlib.suppress(BrokenPipeError):  # the receiver is gone, and its process perhaps with it
        try:
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
    sender.send((batch.each(lambda t: t.to("meta")), position))
    for tensor in batch.tensors():
        sender.send_bytes(memoryview(tensor.contiguous().numpy()).cast("B"))


def _receive(receiver: Connection) -> Iterator[Item]:
    def filled(shape: torch.Tensor) -> torch.Tensor:
        array = np.empty(shape.shape, torch.empty(0, dtype=shape.dtype).numpy().dtype)
        receiver.recv_bytes_into(memoryview(array).cast("B"))
        return torch.from_numpy(array)

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
