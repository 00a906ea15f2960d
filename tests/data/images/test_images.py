"""Sets of images: the same images and labels come out of every form that they are stored in."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from qtrain.core.errors import UserError
from qtrain.data.images.images import IMAGE_SETS, check_same_classes, open_images
from tests.data.images.pictures import CLASSES, picture, write_folder, write_table, write_tar

pytest.importorskip("timm")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The tables that the `datasets` library makes stay in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def sets(folder: Path) -> dict[str, dict]:
    write_folder(folder / "images")
    write_folder(folder / "splits" / "train")
    write_table(folder / "numbers.parquet")
    write_table(folder / "names.parquet", named=True, nested=True)
    write_tar(folder / "0.tar", range(0, 10))
    write_tar(folder / "1.tar", range(10, 24), json_labels=True)
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return {
        "folder": {"type": "image_folder", "path": f"{folder}/images"},
        "split": {"type": "image_folder", "path": f"{folder}/splits", "split": "train"},
        "numbers": {"type": "parquet", "paths": f"{folder}/numbers.parquet"},
        "names": {"type": "parquet", "paths": [f"{folder}/names.parquet"]},
        "tars": {"type": "wds", "paths": f"{folder}/*.tar", "classes": f"{folder}/classes.txt"},
    }


def test_every_form_gives_the_same_images(tmp_path):
    for name, spec in sets(tmp_path).items():
        images = open_images(spec, "--train_ds")
        assert len(images) == 24 and images.labels.dtype == np.int64, name
        assert images.classes == (CLASSES if name != "numbers" else ("0", "1", "2"))
        assert np.bincount(images.labels).tolist() == [8, 8, 8]
        for number in range(24):
            image = images.read(number)
            brightness = np.asarray(image.convert("L")).mean()
            assert abs(brightness - 20 - 80 * images.labels[number]) < 15, (name, number)
        if name not in ("folder", "split"):  # those are in the order of their classes
            assert np.array_equal(np.asarray(images.read(7)), np.asarray(picture(7)))


def test_digits_are_split_without_overlap():
    pytest.importorskip("sklearn")
    train, held_out = (open_images({"type": "sklearn:digits", "split": s}, "--x") for s in ("train", "validation"))
    assert (len(train), len(held_out)) == (1437, 360) and train.classes == held_out.classes == tuple("0123456789")
    pixels = [{(np.asarray(i.read(n)).tobytes(), int(i.labels[n])) for n in range(len(i))} for i in (train, held_out)]
    assert not pixels[0] & pixels[1] and min(np.bincount(held_out.labels)) > 20


def test_without_scikit_learn_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        open_images({"type": "sklearn:digits"}, "--train_ds")


def test_sets_of_other_classes_are_told_apart(tmp_path):
    write_folder(tmp_path / "a")
    write_folder(tmp_path / "b", classes=("cat", "dog", "elk"))
    write_folder(tmp_path / "c", classes=("cat", "dog"))
    a, b, c = (open_images({"type": "image_folder", "path": str(tmp_path / n)}, "--x") for n in "abc")
    check_same_classes(a, a, "--eval_ds")
    with pytest.raises(UserError, match="class 2 is 'elk', in the training data 'owl'"):
        check_same_classes(a, b, "--eval_ds")
    with pytest.raises(UserError, match="it has 2 classes, the training data 3"):
        check_same_classes(a, c, "--eval_ds")


def test_folders_of_splits_are_not_taken_for_classes(tmp_path):
    for split in ("train", "val"):
        write_folder(tmp_path / "photos" / split)
    spec = {"type": "image_folder", "path": f"{tmp_path}/photos"}
    with pytest.raises(UserError, match=r'splits, not classes: train, val\. Add "split":"train"'):
        open_images(spec, "--train_ds")
    assert open_images({**spec, "split": "val"}, "--eval_ds").classes == CLASSES
    write_folder(tmp_path / "real", classes=("train", "test"))  # image files right below: classes after all
    assert open_images({**spec, "path": f"{tmp_path}/real"}, "--train_ds").classes == ("test", "train")


def test_every_type_describes_itself():
    assert IMAGE_SETS.names() == ["hf_image", "image_folder", "parquet", "sklearn:digits", "wds"]
    assert all(line.endswith(".") or len(line) > 40 for _, line in IMAGE_SETS.describe())


def test_classes_in_a_file_that_never_ends(tmp_path):
    write_tar(tmp_path / "a.tar", range(6))
    os.mkfifo(tmp_path / "fifo")
    for name, said in {
        "/dev/zero": "it is a device",
        f"{tmp_path}/fifo": "it is a FIFO",
        "gone": "No such file",
    }.items():
        spec = {"type": "wds", "paths": f"{tmp_path}/a.tar", "classes": name}
        with pytest.raises(UserError, match=f"^--train_ds: cannot read the classes in '{name}': {said}"):
            open_images(spec, "--train_ds")


def test_a_file_is_no_folder_of_images(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"the folder '.*a\.png' is a file"):
        open_images({"type": "image_folder", "path": f"{tmp_path}/a.png"}, "--train_ds")
