"""Micro-batches of images. Each is a function of its number alone, so that any process can make any of them.

An epoch is a permutation of the images, cut to whole batches; what is left over differs from epoch to epoch. A position
is the epoch and the number of images read in it. With `num_workers` 0 images are decoded ahead by threads and augmented
where the batch is asked for; with N, process n of N makes every N-th micro-batch whole.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from qtrain.data.augment import ImageTransform, Mixer, generators_kept, seed_generators
from qtrain.data.images import Images
from qtrain.data.loader import AheadThread
from qtrain.data.permutation import Permutation
from qtrain.data.stream import TensorBatch
from qtrain.errors import UserError

DECODED_AHEAD = 2
"""Micro-batches that threads decode, or a process makes, ahead of time."""
DECODING_THREADS = 4
MIXING = 1  # tells the seeds of mixing from those of single images


@dataclass(frozen=True)
class ImageBatch(TensorBatch):
    """`images` [B, C, H, W]; `targets` fp32 [B, classes]: how much of each class; a label alone is a single 1."""

    images: Tensor
    targets: Tensor

    @property
    def size(self) -> int:
        """Images."""
        return len(self.images)

    @property
    def n_trained(self) -> int:
        return len(self.images)


class BatchMaker:
    """Makes the micro-batch of any number."""

    def __init__(
        self, images: Images, transform: ImageTransform, mixer: Mixer, seed: int, micro_batch_size: int, batch_size: int
    ):
        self.images, self.seed, self.micro_batch_size, self.batch_size = images, seed, micro_batch_size, batch_size
        self._transform, self._mixer = transform, mixer
        self.per_epoch = len(images) // batch_size * (batch_size // micro_batch_size)

    def numbers(self, number: int) -> list[int]:
        """The images of micro-batch `number`."""
        epoch, place = divmod(number, self.per_epoch)
        order = Permutation(len(self.images), self.seed, epoch)
        return [order(i) for i in range(place * self.micro_batch_size, (place + 1) * self.micro_batch_size)]

    def decode(self, number: int) -> list[Image.Image]:
        return [self.images.read(i) for i in self.numbers(number)]

    def make(self, number: int, decoded: list[Image.Image]) -> ImageBatch:
        """Micro-batch `number` of its decoded images."""
        epoch, chosen = number // self.per_epoch, self.numbers(number)
        with generators_kept():
            tensors = []
            for i, image in zip(chosen, decoded, strict=True):
                seed_generators(self.seed, epoch, i)
                tensors.append(self._transform(image))
            seed_generators(self.seed, number, MIXING, len(self.images))
            labels = torch.from_numpy(self.images.labels[chosen])
            return ImageBatch(*self._mixer(torch.stack(tensors), labels))

    def position(self, number: int) -> dict[str, int]:
        """Where micro-batch `number` begins."""
        epoch, place = divmod(number, self.per_epoch)
        at = {"epoch": epoch, "image": place * self.micro_batch_size}
        return at | {"images": len(self.images), "batch_size": self.batch_size, "seed": self.seed}

    def find(self, position: Mapping[str, Any], flag: str) -> int:
        """The number of the micro-batch at `position`. UserError where another set, seed or batch size gave it."""
        own = self.position(0)
        for key in ("images", "batch_size", "seed"):
            if position.get(key) != own[key]:
                was = position.get(key)
                raise UserError(
                    f"{flag}: cannot resume: the position was saved with {key} {was}, now it is {own[key]}."
                )
        return position["epoch"] * self.per_epoch + position["image"] // self.micro_batch_size


class ImageLoader:
    """Iterates (ImageBatch, position after it), for ever. Call `close`, or use `with`, to stop what it started."""

    def __init__(
        self, maker: BatchMaker, flag: str, *, num_workers: int = 0, position: Mapping[str, Any] | None = None
    ):
        self._maker = maker
        self._next = 0 if position is None else maker.find(position, flag)
        self._pin = torch.cuda.is_available()
        make = _Threads if num_workers == 0 else _Processes
        self._producer: _Threads | _Processes = make(maker, self._next, num_workers)
        atexit.register(_close, weakref.ref(self._producer))  # a forgotten one would disturb Python's exit

    def __iter__(self) -> Iterator[tuple[ImageBatch, dict[str, int]]]:
        return self

    def __next__(self) -> tuple[ImageBatch, dict[str, int]]:
        batch = self._producer.get()
        self._next += 1
        return (batch.pin_memory() if self._pin else batch), self._maker.position(self._next)

    def close(self) -> None:
        self._producer.close()

    def __enter__(self) -> "ImageLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(producer: weakref.ref) -> None:
    if (alive := producer()) is not None:
        alive.close()


class _Threads:
    """Decodes ahead in threads, which draw no random number; the rest happens in the caller's."""

    def __init__(self, maker: BatchMaker, start: int, _: int):
        self._maker, self._number = maker, start
        self._pool = ThreadPoolExecutor(DECODING_THREADS, "data")
        self._ahead: deque[list[Future[Image.Image]]] = deque()
        for number in range(start, start + DECODED_AHEAD):
            self._submit(number)

    def _submit(self, number: int) -> None:
        read = self._maker.images.read
        self._ahead.append([self._pool.submit(read, i) for i in self._maker.numbers(number)])

    def get(self) -> ImageBatch:
        decoded = [future.result() for future in self._ahead.popleft()]
        self._submit(self._number + DECODED_AHEAD)
        batch = self._maker.make(self._number, decoded)
        self._number += 1
        return batch

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Processes:
    """Process n of N makes micro-batches n, n + N, ...; a thread for each receives them."""

    def __init__(self, maker: BatchMaker, start: int, count: int):
        context = multiprocessing.get_context("spawn")  # a forked process may not use the thread pools of its parent
        self._turn, self._processes, self._received = 0, [], []
        for number in range(count):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_produce, args=(sender, maker, start + number, count), daemon=True)
            process.start()
            sender.close()  # now only the process holds it: when the process dies, receiving ends
            self._processes.append(process)
            self._received.append(AheadThread(_receive(receiver), prefetch=DECODED_AHEAD))

    def get(self) -> ImageBatch:
        batch = self._received[self._turn % len(self._received)].get()
        self._turn += 1
        return batch

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for received in self._received:
            received.close()


def _receive(receiver: Connection) -> Iterator[ImageBatch]:
    """Tensors come as their shapes and then their bytes, which are received in place."""
    while True:
        try:
            item = receiver.recv()
            if isinstance(item, BaseException):
                raise item
            arrays = [np.empty(shape, np.float32) for shape in item]
            for array in arrays:
                receiver.recv_bytes_into(memoryview(array).cast("B"))
        except EOFError:
            raise RuntimeError("a data process has died; was it killed for memory?") from None
        yield ImageBatch(*map(torch.from_numpy, arrays))


def _produce(sender: Connection, maker: BatchMaker, start: int, stride: int) -> None:
    """What a process runs. Errors travel as items."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)  # a stop meant for the whole group: training still finishes its step
    torch.set_num_threads(1)
    send: Callable[[Any], None] = sender.send
    try:
        number = start
        while True:
            batch = maker.make(number, maker.decode(number))
            arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in batch.tensors()]
            send([array.shape for array in arrays])
            for array in arrays:
                sender.send_bytes(memoryview(array).cast("B"))
            number += stride
    except BrokenPipeError:
        pass  # the receiver is gone, and its process perhaps with it
    except UserError as error:
        send(error)
    except BaseException:
        with contextlib.suppress(BrokenPipeError):
            send(RuntimeError(f"in a data process:\n{traceback.format_exc()}"))
    os._exit(0)
