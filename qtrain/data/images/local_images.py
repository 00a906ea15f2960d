"""Images without a download: files in one folder per class, and the handwritten digits in the scikit-learn package."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from qtrain.core.errors import UserError, did_you_mean, missing_package, unknown_name
from qtrain.data.files import data_path, files_below
from qtrain.data.images.images import IMAGE_SETS, Images, ImageSet, decode, opened
from qtrain.data.permutation import Permutation

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".jp2")
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval")
"""Names that folders of splits usually have."""
CHECKED = 10_000
"""Image files whose headers are read before a run: in 1 to 2 seconds on a local disk."""


class _Folder(Images):
    def __init__(self, root: Path, classes: list[str], files: list[str], labels: list[int], flag: str):
        self.classes, self.labels = tuple(classes), np.array(labels, np.int64)
        self._root, self._files, self._flag = root, files, flag

    def name(self, index: int) -> str:
        return str(self._root / self._files[index])

    def read(self, index: int) -> Image.Image:
        return decode(self._root / self._files[index], self.name(index), self._flag)

    def check(self) -> None:
        """Read the headers of CHECKED files, evenly spaced: decoding pixels would take far longer."""

        def read_header(index: int) -> None:
            with opened(self._root / self._files[index], self.name(index), self._flag):
                pass

        self.read(0)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read_header, range(0, len(self), -(-len(self) // CHECKED))))


@IMAGE_SETS.register("image_folder")
@dataclass(frozen=True)
class ImageFolder(ImageSet):
    """Image files in one folder per class, at any depth below it: path/[split/]class/**/file"""

    path: str
    """folder of the classes, or of the splits"""
    split: str | None = None
    """folder between path and the classes, such as train or validation"""

    def open(self, flag: str) -> Images:
        try:
            return self._open(data_path(self.path, flag), flag)
        except OSError as error:
            raise UserError(f"{flag}: cannot read the folder {error.filename}: {error.strerror}.") from None

    def _open(self, root: Path, flag: str) -> Images:
        if not root.is_dir():
            wrong = "is a file" if root.exists() else "does not exist"
            hint = did_you_mean(self.path, map(str, root.parent.glob("*/")))
            raise UserError(f"{flag}: the folder {self.path!r} {wrong}.{hint}")
        if self.split is None:
            _refuse_splits_as_classes(root, flag)
        else:
            splits = [p.name for p in root.iterdir() if p.is_dir()]
            if self.split not in splits:
                raise unknown_name(flag, f"split of {self.path!r}", self.split, splits)
            root /= self.split
        classes = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        if not classes:
            raise UserError(f"{flag}: {root} holds no folders; there must be one folder per class.")
        files: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = [path for path in files_below(root / name, flag) if path.lower().endswith(ENDINGS)]
            if not found:
                raise UserError(
                    f"{flag}: the class {name!r} has no image files ({', '.join(ENDINGS[:4])}, ...) in {root}."
                )
            files += [os.path.relpath(path, root) for path in found]  # relative, which is shorter to pickle
            labels += [label] * len(found)
        return _Folder(root, classes, files, labels, flag)


def _refuse_splits_as_classes(root: Path, flag: str) -> None:
    """UserError where all folders are named as splits and hold folders of classes: they would be the classes."""
    folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    names = sorted(p.name for p in folders)
    named = len(names) > 1 and all(name.lower() in SPLITS for name in names)
    if named and all(any(p.is_dir() for p in folder.iterdir()) for folder in folders):
        train = next((name for name in names if name.lower().startswith("train")), names[0])
        raise UserError(
            f"{flag}: the folders of {root} are splits, not classes: {', '.join(names)}. "
            f'Add "split":"{train}" for one, and another in --eval_ds.'
        )


HELD_OUT = 360  # images of the validation split, always the same of the 1,797


class _Digits(Images):
    def __init__(self, pixels: np.ndarray, labels: np.ndarray):
        self.classes = tuple(str(digit) for digit in range(10))
        self.labels, self._pixels = labels.astype(np.int64), pixels  # uint8 [images, 8, 8]

    def name(self, index: int) -> str:
        return f"image {index} of sklearn:digits"

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])


@IMAGE_SETS.register("sklearn:digits")
@dataclass(frozen=True)
class Digits(ImageSet):
    """1,797 handwritten digits of 8 x 8 pixels, from the scikit-learn package (UCI, Alpaydin and Kaynak 1998)"""

    split: Literal["train", "validation"] = "train"
    """validation: 360 of them"""

    def open(self, flag: str) -> Images:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise missing_package("sklearn", f"{flag} sklearn:digits", "scikit-learn") from None
        digits: Any = load_digits()
        # Key 0, not the run's seed: the held-out images are the same in every run.
        order = Permutation(len(digits.target), 0).all()
        chosen = order[:HELD_OUT] if self.split == "validation" else order[HELD_OUT:]
        pixels = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # 17 gray levels
        return _Digits(pixels, digits.target[chosen])
