"""Web datasets: images in tar files, each with a file of the same stem that holds its label.

Opening a set indexes the offsets of all members. So images can be shuffled over the whole set and a run can resume at
any of them, which a stream through the tar files cannot do.
"""

import json
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qtrain.core.checks import MAX_INT, MAX_JSON
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hub import hub_file, reaching_hub
from qtrain.core.reading import read_small
from qtrain.data.files import match_globs
from qtrain.data.images.images import IMAGE_SETS, Images, ImageSet, class_names, decode
from qtrain.data.images.local_images import ENDINGS

FIX = "Check the name, or give local tar files in paths."


class _Tars(Images):
    """places: int64 [images, 3]: index of the tar file, offset, size in bytes."""

    def __init__(self, files: list[Path], places: np.ndarray, labels: np.ndarray, names: list[str] | None, flag: str):
        self.classes, self.labels = class_names(labels, names, flag), labels
        self._files, self._places, self._flag = files, places, flag

    def name(self, index: int) -> str:
        file, offset, _ = self._places[index].tolist()
        return f"the image at byte {offset} of {self._files[file]}"

    def read(self, index: int) -> Image.Image:
        file, offset, size = self._places[index].tolist()
        with self._files[file].open("rb") as tar:  # its own handle: threads would share an open file's position
            tar.seek(offset)
            data = tar.read(size)
        return decode(data, self.name(index), self._flag)


@IMAGE_SETS.register("wds")
@dataclass(frozen=True)
class WebDataset(ImageSet):
    """Web dataset: tar files of images, each with a .cls file (or a .json file with "label"); local, or of the hub"""

    # pyrefly: ignore[bad-assignment]  # a default that nobody can change; JSON knows lists alone
    paths: str | list[str] = ()
    """local tar files or globs"""
    dataset: str | None = None
    """hub id such as timm/imagenet-1k-wds; its tar files are downloaded into the hub's cache"""
    split: str = "train"
    """with dataset: the word in the names of the tar files"""
    classes: str | None = None
    """text file with the name of one class per line"""

    def open(self, flag: str) -> Images:
        if (self.dataset is None) == (not self.paths):
            raise UserError(f"{flag}: give either paths or dataset.")
        files = (
            [*map(Path, match_globs(self.paths, flag))] if self.dataset is None else self._hub_files(self.dataset, flag)
        )
        names = None
        if self.classes is not None:
            try:
                names = read_small(self.classes, MAX_JSON).decode().split("\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise UserError(f"{flag}: cannot read the classes in {self.classes!r}: {reason}.") from None
            names = [name.strip() for name in names if name.strip()]
            if len(names) != len(set(names)) or not names:
                why = "names a class twice" if names else "is empty"
                raise UserError(f"{flag}: the file of classes {self.classes!r} {why}; it needs one name per line.")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda file: list(_members(file, flag)), files))
        rows = [(file, *row) for file, members in enumerate(found) for row in members]
        if not rows:
            raise UserError(f"{flag}: the tar files hold no image with a label.")
        table = np.array(rows, np.int64)  # [images, 4]: file, offset, size, label
        return _Tars(files, table[:, :3].copy(), table[:, 3].copy(), names, flag)

    def _hub_files(self, dataset: str, flag: str) -> list[Path]:
        from huggingface_hub import HfApi

        with reaching_hub(flag, f"the dataset {dataset!r}", FIX):
            names = HfApi().list_repo_files(dataset, repo_type="dataset")
        tars = [name for name in names if name.endswith(".tar")]
        chosen = sorted(name for name in tars if self.split in name)
        if not chosen:
            words = {word for name in tars for word in Path(name).stem.split("-") if not word.isdigit()}
            raise unknown_name(flag, f"split of {dataset!r}", self.split, words)
        return [hub_file(dataset, name, flag, FIX, repo_type="dataset") for name in chosen]


def _members(path: Path, flag: str) -> Iterator[tuple[int, int, int]]:
    """(offset, size, label) of each image of a tar file, in the file's order."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:  # without compression, which would have no offsets
            for member in tar:
                stem, dot, ending = member.name.rpartition(".")
                if not member.isfile():
                    continue
                # Where its bytes are: images are read again without the tar's index.
                if dot + ending.lower() in ENDINGS:
                    images[stem] = (member.offset_data, member.size)
                elif ending == "cls" or (ending == "json" and stem not in labels):
                    contents: Any = tar.extractfile(member)  # None only of what is no file
                    label = _label(contents.read(), ending)
                    if label is not None:
                        labels[stem] = label
            with path.open("rb") as file:
                # A tar ends with blocks of zeros; tarfile takes the end of the file for the end of the archive.
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                    raise tarfile.ReadError("its end is missing: it is truncated")
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{flag}: {path} cannot be read as a tar file ({error}).") from None
    for stem, place in images.items():
        if stem not in labels:
            raise UserError(f'{flag}: {path}: the image {stem} has no label; it needs a .cls or a .json with "label".')
        yield (*place, labels[stem])


def _label(data: bytes, ending: str) -> int | None:
    try:
        value = int(data) if ending == "cls" else json.loads(data).get("label")
    except (ValueError, AttributeError, RecursionError):
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT else None
