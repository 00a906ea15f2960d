"""Micro-batches of images. Each is a function of its index alone, so any process can produce any of them.

An epoch is a permutation of the images, truncated to whole batches; the remainder differs from epoch to epoch. A
position is the epoch and the number of images read in it. With `num_workers` 0 images are decoded ahead by threads and
augmented where the batch is asked for, because augmentation draws from global generators. With N, process n of N
produces the micro-batches n, n + N, ....
"""

import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.data.batch import TensorBatch
from qtrain.data.images.augment import ImageTransform, Mixer, restored_generators, seed_generators
from qtrain.data.images.images import Images
from qtrain.data.loader import PrefetchLoader, PrefetchProcess, PrefetchThread
from qtrain.data.permutation import Permutation
from qtrain.data.stream import check_position

Item = tuple["ImageBatch", dict[str, int]]

PREFETCH = 2  # micro-batches that are decoded ahead, or produced ahead by a process
DECODING_THREADS = 4
MIXING = 1  # separates the seeds of mixing from those of images


@dataclass(frozen=True)
class ImageBatch(TensorBatch):
    """`images` [B, C, H, W]. `targets` fp32 [B, classes]: the weight of each class; one-hot for a plain label."""

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
    """Produces the micro-batch of any index."""

    def __init__(
        self,
        images: Images,
        transform: ImageTransform,
        mixer: Mixer,
        seed: int,
        micro_batch_size: int,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
    ):
        """dtype: of the images, rounded to it last of all; that of the model halves what bf16 moves."""
        self.images, self.seed, self.micro_batch_size, self.batch_size = images, seed, micro_batch_size, batch_size
        self._transform, self._mixer, self._dtype = transform, mixer, dtype
        self.per_epoch = len(images) // batch_size * (batch_size // micro_batch_size)  # micro-batches of whole batches

    def members(self, index: int) -> list[int]:
        """The images of micro-batch `index`."""
        epoch, place = divmod(index, self.per_epoch)
        # A new one for each epoch; what an epoch drops at its end differs too.
        order = Permutation(len(self.images), self.seed, epoch)
        return [order(i) for i in range(place * self.micro_batch_size, (place + 1) * self.micro_batch_size)]

    def decode(self, index: int) -> list[Image.Image]:
        return [self.images.read(i) for i in self.members(index)]

    def make(self, index: int, decoded: list[Image.Image], next_index: int) -> Item:
        """Micro-batch `index` from its decoded images, and the position of micro-batch `next_index`."""
        epoch, members = index // self.per_epoch, self.members(index)
        with restored_generators():
            tensors = []
            for i, image in zip(members, decoded, strict=True):
                seed_generators(self.seed, epoch, i)  # by image and epoch: not by batch size, rank or worker
                tensor = self._augmented(i, image)
                # Rounded while it is in the cache; mixing is computed in fp32.
                tensors.append(tensor if self._mixer.mixes else tensor.to(self._dtype))
            seed_generators(self.seed, index, MIXING, len(self.images))  # mixing pairs images of one micro-batch
            labels = torch.from_numpy(self.images.labels[members])
            mixed, targets = self._mixer(torch.stack(tensors), labels)
        return ImageBatch(mixed.to(self._dtype), targets), self.position(next_index)

    def _augmented(self, i: int, image: Image.Image) -> Tensor:
        """Image i as the model's input. UserError naming the image and the policy where a transform fails."""
        try:
            return self._transform(image)
        except Exception as error:  # of timm, PIL and torchvision
            raise UserError(
                f"--augment: {self.images.name(i)} cannot be augmented with the policy {self._transform.policy!r} "
                f"({type(error).__name__}: {str(error)[:100]}). Give another auto_augment, or remove the image."
            ) from error

    def position(self, index: int) -> dict[str, int]:
        """Where micro-batch `index` starts."""
        epoch, place = divmod(index, self.per_epoch)
        return {"epoch": epoch, "image": place * self.micro_batch_size, **self._fixed}

    @property
    def _fixed(self) -> dict[str, int]:
        """What the order of the images depends on."""
        return {"images": len(self.images), "batch_size": self.batch_size, "seed": self.seed}

    def find(self, position: Mapping[str, Any]) -> int:
        """The index of the micro-batch at `position`. UserError for one of another set, seed or batch size."""
        check_position(position, self._fixed, "--train_ds")
        # Whole micro-batches: a position is between two.
        return position["epoch"] * self.per_epoch + position["image"] // self.micro_batch_size


class ImageLoader(PrefetchLoader):
    """Iterates (ImageBatch, position after it), without end.

    rank, ranks: of each `ranks` micro-batches take number `rank`; the position is that after all of them."""

    def __init__(
        self,
        maker: BatchMaker,
        *,
        num_workers: int = 0,
        position: Mapping[str, Any] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        start = 0 if position is None else maker.find(position)
        if num_workers:
            # Worker n produces every num_workers-th step's micro-batch; they are taken in turn.
            ranges = [(maker, start + n * ranks, num_workers * ranks, rank, ranks) for n in range(num_workers)]
            # Of several processes one batch each is enough, and one that arrives: they are in pinned memory.
            prefetch = PREFETCH if num_workers == 1 else 1
            super().__init__([PrefetchProcess(_every_nth, args, prefetch) for args in ranges])
        else:
            # One waits in the queue and one to be put into it.
            decoded = PrefetchThread(_decoded(maker, start, rank, ranks), PREFETCH - 1)
            super().__init__([decoded], finish=lambda item: maker.make(*item))


def _decoded(maker: BatchMaker, start: int, rank: int, ranks: int) -> Iterator[tuple[int, list[Image.Image], int]]:
    """The arguments of `BatchMaker.make` from `start` on. Decoding draws no random number."""
    with ThreadPoolExecutor(DECODING_THREADS, "data") as pool:
        for index in itertools.count(start, ranks):
            own = index + rank
            yield own, list(pool.map(maker.images.read, maker.members(own))), index + ranks


def _every_nth(maker: BatchMaker, start: int, stride: int, rank: int, ranks: int) -> Iterator[Item]:
    """Number `rank` of the `ranks` micro-batches from start, start + stride, ... on, on one thread."""
    torch.set_num_threads(1)  # as many processes as workers share the cores
    for index in itertools.count(start, stride):
        own = index + rank
        yield maker.make(own, maker.decode(own), index + ranks)
