"""What paths, globs, folders and python:stdlib mean, and that a file's split depends on its own path alone."""

import errno
import os

import pytest

from qtrain.core.errors import UserError
from qtrain.data.files import STDLIB, match_files, match_globs, split_of, stdlib_files, text_files
from qtrain.data.images.images import open_images


@pytest.fixture
def tree(tmp_path):
    for name in ["a.txt", "b.py", "c.md", "deep/d.jsonl", "deep/er/e.parquet", "deep/er/f.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("", ["a.txt", "b.py", "deep/d.jsonl", "deep/er/e.parquet", "deep/er/f.txt"]),
        ("a.txt", ["a.txt"]),
        ("deep/er", ["e.parquet", "f.txt"]),
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "deep/er/f.txt"]),
        ("deep/*/f.*", ["er/f.txt"]),
        ("[ab].*", ["a.txt", "b.py"]),
    ],
)
def test_entries(tree, entry, expected):
    assert [f.relative for f in text_files(str(tree / entry), "all", 0.05, "--files")] == expected


def test_a_file_given_twice_is_read_once(tree):
    files = text_files([str(tree / "a.txt"), str(tree)], "all", 0.05, "--files")
    assert [f.path.name for f in files] == ["a.txt", "b.py", "d.jsonl", "e.parquet", "f.txt"]


def test_stdlib_is_there_without_tests_and_packages():
    files = stdlib_files("--files")
    names = {f.relative for f in files}
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= names and len(names) == len(files) > 300
    assert not [n for n in names if {"test", "tests", "site-packages", "idle_test"} & set(n.split("/"))]


def test_splits_are_disjoint_complete_and_stable():
    parts = {
        split: {f.relative for f in text_files(STDLIB, split, 0.05, "--files")} for split in ("train", "validation")
    }
    assert not parts["train"] & parts["validation"]
    assert parts["train"] | parts["validation"] == {f.relative for f in stdlib_files("--files")}
    assert 0.02 < len(parts["validation"]) / len(parts["train"]) < 0.09
    assert split_of("abc.py", 0.05) == "train" and split_of("abc.py", 1.0) == "validation"
    larger = {f.relative for f in text_files(STDLIB, "validation", 0.2, "--files")}
    assert parts["validation"] < larger  # a larger share only adds files


def test_a_split_does_not_depend_on_where_the_folder_lies(tmp_path):
    for root in ("one", "deep/down/two"):
        for i in range(40):
            (tmp_path / root / "x").mkdir(parents=True, exist_ok=True)
            (tmp_path / root / "x" / f"{i}.txt").touch()
    found = [
        [f.relative for f in text_files(str(tmp_path / root), "validation", 0.3, "--files")]
        for root in ("one", "deep/down/two")
    ]
    assert found[0] == found[1] and 4 <= len(found[0]) <= 20


def test_compressed_files_are_of_the_format_inside(tmp_path):
    """A folder's .json and .csv files are taken where they are named only."""
    for name in ("a.txt.gz", "b.jsonl.zst", "c.json", "d.csv.gz", "e.arrow", "f.tar.gz", "g.bin.gz"):
        (tmp_path / name).touch()
    found = {entry: text_files(str(tmp_path / entry), "all", 0.05, "--files") for entry in ("", "*", "d.csv.gz")}
    names = {entry: [f.relative for f in files] for entry, files in found.items()}
    assert names[""] == ["a.txt.gz", "b.jsonl.zst", "e.arrow"] and names["d.csv.gz"] == ["d.csv.gz"]
    assert names["*"] == ["a.txt.gz", "b.jsonl.zst", "c.json", "d.csv.gz", "e.arrow"]
    with pytest.raises(UserError, match=r"f\.tar\.gz has the ending '\.gz'; allowed: .*, compressed or not \(\.gz"):
        text_files(str(tmp_path / "f.tar.gz"), "all", 0.05, "--files")
    with pytest.raises(UserError, match="matches no file"):
        match_files(str(tmp_path), [".bin"], "--train_ds")


@pytest.mark.parametrize(
    ("paths", "split", "said"),
    [
        ("{tmp}/c.md", "all", "ending '.md'"),
        ("{tmp}/a.tx", "all", "Did you mean '{tmp}/a.txt'"),
        ("{tmp}/*.csv", "all", "matches no file"),
        ("{tmp}/none/*.txt", "all", "matches no file"),
        ([], "all", "empty"),
    ],
)
def test_errors(tree, paths, split, said):
    paths = paths.format(tmp=tree) if isinstance(paths, str) else paths
    with pytest.raises(UserError) as caught:
        text_files(paths, split, 0.05, "--files")
    assert said.format(tmp=tree) in str(caught.value) and str(caught.value).startswith("--files: ")
    assert "\n" not in str(caught.value)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)):
        match_files(str(tmp_path), [".bin"], "--train_ds")


def test_files_that_are_none_are_not_passed_over(tmp_path):
    """Named, in a folder and in a glob: a FIFO, and a link to nothing, as git-annex and moved folders leave them."""
    (tmp_path / "a.txt").write_text("a")
    for name, make in {"b.txt": os.mkfifo, "c.txt": lambda path: os.symlink("gone", path)}.items():
        make(tmp_path / name)
        said = (
            "is a FIFO, not a regular file" if name == "b.txt" else "is a symbolic link to 'gone', which does not exist"
        )
        for entry in (tmp_path / name, tmp_path, f"{tmp_path}/*.txt"):
            with pytest.raises(UserError, match=f"--files: '{tmp_path}/{name}' {said}"):
                text_files(str(entry), "all", 0.05, "--files")
        with pytest.raises(UserError, match=said):
            match_globs(f"{tmp_path}/*", "--train_ds")
        (tmp_path / name).unlink()
    os.mkdir(tmp_path / "d.txt")
    assert [f.relative for f in text_files(str(tmp_path), "all", 0.05, "--files")] == ["a.txt"]


def test_links_back_to_a_folder_do_not_repeat_its_files(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").symlink_to("../a.txt")
    os.symlink(tmp_path, tmp_path / "in" / "back")
    for entry in (str(tmp_path), f"{tmp_path}/**/*.txt"):
        assert [f.relative for f in text_files(entry, "all", 0.05, "--files")] == ["a.txt", "in/b.txt"]
    assert len(match_globs(f"{tmp_path}/**/*.txt", "--train_ds")) == 2


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    for name in ("a/x/1.png", "b/1.png", "a/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("a/x"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    said = f"cannot read the folder {tmp_path}/a/x: Permission denied"
    with pytest.raises(UserError, match=said):
        text_files(str(tmp_path), "all", 0.05, "--files")
    with pytest.raises(UserError, match=said):
        open_images({"type": "image_folder", "path": str(tmp_path)}, "--train_ds")
    monkeypatch.setattr(os, "listdir", lambda path: scandir(f"{tmp_path}/gone"))  # Path.iterdir's
    with pytest.raises(UserError, match=r"cannot read the folder .*gone: No such file"):
        open_images({"type": "image_folder", "path": str(tmp_path)}, "--train_ds")
