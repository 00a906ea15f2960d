"""From a decoded image to what a model sees: timm's transforms, and timm's mixup over a micro-batch.

timm draws from Python's, numpy's and torch's global generators. Here every image, at every epoch, has a seed of its
own, and the generators are put back afterwards. So an image's augmentation depends on nothing else: not on how many
processes share the work, not on where a run was resumed; and the model's own draws (dropout) do not notice it.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from qtrain.checks import Range, check_fields, shown
from qtrain.data.permutation import hash64
from qtrain.errors import UserError

Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class Augmentation:
    """The keys of `--augment`; names and meanings are timm's."""

    auto_augment: str | None = None
    """Policy, such as rand-m9-mstd0.5-inc1 (RandAugment), augmix-m3-w3 or original."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area that a random crop takes, smallest and largest."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Aspect ratio of a random crop, smallest and largest."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    vflip: Share = 0.0
    """Probability of a vertical flip."""
    color_jitter: Annotated[float, Range(0, 10)] = 0.4
    """Strength of changes in brightness, contrast and saturation, where there is no auto_augment."""
    re_prob: Share = 0.0
    """Probability that a rectangle is erased."""
    mixup: Annotated[float, Range(0, 100)] = 0.0
    """Alpha of mixup; 0: none."""
    cutmix: Annotated[float, Range(0, 100)] = 0.0
    """Alpha of CutMix; 0: none. With both, each micro-batch gets one of them."""
    mixup_prob: Share = 1.0
    """Share of the micro-batches that are mixed."""
    label_smoothing: Annotated[float, Range(0, 1)] = 0.0
    """Share of the target that is spread over all classes."""
    crop_pct: Annotated[float, Range(0.1, 1)] | None = None
    """Share of the image that evaluation looks at, from its middle; none: the model's own."""

    @property
    def mixes(self) -> bool:
        return self.mixup_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


def make_augmentation(options: Mapping[str, Any] | None, flag: str = "--augment") -> Augmentation:
    """A checked augmentation from the flag's JSON."""
    chosen = Augmentation(**check_fields(Augmentation, options or {}, flag))
    for name, (low, high) in (("scale", chosen.scale), ("ratio", chosen.ratio)):
        if not 0 < low <= high < float("inf") or (name == "scale" and high > 1):
            bounds = "0 < smallest <= largest" + (" <= 1" if name == "scale" else "")
            raise UserError(f"{flag}.{name}: {[low, high]} is out of range; it must be {bounds}.")
    return chosen


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Inside, the global generators of the CPU may be seeded at will; afterwards they are as they were."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(of_torch)


def seed_generators(*parts: int) -> None:
    """Seed the global generators of the CPU from a hash of `parts`."""
    seed = hash64(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


class ImageTransform:
    """PIL image -> float32 [C, H, W], as the model wants it.

    data_config: the model's own (`input_size`, `mean`, `std`, `interpolation`, `crop_pct`, `crop_mode`).
    """

    def __init__(self, data_config: Mapping[str, Any], augmentation: Augmentation | None, flag: str = "--augment"):
        """augmentation: None for evaluation. UserError where timm does not know its policy."""
        from timm.data import create_transform

        self.mode = {1: "L", 3: "RGB"}[data_config["input_size"][0]]
        options: dict[str, Any] = {k: data_config[k] for k in ("input_size", "mean", "std", "interpolation")}
        options |= {k: data_config[k] for k in ("crop_pct", "crop_mode") if augmentation is None}
        if augmentation is not None:
            names = ("auto_augment", "scale", "ratio", "hflip", "vflip", "color_jitter", "re_prob")
            options |= {"is_training": True, **{name: getattr(augmentation, name) for name in names}}
        try:
            with generators_kept():
                self._transform: Callable[[Image.Image], Tensor] = create_transform(**options)
        except (AssertionError, KeyError, ValueError, IndexError, AttributeError, NotImplementedError):
            policy = shown(augmentation.auto_augment if augmentation else None)
            raise UserError(
                f"{flag}.auto_augment: timm does not know the policy {policy}; for example 'rand-m9-mstd0.5-inc1'."
            ) from None

    def __call__(self, image: Image.Image) -> Tensor:
        return self._transform(image.convert(self.mode))


class Mixer:
    """Labels of a micro-batch -> targets over all classes; with mixup or CutMix the images are mixed too, in place."""

    def __init__(self, augmentation: Augmentation, classes: int):
        from timm.data import Mixup

        self._mixup = Mixup(
            augmentation.mixup,
            augmentation.cutmix,
            prob=augmentation.mixup_prob,
            label_smoothing=augmentation.label_smoothing,
            num_classes=classes,
        )
        self._mixup.mixup_enabled = augmentation.mixes
        self._smoothing, self._classes, self._mixes = augmentation.label_smoothing, classes, augmentation.mixes

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W], labels int64 [B] -> (images, targets fp32 [B, classes]); B even where it mixes."""
        from timm.data.mixup import mixup_target

        if self._mixes:
            return self._mixup(images, labels)
        return images, mixup_target(labels, self._classes, smoothing=self._smoothing)
