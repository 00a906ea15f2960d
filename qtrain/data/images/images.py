"""What every set of images gives to training: classes, a label for each image, and any image at once by its number.

An image set is a frozen dataclass in IMAGE_SETS whose fields are its JSON options. It opens as `Images`. That images
can be read in any order is what makes a run's position a single number (`image_loader.py`). Opened sets are pickled to
the processes that read them.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qtrain.errors import UserError
from qtrain.registry import Registry

LARGEST = 2**27
"""Pixels of an image that is still read: beyond it PIL suspects a decompression bomb."""


class Images(ABC):
    """An opened set. classes: their names, in the order of the labels; labels: int64 [images]."""

    classes: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, number: int) -> Image.Image:
        """The image of this number, decoded, in any of PIL's modes. UserError where it is none."""


class ImageSet(ABC):
    """An image set's options. Registered ones are frozen dataclasses."""

    @abstractmethod
    def open(self, flag: str) -> Images:
        """Open the set; everything that can be refused without reading all images is refused here."""


IMAGE_SETS: Registry[ImageSet] = Registry("image dataset type")


def open_images(spec: Mapping[str, Any], flag: str) -> Images:
    """Open the image set that the JSON of a flag describes. Raises UserError that names `flag`."""
    if "type" not in spec:
        raise UserError(f"{flag}: the key 'type' is missing; allowed: {', '.join(IMAGE_SETS.names())}.")
    options = {key: value for key, value in spec.items() if key != "type"}
    images = IMAGE_SETS.make(str(spec["type"]), options, flag).open(flag)
    if not len(images):
        raise UserError(f"{flag}: there are no images in it.")
    if len(images.classes) < 2:
        raise UserError(f"{flag}: there is only one class, {images.classes[0]!r}; training needs at least two.")
    low, high = int(images.labels.min()), int(images.labels.max())
    if low < 0 or high >= len(images.classes):
        raise UserError(
            f"{flag}: the label {low if low < 0 else high} is out of range; {len(images.classes)} classes have labels "
            f"from 0 to {len(images.classes) - 1}."
        )
    return images


def check_same_classes(train: Images, other: Images, flag: str) -> None:
    """Refuse a set whose labels mean other classes than the training set's."""
    if len(train.classes) != len(other.classes):
        counts = f"it has {len(other.classes)} classes, the training data {len(train.classes)}"
        raise UserError(f"{flag}: {counts}; both must be the same.")
    for label, (name, expected) in enumerate(zip(other.classes, train.classes, strict=True)):
        if name != expected:
            raise UserError(f"{flag}: its class {label} is {name!r}, in the training data {expected!r}.")


def decode(source: bytes | Path, name: str, flag: str) -> Image.Image:
    """The image in a file or in its bytes; `name` is what an error calls it."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > LARGEST:
                raise UserError(f"{flag}: {name} has {image.width:,} x {image.height:,} pixels, which is too large.")
            image.load()
            return image
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = (
            "" if "cannot identify" in str(error) else f" ({str(error).splitlines()[0][:100]})" if str(error) else ""
        )
        raise UserError(f"{flag}: {name} cannot be read as an image{reason}.") from None


def class_names(labels: np.ndarray, names: list[str] | None = None) -> tuple[str, ...]:
    """`names`, or, where a set has only numbers, these as text."""
    if names:
        return tuple(names)
    return tuple(str(label) for label in range(int(labels.max()) + 1 if len(labels) else 0))
