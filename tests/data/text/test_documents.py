"""Documents of every file format are found and read exactly; their orders are permutations in bounded memory."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from qtrain.core.errors import UserError
from qtrain.core.hardware import memory
from qtrain.data import compression
from qtrain.data.files import TextFile, text_files
from qtrain.data.hub_rows import RowSource
from qtrain.data.text import decoded
from qtrain.data.text import documents as documents_module
from qtrain.data.text.documents import DocumentOrder, Documents
from tests.data.corpora import compress, encode, functions, write_files, write_jsonl, write_parquet


def open_folder(folder, column="text") -> Documents:
    return Documents(text_files(str(folder), "all", 0.05, "--train_ds"), column, "--train_ds")


@pytest.mark.parametrize("write", [write_files, write_jsonl, write_parquet])
def test_reads_every_document_in_any_order(write, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "READ_BYTES", 1000)  # lines are cut by several reads
    texts = write(tmp_path)
    documents = open_folder(tmp_path)
    assert len(documents) == len(texts)
    for index in np.random.default_rng(0).permutation(len(texts)).tolist():
        assert documents.read(index) == texts[index]


@pytest.mark.parametrize("write", [write_files, write_jsonl, write_parquet])
@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.3, 0.999])
def test_one_file_is_divided_by_its_documents(write, fraction, tmp_path):
    write(tmp_path)
    file = str(min(path for path in tmp_path.rglob("*") if path.is_file()))
    both = [Documents(text_files(file, part, fraction, "x"), "text", "x") for part in ("train", "validation")]
    whole = Documents(text_files(file, "all", fraction, "x"), "text", "x")
    first, last = ([part.read(i) for i in range(len(part))] for part in both)
    everything = [whole.read(i) for i in range(len(whole))]
    assert first and last and "".join([*first, *last]) == "".join(everything)
    if len(everything) > 1:
        assert [*first, *last] == everything and abs(len(last) - fraction * len(everything)) <= 1
    elif fraction < 0.9:
        assert first[0].endswith("\n") and fraction * len(everything[0]) <= len(last[0]) + 1


def test_several_files_that_would_all_be_in_one_split_are_divided(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("".join(f"{line}\n" for line in range(20)))
    train, held = (text_files(str(tmp_path), part, 1e-9, "x") for part in ("train", "validation"))
    assert [file.path for file in train] == [file.path for file in held] and len(train) == 3
    with pytest.raises(UserError, match="none of the 3 files is in the split 'validation'"):
        text_files(str(tmp_path), "validation", 0, "x")


ENDINGS = ["", ".gz", ".zst", ".bz2", ".xz"]
COMPRESSED = [(form, ending) for form in (".jsonl", ".json", ".csv") for ending in ENDINGS[1:]]


@pytest.mark.parametrize(
    ("form", "ending"), [*COMPRESSED, (".jsonl", ""), (".json", ""), (".csv", ""), (".arrow", ""), (".arrows", "")]
)
def test_every_format_is_read_in_any_order(form, ending, tmp_path, monkeypatch):
    """With less cache than the files have text. A file named .arrow holds one of Arrow's two formats."""
    monkeypatch.setattr(documents_module, "CACHE_BYTES", 1)
    texts = functions()
    for i in range(3):
        path = tmp_path / f"{i}{form.replace('.arrows', '.arrow')}{ending}"
        path.write_bytes(compress(encode(texts[i::3], form), ending))
    documents = Documents(text_files(f"{tmp_path}/*", "all", 0.05, "--files"), "text", "--files")
    expected = [text for i in range(3) for text in texts[i::3]]
    assert len(documents) == len(texts)
    order = np.random.default_rng(0).permutation(len(texts))[:60]
    assert all(documents.read(index) == expected[index] for index in order.tolist())


