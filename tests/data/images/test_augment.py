"""Augmentation: every magnitude that a policy can draw works, and a failure names the image and the policy."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qtrain.core.errors import UserError
from qtrain.data.images.augment import ImageTransform, Mixer, make_augmentation, seed_generators
from qtrain.data.images.image_loader import BatchMaker
from qtrain.data.images.images import open_images
from tests.data.images.pictures import picture, write_folder

pytest.importorskip("timm")

CONFIG = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.2,) * 3, "interpolation": "bicubic"}
RECIPES = Path(__file__).parents[3] / "configs"


def shipped_policies() -> list[str]:
    augments = [json.loads(path.read_text()).get("augment", {}) for path in sorted(RECIPES.glob("*.json"))]
    return sorted({augment["auto_augment"] for augment in augments if "auto_augment" in augment})


@pytest.mark.parametrize("policy", shipped_policies())
def test_10000_draws_of_a_recipes_policy(policy):
    transform, image = ImageTransform(CONFIG, make_augmentation({"auto_augment": policy})), picture(1)
    for seed in range(10_000):
        seed_generators(seed)
        assert transform(image).shape == (3, 8, 8)


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m15-inc1", "rand-m0-n8", "v0", "v0r", "augmix-m10-w3"])
def test_the_extreme_magnitudes_of_every_kind_of_policy(policy):
    transform, image = ImageTransform(CONFIG, make_augmentation({"auto_augment": policy})), picture(1)
    for seed in range(400):
        seed_generators(seed)
        transform(image)


def test_posterize_to_no_bits_is_black_as_before_pillow_13():
    transform = ImageTransform(CONFIG, make_augmentation({"auto_augment": "rand-m10-inc1"}))
    (policy,) = [step for step in transform._transform.transforms if hasattr(step, "ops")]
    (operation,) = [op for op in policy.ops if op.name.startswith("Posterize")]
    kept = {bits: np.asarray(operation.aug_fn(picture(2), bits)) for bits in (-2, 0, 1, 4, 8)}
    assert not kept[0].any() and not kept[-2].any() and kept[0].shape == (12, 12, 3)
    assert set(np.unique(kept[1])) <= {0, 128} and kept[1].any() and not (kept[4] % 16).any()
    assert np.array_equal(kept[8], np.asarray(picture(2)))


def test_a_failing_augmentation_names_the_file_and_the_policy(tmp_path):
    images = open_images({"type": "image_folder", "path": str(write_folder(tmp_path))}, "--train_ds")
    chosen = make_augmentation({"auto_augment": "rand-m9"})
    maker = BatchMaker(images, ImageTransform(CONFIG, chosen), Mixer(chosen, 3), 0, 2, 4)

    def fail(image: Image.Image) -> None:
        raise ValueError("bits must be between 1 and 8")

    maker._transform._transform = fail
    with pytest.raises(UserError, match=r"\.png cannot be augmented .*'rand-m9'.*bits must be"):
        maker.make(0, maker.decode(0), 1)


def test_an_image_whose_decoder_fails_in_any_way_is_named(tmp_path, monkeypatch):
    images = open_images({"type": "image_folder", "path": str(write_folder(tmp_path))}, "--train_ds")

    def fail(self: Image.Image) -> None:
        raise IndexError("index out of range")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    with pytest.raises(UserError, match=r"\.png cannot be read as an image \(index out of range\)"):
        images.read(0)
