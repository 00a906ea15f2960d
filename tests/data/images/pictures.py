"""Small images for tests, in every form that a set of them may have."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

CLASSES = ("cat", "dog", "owl")


def picture(number: int, mode: str = "RGB", size: int = 12) -> Image.Image:
    """An image whose brightness tells its class, number % 3."""
    noise = np.random.default_rng(number).integers(0, 40, (size, size, 3))
    return Image.fromarray((noise + 80 * (number % 3)).astype(np.uint8)).convert(mode)


def png(number: int, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    picture(number, mode).save(buffer, "PNG")
    return buffer.getvalue()


def write_folder(folder: Path, count: int = 24, classes: tuple[str, ...] = CLASSES) -> Path:
    """folder/class/number.png, of images of several modes."""
    for number in range(count):
        path = folder / classes[number % len(classes)] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number, ("RGB", "L", "RGBA", "P")[number % 4]))
    return folder


def write_table(path: Path, count: int = 24, named: bool = False, nested: bool = False) -> Path:
    """A parquet file: bytes or {bytes, path}, with numbers or names for labels."""
    images = [png(number) for number in range(count)]
    labels = [CLASSES[n % 3] if named else n % 3 for n in range(count)]
    column = [{"bytes": data, "path": None} for data in images] if nested else images
    pyarrow.parquet.write_table(pyarrow.table({"image": column, "label": labels}), path)
    return path


def write_tar(path: Path, numbers: range, json_labels: bool = False) -> Path:
    """A tar file of a web dataset."""

    def add(name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))

    with tarfile.open(path, "w") as tar:
        for number in numbers:
            if json_labels:
                add(f"{number:03}.json", json.dumps({"label": number % 3}).encode())
            else:
                add(f"{number:03}.cls", str(number % 3).encode())
            add(f"{number:03}.png", png(number))
    return path
