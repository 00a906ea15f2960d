"""Records that are no documents: they stop the run, or are skipped and counted, the same after resuming."""

import dataclasses
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import llm_pretrain
from qtrain.core.errors import UserError
from qtrain.data.stream import StreamContext, open_stream
from tests.system import call, flags, only_run, write_model

GOOD = [{"text": f"document {i} " * 9} for i in range(12)]
BAD = {2: "not JSON", 5: '{"text": 7}', 6: "[]", 9: '{"other": "x"}'}
"""Lines by their place."""
CONTEXT = StreamContext(16, shuffle=False, epochs=1)


def lines(bad: dict[int, str]) -> list[str]:
    """The good documents as JSON lines, with bad ones at their places."""
    good = [json.dumps(record) for record in GOOD]
    for place, line in bad.items():
        good.insert(place, line)
    return good


def write(path: Path, bad: dict[int, str]) -> None:
    text = "\n".join(lines(bad))
    if path.suffix == ".json":
        text = "[" + ",".join(line for line in lines(bad) if line != "not JSON") + "]"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def samples(stream) -> list[list[int]]:
    found = []
    while True:
        try:
            found.append(stream.next_sample().tokens.tolist())
        except StopIteration:
            return found


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_skipping_leaves_the_documents_of_a_clean_file(name):
    write(Path(name), BAD)
    write(Path(f"clean_{name}"), {})
    spec = {"type": "text", "paths": name, "tokenizer": "byte"}
    with pytest.raises(UserError, match=f"--train_ds: {name}"):
        samples(open_stream(spec, CONTEXT, "--train_ds"))
    clean = samples(open_stream({**spec, "paths": f"clean_{name}"}, CONTEXT, "--train_ds"))
    stream = open_stream({**spec, "bad_records": "skip"}, CONTEXT, "--train_ds")
    assert stream.estimated_samples() > 0 and stream.position()["skipped"] == 0
    read = [stream.next_sample().tokens.tolist() for _ in range(40)]
    position = json.loads(json.dumps(stream.position()))
    rest = samples(stream)
    assert read + rest == clean and stream.position()["skipped"] == len(BAD) - (name == "a.json")
    again = open_stream({**spec, "bad_records": "skip"}, CONTEXT, "--train_ds")
    again.seek(position)
    assert samples(again) == rest and again.position() == stream.position()


def test_a_row_that_is_not_text_is_skipped():
    """Of a parquet file written without a check of its encoding."""
    texts = [record["text"].encode() for record in GOOD]
    column = pyarrow.array([*texts[:3], b"\xff\xfe", *texts[3:]], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), "a.parquet")
    spec = {"type": "text", "paths": "a.parquet", "tokenizer": "byte", "bad_records": "skip"}
    write(Path("clean.jsonl"), {})
    clean = open_stream({**spec, "paths": "clean.jsonl"}, CONTEXT, "--train_ds")
    assert samples(open_stream(spec, CONTEXT, "--train_ds")) == samples(clean)


def test_a_wrong_column_is_still_told():
    write(Path("a.jsonl"), {})
    spec = {"type": "text", "paths": "a.jsonl", "tokenizer": "byte", "text_column": "txt", "bad_records": "skip"}
    stream = open_stream(spec, dataclasses.replace(CONTEXT, epochs=None), "--train_ds")
    with pytest.raises(UserError, match=r"every document is empty.* bad records is --train_ds: a.jsonl.* column 'txt'"):
        stream.next_sample()


def test_a_run_that_stopped_at_one_resumes_and_counts():
    write_model(Path("tiny.json"))
    Path("a.jsonl").write_text("\n".join([*lines({}) * 25, "not JSON", *lines({}) * 25]))
    text = {"type": "text", "paths": "a.jsonl", "tokenizer": "byte"}
    settings = {"model": "tiny.json", "seq_len": 128, "batch_size": 16, "n_steps": 52, "device": "cpu", "export": False}
    stopped = call(llm_pretrain.main, flags(**settings, train_ds=text))
    assert stopped.code == 2 and "not valid JSON" in stopped.err
    run = only_run(Path("runs"))
    done = call(llm_pretrain.main, flags(**settings, train_ds={**text, "bad_records": "skip"}, resume=run))
    assert done.code == 0 and "bad records of the training data" in done.out, done.err
    assert "--resume: train_ds.bad_records None > 'skip'" in done.out
