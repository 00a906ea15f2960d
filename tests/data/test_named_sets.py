"""Datasets by name: a local stand-in for the hub has them, with the columns that they have there."""

from pathlib import Path

import pytest

import tokenize_data
from qtrain.data.hub_rows import RowSource
from qtrain.data.named_sets import NAMED_SETS, named_set
from qtrain.data.stream import StreamContext, open_stream
from qtrain.data.text.manifest import read_manifest
from tests.system import ROOT, call

datasets = pytest.importorskip("datasets", reason="pip install datasets")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> list:
    """Every dataset of the hub has ten documents; returns what was asked for."""
    monkeypatch.chdir(tmp_path)
    asked, columns = [], {known.hub_id: known.text_column for known in NAMED_SETS.values()}

    def load_dataset(path, name=None, *, data_files=None, streaming):
        asked.append((path, name))
        rows = [{columns[path]: f"document {i}", "id": i} for i in range(10)]
        return {split: datasets.Dataset.from_list(rows).to_iterable_dataset() for split in ("train", "test")}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(RowSource, "n_rows", lambda self, flag: 10)
    return asked


@pytest.mark.parametrize("name", [*NAMED_SETS, "fineweb_edu", "c4_realnewslike"])
def test_a_name_is_the_datasets_hub_id_subset_and_column(name, hub):
    known = named_set(name)
    done = call(tokenize_data.main, ["--dataset", name, "--tokenizer", "byte", "--n_procs", "1"])
    assert done.code == 0, done.err
    assert hub[0] == (known.hub_id, known.subset)
    assert known.licence in done.out and known.size in done.out
    assert read_manifest(Path(f"{name}_train"), "x").tokens == sum(len(f"document {i}") + 1 for i in range(10))
    stream = open_stream({"type": "hf_text", "dataset": name, "tokenizer": "byte"}, StreamContext(8), "--train_ds")
    assert len(stream.next_sample().tokens) == 9


def test_names_are_listed_with_licence_and_size():
    listed = call(tokenize_data.main, ["--list"]).out
    assert "allenai/c4 en; ODC-BY-1.0; 305 GB" in listed and "the first 10 B tokens" in listed


def test_the_document_has_them():
    text = (ROOT / "docs/data.md").read_text()
    assert all(f"| `{name}` | {known.describe()} |" in text for name, known in NAMED_SETS.items())


def test_only_as_many_tokens_are_written_as_asked(hub):
    for size in ("1000", "2000"):
        argv = ["--dataset", "c4", "--tokenizer", "byte", "--max_tokens", "47", "--n_procs", "1"]
        done = call(tokenize_data.main, [*argv, "--shard_tokens", size, "--output_dir", size])
        assert done.code == 0, done.err
        assert read_manifest(Path(size), "x").tokens == 47