@pytest.mark.parametrize("ending", ENDINGS)
def test_compressed_text_is_one_document(ending, tmp_path):
    (tmp_path / f"a.txt{ending}").write_bytes(compress("café\n".encode() * 9, ending))
    documents = open_folder(tmp_path)
    assert [documents.read(i) for i in range(len(documents))] == ["café\n" * 9]


@pytest.mark.parametrize(("form", "ending"), [*COMPRESSED, (".txt", ".gz"), (".txt", ".zst"), (".arrow", "")])
def test_a_damaged_or_truncated_file_is_named(form, ending, tmp_path):
    path = tmp_path / f"x{form}{ending}"
    whole = compress(b"text " * 9999 if form == ".txt" else encode(functions(), form), ending)
    for data in (whole[: len(whole) // 2], b"another format" * 9):
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot read") as caught:
            Documents(text_files(str(path), "all", 0.05, "--files"), "text", "--files")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("form", "ending"), [(".jsonl", ".gz"), (".json", ""), (".csv", ".zst"), (".arrow", "")])
def test_columns_of_every_format_are_checked(form, ending, tmp_path):
    path = tmp_path / f"x{form}{ending}"
    path.write_bytes(compress(encode(["a"], form), ending))
    files = text_files(str(path), "all", 0.05, "--files")
    with pytest.raises(UserError, match=r"no column 'texts'. Did you mean 'text'\? Its columns: id, text"):
        Documents(files, "texts", "--files")
    if form != ".csv":  # which has no types
        with pytest.raises(UserError, match=r"'id' is (int64|a number), not text"):
            Documents(files, "id", "--files")


def test_line_ends_and_blank_lines_of_jsonl(tmp_path):
    lines = [
        b'{"text": "one"}\r\n',
        b"\r\n",
        b"\n",
        b'{"text": "two\\n\\ud800"}\n',
        b'{"text": null}\n',
        b'{"text": "last"}',
    ]
    (tmp_path / "x.jsonl").write_bytes(b"\n" + b"".join(lines))
    documents = open_folder(tmp_path)
    assert [documents.read(i) for i in range(len(documents))] == ["one", "two\n\ufffd", "", "last"]


@pytest.mark.parametrize("cache_bytes", [documents_module.CACHE_BYTES, 3000])
def test_orders_are_permutations_and_differ_by_epoch(cache_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "CACHE_BYTES", cache_bytes)
    texts = write_parquet(tmp_path / "parquet") + write_files(tmp_path / "files")
    documents = open_folder(tmp_path)
    order = DocumentOrder(documents, seed=5, shuffle=True)
    epochs = [[order(epoch, place) for place in range(len(texts))] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(texts)))
    assert epochs[0] != epochs[1]
    if cache_bytes == 3000:  # other row groups come together in the first window
        window = int(order._window_ends[0])
        assert set(epochs[0][:window]) != set(epochs[1][:window])
    assert epochs[0] == [DocumentOrder(documents, 5, True)(0, place) for place in range(len(texts))]
    assert [DocumentOrder(documents, 5, False)(3, place) for place in range(9)] == list(range(9))
    displaced = np.abs(np.array(epochs[0]) - np.arange(len(texts))).mean()
    assert displaced > len(texts) / 6  # a random permutation displaces by a third on average


def test_each_row_group_is_decoded_once_an_epoch(tmp_path, monkeypatch):
    texts = write_parquet(tmp_path, files=4, row_group_size=10)
    documents = open_folder(tmp_path)
    monkeypatch.setattr(documents_module, "CACHE_BYTES", max(b.decoded_bytes for b in documents.blocks) * 3)
    opened = []
    read_row_group = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "read_row_group", lambda *a, **k: (opened.append(a), read_row_group(*a, **k))[1]
    )
    order = DocumentOrder(documents, 1, True)
    for place in range(len(texts)):
        documents.read(order(0, place))
    assert len(opened) <= 1.2 * len(documents.blocks)
    assert len(documents._cache) < len(documents.blocks)


