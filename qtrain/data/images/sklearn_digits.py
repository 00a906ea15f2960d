"""The handwritten digits in the scikit-learn package: real images without a download."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from qtrain.core.errors import missing_package
from qtrain.data.images.images import IMAGE_SETS, Images, ImageSet
from qtrain.data.permutation import Permutation

HELD_OUT = 360
"""Images of the validation split, always the same of the 1,797."""


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
        digits = load_digits()
        order = Permutation(len(digits.target), 0).all()
        chosen = order[:HELD_OUT] if self.split == "validation" else order[HELD_OUT:]
        pixels = np.round(digits.images[chosen] * (255 / 16)).astype(np.uint8)  # 17 gray levels
        return _Digits(pixels, digits.target[chosen])
