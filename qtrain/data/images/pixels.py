"""An image file's pixels as 8-bit grey or RGB, whatever the file holds.

PIL's own conversion clips: of 16 bits it keeps the values up to 255, and takes the rest for white. It drops alpha and
shows the color that is stored under transparent pixels, mostly black. And it takes the first of several frames.
"""

import numpy as np
from PIL import Image

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
    image.load()
    if image.mode in GREY_16 or (image.mode == "I" and image.format in ("PNG", "PPM")):  # PIL's I is 32 bits, theirs 16
        return _from_16_bits(image)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are 32-bit {'floats' if image.mode == 'F' else 'integers'}, convert it to 16 bits"
        )
    if image.has_transparency_data:
        return _over_white(image)
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _frames(image: Image.Image) -> int:
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
    if image.getextrema()[3] == (255, 255):
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
