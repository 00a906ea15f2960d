"""Every kind of image file becomes the pixels that a viewer shows, or is refused; none is clipped."""

import io

import numpy as np
import pytest
from PIL import Image

from qtrain.core.errors import UserError
from qtrain.data.images.augment import ImageTransform
from qtrain.data.images.images import decode, open_images
from tests.data.images.pictures import picture, write_folder

LEVELS = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
EIGHT = [[0, 0, 1, 128, 255]]
ALL_LEVELS = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)


def saved(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> list:
    return np.asarray(decode(data, "x", "--train_ds")).tolist()


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_16_bit_grey_keeps_its_256_levels(form):
    image = Image.fromarray(ALL_LEVELS)
    assert pixels(saved(image, form)) == (ALL_LEVELS // 257).tolist()


def test_16_bits_are_cut_by_range():
    assert pixels(saved(Image.fromarray(LEVELS), "PNG")) == EIGHT
    big_endian = saved(Image.fromarray(LEVELS.astype(">u2")), "TIFF")
    assert big_endian[:2] == b"MM" and pixels(big_endian) == EIGHT
    inverted = saved(Image.fromarray(LEVELS), "TIFF", tiffinfo={262: 0})
    assert Image.open(io.BytesIO(inverted)).tag_v2[262] == 0
    assert pixels(inverted) == [[255 - value for value in EIGHT[0]]]
    assert pixels(b"P5\n2 1\n1023\n" + np.array([512, 1023], ">u2").tobytes()) == [[128, 255]]  # PIL's mode I


def test_16_bit_pngs_of_a_folder_reach_the_model_unclipped(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(ALL_LEVELS).save(tmp_path / name / "x.png")
    image = open_images({"type": "image_folder", "path": str(tmp_path)}, "--train_ds").read(0)
    config = {"input_size": (1, 16, 16), "mean": (0,), "std": (1,), "interpolation": "bilinear"}
    tensor = ImageTransform({**config, "crop_pct": 1.0, "crop_mode": "center"}, None)(image)
    assert len(np.unique(tensor.numpy())) == 256


def test_color_modes():
    def cmyk(*inks: int) -> Image.Image:
        return Image.new("CMYK", (8, 8), inks)

    for form in ("JPEG", "TIFF"):
        assert pixels(saved(cmyk(0, 0, 0, 0), form))[0][0] == [255, 255, 255]
        assert np.allclose(pixels(saved(cmyk(0, 255, 255, 0), form))[0][0], [255, 0, 0], atol=3)
        assert np.allclose(pixels(saved(cmyk(0, 0, 0, 255), form))[0][0], [0, 0, 0], atol=3)
    one_bit = Image.fromarray(np.array([[True, False, True]]))
    assert pixels(saved(one_bit, "PNG")) == pixels(saved(one_bit, "TIFF")) == [[255, 0, 255]]
    color = picture(5)
    assert pixels(saved(color, "PNG")) == np.asarray(color).tolist()
    palette = color.quantize(255)
    assert pixels(saved(palette, "PNG")) == pixels(saved(palette, "GIF")) == np.asarray(palette.convert("RGB")).tolist()
    deep = Image.open(io.BytesIO(saved(picture(1, "YCbCr"), "JPEG")))
    assert pixels(saved(picture(1, "YCbCr"), "JPEG")) == np.asarray(deep).tolist()


def test_transparent_pixels_are_white():
    """What is stored under them is not shown: here black, and red in the half transparent one."""
    rgba = Image.fromarray(np.array([[[0, 0, 0, 0], [10, 20, 30, 255], [255, 0, 0, 128]]], np.uint8))
    shown = [[[255, 255, 255], [10, 20, 30], [255, 127, 127]]]
    assert pixels(saved(rgba, "PNG")) == pixels(saved(rgba, "TIFF")) == shown
    grey = Image.fromarray(np.array([[[0, 0], [9, 255]]], np.uint8), "LA")
    assert pixels(saved(grey, "PNG")) == [[[255] * 3, [9] * 3]]
    indexed = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    indexed.putpalette([0, 0, 0, 1, 2, 3])
    assert pixels(saved(indexed, "PNG", transparency=0)) == [[[255] * 3, [1, 2, 3]]]
    assert pixels(saved(indexed, "GIF", transparency=0)) == [[[255] * 3, [1, 2, 3]]]
    assert pixels(saved(indexed, "PNG")) == [[[0] * 3, [1, 2, 3]]]
    keyed = Image.fromarray(np.array([[[0, 0, 0], [7, 7, 7]]], np.uint8))
    assert pixels(saved(keyed, "PNG", transparency=(0, 0, 0))) == [[[255] * 3, [7] * 3]]


FRAMES = [picture(n) for n in range(3)]


@pytest.mark.parametrize("form", ["GIF", "PNG", "TIFF", "WEBP"])
def test_several_frames_are_refused(form):
    data = saved(FRAMES[0], form, save_all=True, append_images=FRAMES[1:])
    with pytest.raises(UserError, match=r"^--train_ds: x cannot be read as an image \(it has 3 frames; save those"):
        decode(data, "x", "--train_ds")
    assert len(pixels(saved(FRAMES[0], form))) == 12


def test_second_pictures_of_cameras_and_overviews_are_not_frames():
    assert pixels(saved(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:])) == pixels(saved(FRAMES[0], "JPEG"))
    buffer = io.BytesIO()
    overview = FRAMES[0].reduce(2)
    overview.encoderinfo = {"tiffinfo": {254: 1}}
    FRAMES[0].save(buffer, "TIFF", save_all=True, append_images=[overview])
    assert Image.open(io.BytesIO(buffer.getvalue())).n_frames == 2
    assert pixels(buffer.getvalue()) == np.asarray(FRAMES[0]).tolist()


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "integers"), (np.float32, "floats")])
def test_pixels_without_a_range_are_refused(dtype, kind):
    with pytest.raises(UserError, match=f"its pixels are 32-bit {kind}, convert it to 16 bits"):
        decode(saved(Image.fromarray(LEVELS.astype(dtype)), "TIFF"), "x", "--train_ds")


def test_files_of_all_modes_are_read_as_grey_or_color(tmp_path):
    write_folder(tmp_path)
    images = open_images({"type": "image_folder", "path": str(tmp_path)}, "--train_ds")
    assert {images.read(n).mode for n in range(len(images))} == {"L", "RGB"}


def test_postscript_is_not_run():
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(x) print\n"
    with pytest.raises(UserError, match="it is PostScript, a program that Ghostscript would run"):
        decode(program, "x", "--train_ds")
