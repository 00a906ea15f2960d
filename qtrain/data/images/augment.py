"""From a decoded image to the model's input: timm's transforms, and timm's mixup over a micro-batch.

timm draws from the global generators of Python, numpy and torch. Here each (image, epoch) has its own seed, and the
generators are restored afterwards. So an augmentation does not depend on the number of processes or on where a run was
resumed, and does not change the model's own draws (dropout).
"""

import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from qtrain.core.checks import Range, check_fields, shown
from qtrain.core.errors import UserError
from qtrain.data.permutation import hash64

Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class Augmentation:
    """The keys of `--augment`, with timm's names and meanings."""

    auto_augment: str | None = None
    """policy, such as rand-m9-mstd0.5-inc1 (RandAugment), augmix-m3-w3 or original"""
    scale: tuple[float, float] = (0.08, 1.0)
    """range of a random crop's area, as a fraction of the image's"""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """range of a random crop's aspect ratio"""
    hflip: Share = 0.5
    """probability of a horizontal flip"""
    vflip: Share = 0.0
    """probability of a vertical flip"""
    color_jitter: Annotated[float, Range(0, 10)] = 0.4
    """strength of changes in brightness, contrast and saturation, without auto_augment"""
    re_prob: Share = 0.0
    """probability that a random rectangle is erased"""
    mixup: Annotated[float, Range(0, 100)] = 0.0
    """alpha of mixup; 0: none"""
    cutmix: Annotated[float, Range(0, 100)] = 0.0
    """alpha of CutMix; 0: none; with mixup too, each micro-batch gets one of the two"""
    mixup_prob: Share = 1.0
    """fraction of the micro-batches that are mixed"""
    label_smoothing: Annotated[float, Range(0, 1)] = 0.0
    """fraction of the target that is spread over all classes"""
    crop_pct: Annotated[float, Range(0.1, 1)] | None = None
    """side of the center crop in evaluation, as a fraction of the image's; none: the model's own"""

    @property
    def mixes(self) -> bool:
        return self.mixup_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


def make_augmentation(options: Mapping[str, Any] | None, flag: str = "--augment") -> Augmentation:
    """The augmentation that the flag's JSON describes. UserError naming `flag` for options that are not allowed."""
    chosen = Augmentation(**check_fields(Augmentation, options or {}, flag))
    _check_policy(chosen.auto_augment, f"{flag}.auto_augment")
    for name, (low, high) in (("scale", chosen.scale), ("ratio", chosen.ratio)):
        if not 0 < low <= high < float("inf") or (name == "scale" and high > 1):
            bounds = "0 < smallest <= largest" + (" <= 1" if name == "scale" else "")
            raise UserError(f"{flag}.{name}: {[low, high]} is out of range; it must be {bounds}.")
    return chosen


def _check_policy(policy: str | None, flag: str) -> None:
    """Refuse what timm would ignore, as in rand-mX, and more operations than an image has use for."""
    for section in policy.split("-")[1:] if policy else ():
        found = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", section)
        if not found:
            raise UserError(f"{flag}: {shown(section)} in {shown(policy)} is not a letter and a number, such as m9.")
        if found[1] in ("n", "w", "d") and float(found[2]) > 100:
            raise UserError(f"{flag}: {shown(section)} in {shown(policy)} is out of range; it must be at most 100.")


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restores the state of the global CPU generators (Python, numpy, torch) on exit."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)


def seed_generators(*parts: int) -> None:
    """Seed the global generators of the CPU from a hash of `parts`."""
    # one hash for all three generators, each takes as many bits as it has
    seed = hash64(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


class ImageTransform:
    """PIL image -> float32 [C, H, W], the model's input.

    data_config: the model's `input_size`, `mean`, `std`, `interpolation`, `crop_pct` and `crop_mode`.
    """

    def __init__(self, data_config: Mapping[str, Any], augmentation: Augmentation | None):
        """augmentation: None for evaluation. UserError for a policy that timm does not know."""
        from timm.data import create_transform

        self.policy = augmentation.auto_augment if augmentation else None
        self.mode = {1: "L", 3: "RGB"}[data_config["input_size"][0]]  # the model's channels
        options: dict[str, Any] = {k: data_config[k] for k in ("input_size", "mean", "std", "interpolation")}
        options |= {k: data_config[k] for k in ("crop_pct", "crop_mode") if augmentation is None}  # of evaluation alone
        if augmentation is not None:
            names = ("auto_augment", "scale", "ratio", "hflip", "vflip", "color_jitter", "re_prob")
            options |= {"is_training": True, **{name: getattr(augmentation, name) for name in names}}
        try:
            # Some transforms draw when they are made.
            with restored_generators():
                self._transform: Any = create_transform(**options)
        except (AssertionError, KeyError, ValueError, IndexError, AttributeError, NotImplementedError):
            policy = shown(self.policy)
            raise UserError(
                f"--augment.auto_augment: timm does not know the policy {policy}; for example 'rand-m9-mstd0.5-inc1'."
            ) from None
        for step in getattr(self._transform, "transforms", ()):
            for operation in _operations(step):
                if operation.name.startswith("Posterize"):  # the only operation whose strongest level Pillow refuses
                    operation.aug_fn = _posterize

    def __call__(self, image: Image.Image) -> Tensor:
        return self._transform(image.convert(self.mode))


def _operations(step: Any) -> list[Any]:
    """The operations of a policy: AutoAugment's in sub-policies, RandAugment's and AugMix's in one list."""
    if hasattr(step, "policy"):
        return [operation for group in step.policy for operation in group]
    return list(getattr(step, "ops", []))


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's posterize for the strongest magnitudes too: they keep 0 bits, which Pillow 13 refuses instead of giving
    a black image as before."""
    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


class Mixer:
    """Labels of a micro-batch -> targets over all classes; mixup and CutMix also mix the images, in place."""

    def __init__(self, augmentation: Augmentation, classes: int):
        from timm.data import Mixup

        self._mixup = Mixup(
            augmentation.mixup,
            augmentation.cutmix,
            prob=augmentation.mixup_prob,
            label_smoothing=augmentation.label_smoothing,
            num_classes=classes,
        )
        self.mixes = self._mixup.mixup_enabled = augmentation.mixes
        self._smoothing, self._classes = augmentation.label_smoothing, classes

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """images [B, C, H, W], labels int64 [B] -> (images, targets fp32 [B, classes]); mixing needs an even B."""
        from timm.data.mixup import mixup_target

        if self.mixes:
            return self._mixup(images, labels)
        # fp32 [B, classes]: one-hot, smoothed
        return images, mixup_target(labels, self._classes, smoothing=self._smoothing)
