"""A full disk under an export ends with one message that says how to get it."""

import errno
from pathlib import Path

import pytest

from qtrain.core.errors import TrainingStopped
from qtrain.models import build_model, export_hf
from qtrain.models.hf.writing import writing_export
from tests.models.families import source_of


def test_a_full_disk_is_one_message_and_leaves_the_former_export(tmp_path, monkeypatch):
    source = source_of("llama2")
    model = build_model(source, seed=0)
    export_hf(model, source, tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}

    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TrainingStopped, match=r"hf could not be written: No space left on device\. --resume exports"):
        export_hf(model, source, tmp_path / "hf")
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_error_that_is_not_the_disks_stays_itself(tmp_path):
    with pytest.raises(KeyError), writing_export(tmp_path):
        raise KeyError
