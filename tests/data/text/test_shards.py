"""Every .bin format is recognised and read exactly, masks included; a file that contradicts itself is refused."""

import hashlib
import json
import os

import numpy as np
import pytest

from qtrain.core.errors import UserError
from qtrain.data.stream import StreamContext, open_stream
from qtrain.data.text.manifest import Manifest, ShardEntry
from qtrain.data.text.shards import TokenArray, find_shards
from tests.data.corpora import write_llmc, write_llmq, write_raw

TOKENS = np.random.default_rng(0).integers(0, 50_000, 1003)
TRAINED = np.random.default_rng(1).random(1003) < 0.5


def ours(folder, tokens=TOKENS, dtype="uint16", **changes):
    """A folder as tokenize_data.py leaves it, in two shards."""
    folder.mkdir()
    parts = [tokens[:600], tokens[600:]]
    entries = []
    for i, part in enumerate(parts):
        write_raw(folder / f"tokens_{i:05d}.bin", part, "<u2" if dtype == "uint16" else "<u4")
        entries.append(ShardEntry(f"tokens_{i:05d}.bin", len(part), ""))
    made = {"name": "byte", "fingerprint": "x"}
    manifest = Manifest({}, made, dtype, 1, len(tokens), int(tokens.max()), entries, complete=True)
    for key, value in changes.items():
        setattr(manifest, key, value)
    manifest.write(folder)
    return folder


