"""The interface of image datasets: classes, a label per image, and random access to the images.

An image set is a frozen dataclass in IMAGE_SETS whose fields are its JSON options. It opens as `Images`. Because of the
random access, a run's position is a single number (`image_loader.py`). Opened sets are pickled to the processes that
read them.
"""

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qtrain.core.errors import UserError, first_line
from qtrain.core.reading import refuse_special
from qtrain.core.registry import Registry

MAX_PIXELS = 2**27  # pixels of an image at most: above it PIL suspects a decompression bomb


class Images(ABC):
    """An opened set. classes: names, indexed by label; labels: int64 [images]."""

    classes: tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the image is stored, for messages: its file, or its place in one."""

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """The decoded image, in PIL's mode L or RGB. UserError where it is not an image."""

    def check(self) -> None:
        """UserError naming an image that cannot be read, as far as that is found without decoding all of them."""
        self.read(0)


class ImageSet(ABC):
    """An image set's options. Registered ones are frozen dataclasses."""

    @abstractmethod
    def open(self, flag: str) -> Images:
        """Open the set. Whatever can be refused without reading all images is refused here."""


IMAGE_SETS: Registry[ImageSet] = Registry(
    "image dataset type",
    modules=["qtrain.data.images.image_rows", "qtrain.data.images.image_wds", "qtrain.data.images.local_images"],
)


def open_images(spec: Mapping[str, Any], flag: str) -> Images:
    """Open the image set that the JSON of a flag describes. Raises UserError that names `flag`."""
    images = IMAGE_SETS.make_typed(spec, flag).open(flag)
    if not len(images):
        raise UserError(f"{flag}: it has no images.")
    if int(images.labels.min()) < 0:
        raise UserError(f"{flag}: the label {int(images.labels.min())} is out of range; labels count from 0.")
    if len(images.classes) < 2:
        raise UserError(f"{flag}: there is only one class, {images.classes[0]!r}; training needs at least two.")
    if (high := int(images.labels.max())) >= len(images.classes):
        raise UserError(
            f"{flag}: the label {high} is out of range; {len(images.classes)} classes have labels "
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
    """The image in a file or in bytes, in mode L or RGB. name: for errors."""
    with opened(source, name, flag) as image:
        return load_pixels(image)


@contextlib.contextmanager
def opened(source: bytes | Path, name: str, flag: str) -> Iterator[Image.Image]:
    """The image with its header read, and nothing decoded. UserError, also for what is raised inside."""
    if isinstance(source, Path):
        refuse_special(source, flag)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UserError(f"{flag}: {name} has {image.width:,} x {image.height:,} pixels, which is too large.")
            yield image
    except UserError:
        raise
    except Exception as error:  # PIL's plugins raise struct.error, zlib.error, IndexError, ... for damaged files
        known = str(error) and "cannot identify" not in str(error)
        reason = f" ({first_line(error)[:100]})" if known else ""
        raise UserError(f"{flag}: {name} cannot be read as an image{reason}. Remove it or convert it.") from None


MAX_CLASSES = 1_000_000


def class_names(labels: np.ndarray, names: list[str] | None, flag: str) -> tuple[str, ...]:
    """`names`, or the numbers as text where a set has no names. UserError for a number that can be no class."""
    if names:
        return tuple(names)
    if len(labels) and labels.max() >= MAX_CLASSES:
        raise UserError(f"{flag}: the label {int(labels.max())} would be one of more than {MAX_CLASSES:,} classes.")
    return tuple(str(label) for label in range(int(labels.max()) + 1 if len(labels) else 0))


GREY_16 = ("I;16", "I;16B", "I;16L", "I;16N")
BITS_PER_SAMPLE, PHOTOMETRIC, SUBFILE_TYPE = 258, 262, 254  # TIFF's tags
WHITE_IS_ZERO = 0
REDUCED_OR_MASK = 5  # bits of SUBFILE_TYPE


def load_pixels(image: Image.Image) -> Image.Image:
    """Decode an opened image: mode L or RGB, transparent pixels over white. ValueError for more than one frame, and for
    pixels that have no fixed range."""
    if image.format == "EPS":
        raise ValueError("it is PostScript, a program that Ghostscript would run")
    if (frames := _frames(image)) > 1:
        raise ValueError(f"it has {frames} frames; save those that are wanted as files of their own")
    image.load()  # decodes; until here only the header was read
    if image.mode in GREY_16 or (image.mode == "I" and image.format in ("PNG", "PPM")):  # PIL's I is 32 bits, theirs 16
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are 32-bit {'floats' if image.mode == 'F' else 'integers'}, convert it to 16 bits"
        )
    if image.has_transparency_data:
        return _over_white(image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _frames(image: Any) -> int:
    """Frames or pages. A camera's second JPEG (MPO) and a TIFF's overviews and masks are not counted."""
    if image.format == "MPO" or not getattr(image, "is_animated", False):
        return 1
    frames = image.n_frames
    if image.format == "TIFF":
        pages = range(frames)
        frames = sum(1 for page in pages if image.seek(page) or not image.tag_v2.get(SUBFILE_TYPE, 0) & REDUCED_OR_MASK)
        image.seek(0)
    return frames


def _from_16_bits(image: Image.Image) -> Image.Image:
    """The high byte, which is what PIL takes of 16-bit color."""
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(BITS_PER_SAMPLE, (16,))[0]  # 12 is read into 16 without scaling
    pixels = (np.asarray(image).astype(np.int32) >> (bits - 8)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(255 - pixels if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else pixels)


def _over_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    extrema: Any = image.getextrema()
    if extrema[3] == (255, 255):  # opaque: no blending, which would round
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