BAD = {
    "x.jsonl": [
        (b'{"body": "x"}\n', "Did you mean 'body'|columns: body"),
        (b'{"text": 3}\n', "'text' is a number, not text"),
        (b"[1]\n", "not a JSON object"),
        (b"{'text': 1}\n", "not valid JSON"),
        (b'{"text": "\xff"}\n', "not UTF-8"),
        (b"\n\n", "no documents"),
        (b"", "no documents"),
    ],
    "x.txt": [(b"", "no documents"), (b"caf\xe9", "not UTF-8 text .byte 3")],
    "x.parquet": [(b"PAR1 nothing PAR1", "not a readable parquet file"), (b"", "not a readable parquet file")],
}


@pytest.mark.parametrize(("name", "data", "said"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_files_that_cannot_be_used(name, data, said, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=said) as caught:
        open_folder(tmp_path).read(0)
    assert str(caught.value).startswith("--train_ds: ") and name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_of_parquet_are_checked(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a"], "n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"no column 'text'. Did you mean 'texts'\? Its columns: texts, n"):
        open_folder(tmp_path)
    with pytest.raises(UserError, match="'n' is int64, not text"):
        open_folder(tmp_path, "n")


def test_a_file_that_is_no_text_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.py").write_bytes(b"# caf\xe9")
    with pytest.raises(UserError, match=r"b\.py is not UTF-8 text \(byte 5\). Convert it, or give paths without it"):
        open_folder(tmp_path)


def test_damage_in_the_middle_names_file_and_place(tmp_path):
    good = json.dumps({"text": "x"}).encode() + b"\n"
    (tmp_path / "x.jsonl").write_bytes(good * 2 + b"{broken\n" + good)
    documents = open_folder(tmp_path)
    assert documents.read(3) == "x"
    with pytest.raises(UserError, match=rf"x\.jsonl, line at byte {2 * len(good)}: not valid JSON"):
        documents.read(2)


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_a_line_that_is_too_long_is_named(ending, tmp_path, monkeypatch):
    """A few megabytes of compressed JSON can be one line of gigabytes."""
    for module in (compression, documents_module):
        monkeypatch.setattr(module, "MAX_RECORD", 5000)
    path = tmp_path / f"a.jsonl{ending}"
    data = b'{"text": "a"}\n\n{"text": "' + b"b" * 10_000 + b'"}'
    path.write_bytes(compress(data, ending))
    where = "line 3 is" if ending else "line at byte 15: it is"
    with pytest.raises(UserError, match=rf"^--files: .*a\.jsonl.*{where} longer than 5,000 bytes; divide it"):
        Documents([TextFile(path, "a")], "text", "--files")
    if ending:
        source = RowSource.of(str(path), None, "train", ("text",), None)
        with pytest.raises(UserError, match=rf"^--files: .*a.jsonl{ending} has a line longer than 5,000 bytes; div"):
            source.open("--files")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.py.xz", "a.json.zst", "a.csv.bz2"])
def test_a_file_that_cannot_be_held_in_memory_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "MAX_DOCUMENT", 5000)
    monkeypatch.setattr(compression, "MAX_DOCUMENT", 5000)
    monkeypatch.setattr(memory, "host_memory", lambda: 12_000)
    path = tmp_path / name
    path.write_bytes(compress(b"text\n" + b"b\n" * 5000, path.suffix))
    most = "5,000" if ".txt" in name or ".py" in name else "6,000"
    with pytest.raises(UserError, match=rf"^--files: cannot read .*{name}: it holds more than {most} bytes, too many"):
        Documents([TextFile(path, name)], "text", "--files")


def test_a_column_in_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(decoded, "CHUNK_CHARACTERS", 10)
    path = tmp_path / "a.jsonl.gz"
    texts = [str(n) * 7 for n in range(9)]
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    found = Documents([TextFile(path, "a")], "text", "--files")
    assert [found.read(n) for n in range(len(found))] == texts
