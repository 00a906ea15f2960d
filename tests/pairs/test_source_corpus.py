"""Installed source code as a corpus: each content once, in the order of its hash, split by it, without tables."""

import json
from pathlib import Path

import pytest

from qtrain.core.errors import UserError
from qtrain.pairs import source_corpus
from qtrain.pairs.source_corpus import main, unique_files


def code(number: int) -> str:
    return f"def function_{number}(argument):\n    return argument + other_{number}\n" * 5


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """Sixty contents, some of them in two places, and files that are no source code."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    for number in range(60):
        for folder in ("a", "b") if number % 3 == 0 else ("a",):
            path = root / folder / f"{number}{('.py', '.h', '.md')[number % 3]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code(number))
    (root / "a/table.h").write_text("0x00, 0x01, 0x02,\n" * 100)
    (root / "a/long.txt").write_text("words in one line " * 100)
    (root / "a/latin.py").write_bytes(b"# caf\xe9 and some more words\n" * 20)
    (root / "a/short.py").write_text("x = 1\n")
    (root / "a/picture.png").write_text(code(1000))
    (root / ".hidden").mkdir()
    (root / ".hidden/x.py").write_text(code(1001))
    (root / "a/link.py").symlink_to(root / "a/0.py")
    return root


def test_each_content_once_wherever_it_lies(installed, tmp_path):
    files = unique_files([installed])
    assert sorted(file.path.read_text() for file in files) == sorted(map(code, range(60)))
    (installed / "b").rename(tmp_path / "elsewhere")
    moved = unique_files([tmp_path / "elsewhere", installed])
    assert [file.digest for file in moved] == [file.digest for file in files]
    assert [file.digest for file in files] == sorted(file.digest for file in files)


def test_splits_share_no_content_and_do_not_depend_on_other_files(installed):
    files = unique_files([installed])
    chosen = {file.digest for file in files if file.is_validation(0.3)}
    assert 5 < len(chosen) < 35
    assert {f.digest for f in files[:30] if f.is_validation(0.3)} == {f.digest for f in files[:30]} & chosen


def test_the_corpus_is_made_once_with_one_tokenizer(installed, capsys, monkeypatch):
    arguments = ["--roots", str(installed), "--validation_fraction", "0.3", "--train_tokenizer", "300"]
    main([*arguments, "--output_dir", "data/source"])
    printed = capsys.readouterr().out.splitlines()[-1]
    manifests = [json.loads(Path(f"data/source_{s}/manifest.json").read_text()) for s in ("train", "validation")]
    assert sum(manifest["documents"] for manifest in manifests) == 60 and all(m["complete"] for m in manifests)
    assert manifests[0]["tokenizer"]["fingerprint"] == manifests[1]["tokenizer"]["fingerprint"]
    monkeypatch.setattr(source_corpus, "write_text", None)  # not called again
    main([*arguments, "--output_dir", "data/source"])
    assert capsys.readouterr().out.splitlines()[-1] == printed and printed.startswith("data fingerprint ")


def test_a_limit_keeps_both_splits(installed):
    files = list(source_corpus._limited(unique_files([installed]), 30 * 300))
    assert 20 <= len(files) <= 31 and 0 < sum(file.is_validation(0.3) for file in files) < len(files)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--roots", "missing"], "--roots: missing is not a folder"),
        (["--validation_fraction", "0"], "none is in the split 'validation'"),
        (["--validation_fraction", "1"], "none is in the split 'train'"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(installed, flags, words):
    with pytest.raises(UserError, match=words):
        main(["--roots", str(installed), "--output_dir", "data/source", *flags])
    assert not Path("data").exists()
