"""Micro-batches of images. Each is a function of its number alone, so that any process can make any of them.

An epoch is a permutation of the images, cut to whole batches; what is left over differs from epoch to epoch. A position
is the epoch and the number of images read in it. With `num_workers` 0 images are decoded ahead by threads and augmented
where the batch is asked for; with N, process n of N makes every N-th micro-batch whole.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qtrain.data.images.augment import ImageTransform, Mixer, generators_kept, seed_generators
from qtrain.data.images.images import Images
from qtrain.data.permutation import Permutation
from qtrain.data.prefetch import PrefetchLoader, PrefetchProcess
from qtrain.data.stream import TensorBatch
from qtrain.errors import UserError

Item = tuple["ImageBatch", dict[str, int]]

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


class ImageLoader(PrefetchLoader):
    """Iterates (ImageBatch, position after it), for ever."""

    def __init__(
        self, maker: BatchMaker, flag: str, *, num_workers: int = 0, position: Mapping[str, Any] | None = None
    ):
        start = 0 if position is None else maker.find(position, flag)
        super().__init__(_Processes(maker, start, num_workers) if num_workers else _Threads(maker, start))


class _Threads:
    """Decodes ahead in threads, which draw no random number; the rest happens in the caller's."""

    def __init__(self, maker: BatchMaker, start: int):
        self._maker, self._number = maker, start
        self._pool = ThreadPoolExecutor(DECODING_THREADS, "data")
        self._ahead: deque[list[Future[Image.Image]]] = deque()
        for number in range(start, start + DECODED_AHEAD):
            self._submit(number)

    def _submit(self, number: int) -> None:
        read = self._maker.images.read
        self._ahead.append([self._pool.submit(read, i) for i in self._maker.numbers(number)])

    def get(self) -> Item:
        decoded = [future.result() for future in self._ahead.popleft()]
        self._submit(self._number + DECODED_AHEAD)
        batch = self._maker.make(self._number, decoded)
        self._number += 1
        return batch, self._maker.position(self._number)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Processes:
    """Process n of N makes micro-batches n, n + N, ...."""

    def __init__(self, maker: BatchMaker, start: int, count: int):
        self._turn = 0
        self._processes = [
            PrefetchProcess(_every_nth, (maker, start + number, count), DECODED_AHEAD) for number in range(count)
        ]

    def get(self) -> Item:
        item = self._processes[self._turn % len(self._processes)].get()
        self._turn += 1
        return item

    def close(self) -> None:
        for process in self._processes:
            process.close()


def _every_nth(maker: BatchMaker, start: int, stride: int) -> Iterator[Item]:
    """Micro-batches start, start + stride, ..., made by this process alone."""
    torch.set_num_threads(1)
    for number in itertools.count(start, stride):
        yield maker.make(number, maker.decode(number)), maker.position(number + 1)
