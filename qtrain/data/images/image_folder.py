"""Image files in one folder per class."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from qtrain.core.errors import UserError, unknown_name
from qtrain.data.files import data_path, files_below
from qtrain.data.images.images import IMAGE_SETS, Images, ImageSet, decode

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".jp2")
SPLITS = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval")
"""Names that folders of splits usually have."""


class _Folder(Images):
    def __init__(self, root: Path, classes: list[str], files: list[str], labels: list[int], flag: str):
        self.classes, self.labels = tuple(classes), np.array(labels, np.int64)
        self._root, self._files, self._flag = root, files, flag

    def name(self, index: int) -> str:
        return str(self._root / self._files[index])

    def read(self, index: int) -> Image.Image:
        return decode(self._root / self._files[index], self.name(index), self._flag)


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
            raise UserError(f"{flag}: the folder {self.path!r} {wrong}.")
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
            files += [os.path.relpath(path, root) for path in found]
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