WRITERS = {
    "raw": lambda p: write_raw(p / "x.bin", TOKENS),
    "ours16": lambda p: ours(p / "set"),
    "ours32": lambda p: ours(p / "set", TOKENS + 70_000, "uint32"),
    "llmq1": lambda p: write_llmq(p / "x.bin", TOKENS, None, version=1),
    "llmq2": lambda p: write_llmq(p / "x.bin", TOKENS + 70_000, None),
    "llmq masked": lambda p: write_llmq(p / "x.bin", TOKENS, TRAINED),
    "llmc16": lambda p: write_llmc(p / "x.bin", TOKENS),
    "llmc32": lambda p: write_llmc(p / "x.bin", TOKENS + 70_000, "<u4"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_tokens_and_masks_of_every_format(kind, tmp_path):
    shards, manifests = find_shards(str(WRITERS[kind](tmp_path)), "--train_ds")
    array = TokenArray(shards, "--train_ds")
    expected = TOKENS + (70_000 if kind in ("ours32", "llmq2", "llmc32") else 0)
    assert len(array) == len(TOKENS) and len(manifests) == kind.startswith("ours")
    for start, count in [(0, 1003), (0, 1), (7, 9), (595, 10), (599, 2), (996, 7), (8, 64)]:
        tokens, trained = array.read(start, count)
        assert tokens.dtype == np.int64 and np.array_equal(tokens, expected[start : start + count])
        if kind == "llmq masked":
            assert np.array_equal(trained, TRAINED[start : start + count])
        else:
            assert trained is None


def test_a_folder_of_the_hub_is_read_like_a_local_one(tmp_path, monkeypatch):
    write_raw(tmp_path / "tinystories_train/0.bin", TOKENS)
    asked = []

    def snapshot(repo, repo_type, allow_patterns):
        asked.append((repo, repo_type, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for inner in ("tinystories_train", "tinystories_train/*.bin"):
        shards, _ = find_shards(f"hf://datasets/gaunernst/tokenized-datasets/{inner}", "--train_ds")
        assert np.array_equal(TokenArray(shards, "--train_ds").read(0, 1003)[0], TOKENS)
        assert asked.pop() == ("gaunernst/tokenized-datasets", "dataset", [inner, f"{inner}/*"])


def test_formats_mix_in_one_array(tmp_path):
    files = [write_raw(tmp_path / "a.bin", TOKENS[:10]), write_llmq(tmp_path / "b.bin", TOKENS[10:37], TRAINED[10:37])]
    files += [ours(tmp_path / "c", TOKENS[:700]), write_llmc(tmp_path / "d.bin", TOKENS[900:])]
    array = TokenArray(find_shards([str(f) for f in files], "--train_ds")[0], "--train_ds")
    tokens, trained = array.read(0, len(array))
    assert np.array_equal(tokens, np.concatenate([TOKENS[:37], TOKENS[:700], TOKENS[900:]]))
    assert np.array_equal(trained[10:37], TRAINED[10:37]) and trained[:10].all() and trained[37:].all()


def test_globs_folders_and_many_files(tmp_path):
    for i in range(100):  # more than the maps that are kept open
        write_raw(tmp_path / f"{i:03d}.bin", TOKENS[i : i + 3])
    assert len(find_shards(str(tmp_path / "00*.bin"), "--train_ds")[0]) == 10
    array = TokenArray(find_shards(str(tmp_path), "--train_ds")[0], "--train_ds")
    expected = np.concatenate([TOKENS[i : i + 3] for i in range(100)])
    assert np.array_equal(array.read(0, 300)[0], expected) and np.array_equal(array.read(299, 1)[0], expected[299:])


def cut(path, by):
    path.write_bytes(path.read_bytes()[:-by])
    return path


def header(path, index, value):
    data = bytearray(path.read_bytes())
    data[4 * index : 4 * index + 4] = int(value).to_bytes(4, "little", signed=True)
    path.write_bytes(data)
    return path


def write_bytes(path, data):
    path.write_bytes(data)
    return path


def unlinked_manifest(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("gone")
    return folder


def without_dtype(folder):
    record = json.loads((folder / "manifest.json").read_text())
    del record["dtype"]
    (folder / "manifest.json").write_text(json.dumps(record))
    return folder


BAD = {
    "odd raw": (lambda p: cut(write_raw(p / "x.bin", TOKENS), 1), "x.bin is not a file of uint16"),
    "empty": (lambda p: write_raw(p / "x.bin", TOKENS[:0]), "x.bin is not a file of uint16"),
    "short llmq": (lambda p: cut(write_llmq(p / "x.bin", TOKENS, None), 4), "its header says 1003 tokens"),
    "llmq without its mask": (lambda p: cut(write_llmq(p / "x.bin", TOKENS, TRAINED), 126), "its header says 1003"),
    "llmq version": (lambda p: header(write_llmq(p / "x.bin", TOKENS, None), 2, 3), "version 3"),
    "llmq bytes": (lambda p: header(write_llmq(p / "x.bin", TOKENS, None), 3, 8), "8 bytes per token"),
    "llmq count": (lambda p: header(write_llmq(p / "x.bin", TOKENS, None), 4, -5), "-5 tokens"),
    "short llmc": (lambda p: cut(write_llmc(p / "x.bin", TOKENS), 2), "its header says 1003 tokens"),
    "llmc count": (lambda p: header(write_llmc(p / "x.bin", TOKENS), 2, -1), "-1 tokens"),
    "llmc version": (lambda p: header(write_llmc(p / "x.bin", TOKENS), 1, 9), "version 9 and 1003 tokens; supported"),
    "llmc version of the other": (lambda p: header(write_llmc(p / "x.bin", TOKENS), 1, 7), "version 7"),
    "llmc ids of the other": (lambda p: header(write_llmc(p / "x.bin", TOKENS, "<u4"), 1, 1), "20240801, version 1"),
    "llmc evaluation": (lambda p: header(write_llmc(p / "x.bin", TOKENS), 0, 20240522), "an evaluation file of llm.c"),
    "llmc model": (lambda p: header(write_llmc(p / "x.bin", TOKENS), 0, 20240326), "a model of llm.c"),
    "llmc cut header": (lambda p: cut(write_llmc(p / "x.bin", TOKENS[:0]), 24), "ends within its header, after 1000"),
    "llmq cut header": (lambda p: cut(write_llmq(p / "x.bin", TOKENS[:0], None), 24), "ends within its header"),
    "llmq mask flag": (lambda p: header(write_llmq(p / "x.bin", TOKENS, None), 6, 5), "mask flag 5"),
    "a FIFO": (lambda p: (os.mkfifo(p / "x.bin"), p / "x.bin")[1], "x.bin' is a FIFO, not a regular file"),
    "a manifest that is a broken link": (lambda p: unlinked_manifest(ours(p / "set")), "a symbolic link to 'gone', wh"),
    "a PyTorch file": (lambda p: write_bytes(p / "x.bin", b"PK\3\4" + bytes(996)), "is a zip or PyTorch file"),
    "a gzip file": (lambda p: write_bytes(p / "x.bin", b"\x1f\x8b\x08" + bytes(997)), "is compressed with gzip"),
    "short shard": (lambda p: cut(ours(p / "set") / "tokens_00001.bin", 2).parent, "the manifest says 403 tokens"),
    "unlisted": (lambda p: write_raw(ours(p / "set") / "more.bin", TOKENS), "not in the manifest.json"),
    "unfinished": (lambda p: ours(p / "set", complete=False), "not finished"),
    "dtype": (lambda p: ours(p / "set", dtype="float16"), "unknown dtype 'float16'"),
    "no dtype": (lambda p: without_dtype(ours(p / "set")), "unknown dtype None"),
    "no folder": (lambda p: p / "gone", "does not exist"),
    "no bin": (lambda p: p, "matches no file"),
    "bad glob": (lambda p: p / "*.bin", "matches no file"),
    "other json": (
        lambda p: (ours(p / "set") / "manifest.json", (p / "set/manifest.json").write_text("{}"))[0].parent,
        "not a manifest",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_contradict_themselves(case, tmp_path):
    make, said = BAD[case]
    with pytest.raises(UserError) as caught:
        find_shards(str(make(tmp_path)), "--train_ds")
    assert said in str(caught.value) and str(caught.value).startswith("--train_ds")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["raw", "ours16", "llmq masked"])
def test_a_shard_that_is_truncated_while_it_is_read(kind, tmp_path):
    """An error that a run can save before, not the SIGBUS of a memory map."""
    shards, _ = find_shards(str(WRITERS[kind](tmp_path)), "--train_ds")
    array = TokenArray(shards, "--train_ds")
    array.read(0, 1003)
    for size in (shards[-1].size - 1, 2, 0):
        os.truncate(shards[-1].path, size)
        with pytest.raises(UserError, match=rf"{shards[-1].path.name} has changed under the run.*now {size}"):
            array.read(0, 1003)


def test_a_shard_that_is_removed_while_others_are_read(tmp_path):
    shards, _ = find_shards(str(ours(tmp_path / "set")), "--train_ds")
    array = TokenArray(shards, "--train_ds")
    array.read(0, 500)
    shards[1].path.unlink()
    with pytest.raises(UserError, match=r"--train_ds: cannot read .*tokens_00001\.bin: No such file"):
        array.read(500, 200)


def test_a_flipped_bit_is_found_with_verify(tmp_path):
    folder = ours(tmp_path / "set")
    record = json.loads((folder / "manifest.json").read_text())
    for entry in record["shards"]:
        entry["sha256"] = hashlib.sha256((folder / entry["file"]).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(record))
    ctx, spec = StreamContext(seq_len=8, seed=0), {"type": "token", "dataset_dir": str(folder), "verify": True}
    open_stream(spec, ctx, "--train_ds")
    data = bytearray((folder / "tokens_00001.bin").read_bytes())
    data[100] ^= 1
    (folder / "tokens_00001.bin").write_bytes(data)
    open_stream({**spec, "verify": False}, ctx, "--train_ds")
    with pytest.raises(UserError, match=r"--train_ds: .*tokens_00001\.bin is damaged: its sha256"):
        open_stream(spec, ctx, "--train_ds")


def test_verify_needs_a_manifest(tmp_path):
    spec = {"type": "token", "dataset_dir": str(write_raw(tmp_path / "x.bin", TOKENS)), "verify": True}
    with pytest.raises(UserError, match=r"--train_ds.verify: .*x\.bin has no manifest\.json"):
        open_stream(spec, StreamContext(seq_len=8, seed=0), "--train_ds")


def test_a_missing_shard_is_named(tmp_path):
    (ours(tmp_path / "set") / "tokens_00001.bin").unlink()
    with pytest.raises(UserError, match=r"cannot read .*tokens_00001\.bin: No such file"):
        find_shards(str(tmp_path / "set"), "--train_ds")


def test_manifest_is_read_strictly(tmp_path):
    folder = ours(tmp_path / "set")
    record = json.loads((folder / "manifest.json").read_text())
    (shard, *_), tokenizer = record["shards"], {"name": "byte", "fingerprint": "x"}
    changes = [{"tokens": "many"}, {"shards": [{"file": "x"}]}, {"shards": 3}, {"unknown": 1}, {"tokenizer": {}}]
    changes += [{"shards": [{**shard, **wrong}]} for wrong in ({"tokens": -5}, {"file": "../x"}, {"file": "a\0b"})]
    changes += [
        {"tokenizer": {**tokenizer, **wrong}} for wrong in ({"name": 5}, {"eos_id": "x"}, {"files": {"../x": ""}})
    ]
    cursor = {"source": None, "documents": 0, "tokens": 0}
    changes += [{"cursor": wrong} for wrong in ({"a": 1}, {**cursor, "tokens": -7}, {**cursor, "source": "x"})]
    for change in changes:
        (folder / "manifest.json").write_text(json.dumps(record | change))
        with pytest.raises(UserError, match=r"manifest\.json"):
            find_shards(str(folder), "--train_ds")
