"""Every dataset type: resumed anywhere it goes on exactly, ranks share the data, nothing is lost or read twice.

The tests run over every registered type; a new one needs a case in `corpora.specs`."""

import contextlib
import itertools
import json
import random
import socket

import numpy as np
import pytest

from qtrain.core.errors import UserError
from qtrain.data.batch import Sample
from qtrain.data.stream import DATASETS, StreamContext, check_kind, dataset_tokenizer, open_stream
from qtrain.data.text import documents as documents_module
from qtrain.data.text import text_datasets
from qtrain.data.tokenizers.tokenizer import load_tokenizer
from tests.data.corpora import (
    compress,
    encode,
    functions,
    source_texts,
    specs,
    write_llmq,
    write_parquet,
    write_raw,
)

FLAG = "--train_ds"
EOS = 257


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return specs(tmp_path_factory.mktemp("corpora"))


CASES = [("token", 0), ("text", 0), ("text", 1), ("hf_text", 0), ("hf_text", 1), ("mix", 0)]
CASES += [("instruct", 0), ("chat", 0)]
LENGTHS = {"token": 17, "text": 1000, "hf_text": 200, "mix": 150, "instruct": 150, "chat": 300}


def test_every_type_has_a_case(datasets):
    assert set(datasets) == set(DATASETS.names()) == {kind for kind, _ in CASES}
    assert sum(map(len, datasets.values())) == len(CASES)
    assert all(line for _, line in DATASETS.describe())


def take(stream, count: int | None = None) -> list[Sample]:
    samples = []
    for _ in range(count) if count is not None else itertools.count():
        try:
            samples.append(stream.next_sample())
        except StopIteration:
            break
    return samples


def same(a: list[Sample], b: list[Sample]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


@pytest.fixture
def small_reads(monkeypatch):
    """Few documents at a time and small windows, so that their ends are met often."""
    monkeypatch.setattr(text_datasets, "ENCODE_DOCUMENTS", 5)
    monkeypatch.setattr(documents_module, "CACHE_BYTES", 4000)


@pytest.mark.parametrize(("kind", "number"), CASES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_resumes_exactly_at_ten_random_positions(datasets, small_reads, kind, number, shuffle):
    spec, length = datasets[kind][number], LENGTHS[kind]
    ctx = StreamContext(length, seed=11, shuffle=shuffle)
    stream, samples, positions = open_stream(spec, ctx, FLAG), [], []
    epochs_long = 220
    for _ in range(epochs_long):
        positions.append(json.dumps(stream.position()))
        samples.append(stream.next_sample())
    rng = random.Random(f"{kind}{number}{shuffle}")
    for at in [0, 1, *rng.sample(range(2, epochs_long - 30), 8)]:
        resumed = open_stream(spec, ctx, FLAG)
        resumed.seek(json.loads(positions[at]))
        assert same(take(resumed, 30), samples[at : at + 30]), f"resumed before sample {at}"
        stream.seek(json.loads(positions[at]))  # and on a stream that has already run
        assert same(take(stream, 3), samples[at : at + 3])


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_positions_of_runs_that_also_stored_a_rank_are_resumed(datasets, kind, number):
    ctx = StreamContext(LENGTHS[kind], seed=1)
    stream, resumed = (open_stream(datasets[kind][number], ctx, FLAG) for _ in range(2))
    take(stream, 7)

    def with_rank(position: dict) -> dict:
        parts = {"datasets": [with_rank(part) for part in position["datasets"]]} if "datasets" in position else {}
        return {**position, **parts, "rank": 0, "world": 1}

    resumed.seek(with_rank(stream.position()))
    assert resumed.position() == stream.position()
    assert same(take(resumed, 30), take(stream, 30))


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_positions_are_small_and_json(datasets, kind, number):
    stream = open_stream(datasets[kind][number], StreamContext(LENGTHS[kind], seed=1), FLAG)
    take(stream, 50)
    assert len(json.dumps(stream.position())) < 1500


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_another_seed_gives_another_order_and_the_same_seed_the_same(datasets, kind, number):
    spec = datasets[kind][number]
    a, b, c = (take(open_stream(spec, StreamContext(LENGTHS[kind], seed=s), FLAG), 20) for s in (1, 1, 2))
    assert same(a, b) and not same(a, c)


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_positions_of_another_seed_are_refused(datasets, kind, number):
    spec = datasets[kind][number]
    position = open_stream(spec, StreamContext(64, seed=1), FLAG).position()
    with pytest.raises(UserError, match=r"^--seed: cannot resume: .* had --seed 1, this one has 2"):
        open_stream(spec, StreamContext(64, seed=2), FLAG).seek(position)


# ---- token ---------------------------------------------------------------------------------------------------------


def test_token_windows_cover_all_files_in_a_row(datasets, tmp_path):
    files = [f"{datasets['token'][0]['dataset_dir']}/{i}.bin" for i in range(4)]
    tokens = np.concatenate([np.fromfile(f, "<u2") for f in files])
    stored = take(open_stream(datasets["token"][0], StreamContext(16, shuffle=False, epochs=1), FLAG))
    assert len(stored) == (len(tokens) - 1) // 16
    for i, sample in enumerate(stored):
        assert np.array_equal(sample.tokens, tokens[16 * i : 16 * i + 17]) and sample.trained is None
    shuffled = take(open_stream(datasets["token"][0], StreamContext(16, seed=1, epochs=2), FLAG))
    assert not same(shuffled[: len(stored)], shuffled[len(stored) :])
    for epoch in (shuffled[: len(stored)], shuffled[len(stored) :]):
        assert not same(epoch, stored)
        assert sorted(s.tokens.tobytes() for s in epoch) == sorted(s.tokens.tobytes() for s in stored)


def test_token_masks_become_untrained_targets(tmp_path):
    tokens, trained = np.arange(1, 42), np.random.default_rng(0).random(41) < 0.5
    spec = {"type": "token", "dataset_dir": str(write_llmq(tmp_path / "x.bin", tokens, trained))}
    first, second = take(open_stream(spec, StreamContext(20, shuffle=False, epochs=1), FLAG))
    assert np.array_equal(first.trained, trained[:20]) and np.array_equal(second.trained, trained[20:40])


# ---- text and hf_text ----------------------------------------------------------------------------------------------


def documents_of(samples: list[Sample]) -> list[bytes]:
    """The documents in packed windows that overlap by one token; the last, which may be cut, is left out."""
    tokens = np.concatenate([s.tokens[:-1] for s in samples])
    ends = np.flatnonzero(tokens == EOS)
    return [bytes(part.astype(np.uint8)) for part in np.split(tokens, ends + 1)[:-1] for part in [part[:-1]]]


@pytest.mark.parametrize(("kind", "number"), [("text", 0), ("text", 1), ("hf_text", 0), ("hf_text", 1)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_packs_every_document_once(datasets, small_reads, kind, number, shuffle):
    ctx = StreamContext(7, seed=4, shuffle=shuffle, epochs=1)
    found = documents_of(take(open_stream(datasets[kind][number], ctx, FLAG)))
    texts = {("text", 0): source_texts()}.get((kind, number), functions() * (2 if kind == "text" else 1))
    expected = sorted(text.encode() for text in texts if text)
    missing = sorted(set(expected) - set(found))
    assert len(missing) <= 1  # the last document may lose its end: less than a window is left over
    assert sorted(found) == sorted(expected) or len(found) == len(expected) - 1


@pytest.mark.parametrize(("kind", "number"), [("text", 0), ("hf_text", 0)])
def test_each_epoch_has_another_order(datasets, kind, number):
    ctx = StreamContext(7, seed=4, epochs=2)
    found = documents_of(take(open_stream(datasets[kind][number], ctx, FLAG)))
    half = len([t for t in (source_texts() if kind == "text" else functions()) if t])
    assert sorted(found[:half]) == sorted(found[half:]) or len(found) == 2 * half - 1
    assert found[: half - 1] != found[half : 2 * half - 1]


def test_hf_text_reads_its_files_in_another_order_each_epoch(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps({"text": str(i)}) + "\n")
    spec = {"type": "hf_text", "dataset": "json", "data_files": f"{tmp_path}/*.jsonl", "tokenizer": "byte"}
    ctx = StreamContext(1, seed=4, epochs=6)
    order = documents_of(take(open_stream({**spec, "shuffle_buffer": 1}, ctx, FLAG)))
    epochs = {b"".join(order[at : at + 4]) for at in range(0, 20, 4)}
    assert all(sorted(epoch) == sorted(b"0123") for epoch in epochs) and len(epochs) > 2


@pytest.mark.parametrize("key", ["split", "part"])
def test_stream_of_a_split_reads_that_split(key):
    counts = {}
    for split in ("all", "train", "validation"):
        spec = {"type": "text", "paths": "python:stdlib", "tokenizer": "byte", key: split}
        counts[split] = open_stream(spec, StreamContext(64), FLAG).position()["documents"]
    assert counts["all"] == counts["train"] + counts["validation"] and counts["validation"] > 10


# ---- mix -----------------------------------------------------------------------------------------------------------


def test_mix_draws_by_weight_and_each_part_in_its_own_order(tmp_path):
    for i in range(3):
        write_raw(tmp_path / f"{i}.bin", np.arange(5000) % 300 + 1000 * i)
    parts = [{"weight": w, "type": "token", "dataset_dir": f"{tmp_path}/{i}.bin"} for i, w in enumerate([1, 2, 5])]
    stream = open_stream({"type": "mix", "datasets": parts}, StreamContext(8, seed=5), FLAG)
    samples = take(stream, 2000)
    drawn = np.array([s.tokens[0] // 1000 for s in samples])
    assert np.bincount(drawn) / 2000 == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)
    seen = [s.tokens.tobytes() for s in samples if s.tokens[0] >= 2000][:600]
    assert len(set(seen)) == len(set(seen[:300]) | set(seen)) > 30


# ---- refusals ------------------------------------------------------------------------------------------------------


def bad_specs(root) -> list[tuple[dict, str]]:
    (root / "empty.txt").touch()
    (root / "blank.jsonl").write_text('{"text": ""}\n' * 3)
    (root / "column.jsonl").write_text('{"texts": "x"}\n' * 3)
    (root / "broken.jsonl").write_text('{"text": "x"}\n{"text"\n')
    write_parquet(root / "folder", files=1)
    (root / "bad.parquet").write_bytes(b"no parquet")
    write_raw(root / "short.bin", np.arange(9))
    text = {"type": "text", "tokenizer": "byte"}
    hf = {"type": "hf_text", "tokenizer": "byte"}
    return [
        ({}, "the key 'type' is missing; allowed: chat, hf_text, instruct, mix, text, token"),
        ({"type": "tokens"}, "Did you mean 'token'"),
        ({"type": "token"}, "'dataset_dir' is missing"),
        ({"type": "token", "dataset_dir": 3}, "must be text or a list of text"),
        (
            {"type": "token", "dataset_dir": f"{root}/short.bin"},
            "9 tokens are too few for one window of seq_len+1 = 65",
        ),
        ({"type": "token", "dataset_dir": f"{root}/x*.bin"}, "matches no file"),
        ({"type": "token", "dataset_dir": []}, "no token shards"),
        ({**text, "paths": f"{root}/empty.txt"}, "no documents"),
        ({**text, "paths": f"{root}/blank.jsonl"}, "every document is empty"),
        ({**text, "paths": f"{root}/bad.parquet"}, "bad.parquet is not a readable parquet file"),
        ({**text, "paths": "python:stdlib", "split": "test"}, "one of 'all', 'train', 'validation'"),
        ({**text, "paths": "python:stdlib", "split": "train", "part": "validation"}, "they mean the same, give one"),
        ({**text, "paths": "python:stdlib", "validation_fraction": 2}, "from 0 to 1"),
        ({**text, "paths": "python:stdlib", "tokeniser": "byte"}, "Did you mean 'tokenizer'"),
        ({**text, "paths": "python:stdlib", "tokenizer": "bytes"}, "Did you mean 'byte'"),
        ({"type": "text", "paths": "python:stdlib"}, "it does not say its tokenizer"),
        ({**hf, "dataset": "json"}, "name its files in data_files"),
        ({**hf, "dataset": "json", "data_files": f"{root}/no*.jsonl"}, "matches no file"),
        ({**hf, "dataset": "json", "data_files": f"{root}/column.jsonl"}, "Did you mean 'texts'? Its columns: texts"),
        ({**hf, "dataset": "json", "data_files": f"{root}/blank.jsonl"}, "every document is empty"),
        ({**hf, "dataset": "json", "data_files": f"{root}/broken.jsonl"}, "cannot be read"),
        ({**hf, "dataset": "json", "data_files": f"{root}/blank.jsonl", "split": "trian"}, "Did you mean 'train'"),
        ({**hf, "dataset": "parquet", "data_files": f"{root}/bad.parquet"}, "cannot be read"),
        ({**hf, "dataset": "./nowhere"}, "does not exist"),
        ({**hf, "dataset": f"{root}/folder", "subset": "en"}, "unknown subset"),
        ({**hf, "dataset": "x/y", "shuffle_buffer": 0}, "at least 1"),
        ({"type": "mix", "datasets": []}, "the list is empty"),
        ({"type": "mix", "datasets": [{"type": "token"}]}, "weight: None is not allowed"),
        ({"type": "mix", "datasets": [{"type": "token", "weight": 0}]}, "weight: 0 is not allowed"),
        ({"type": "mix", "datasets": [{"type": "token", "weight": -1.5}]}, "a number above 0"),
        ({"type": "mix", "datasets": [{"type": "token", "weight": True}]}, "a number above 0"),
        ({"type": "mix", "datasets": [{"type": "txt", "weight": 1}]}, "Did you mean 'text'"),
    ]


@pytest.mark.parametrize("number", range(31))
def test_bad_specs_are_one_line(number, tmp_path):
    spec, said = bad_specs(tmp_path)[number]
    with pytest.raises(UserError, match=r"^--train_ds") as caught:
        open_stream(spec, StreamContext(64), FLAG).next_sample()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_ids_beyond_the_vocabulary_name_the_file(tmp_path):
    write_raw(tmp_path / "0.bin", np.arange(300))
    write_raw(tmp_path / "1.bin", np.array([*range(50), 999, *range(50)]))
    spec = {"type": "token", "dataset_dir": str(tmp_path)}
    with pytest.raises(UserError, match=r"1\.bin, token 50: the token id 999 is beyond .* vocabulary of 900"):
        take(open_stream(spec, StreamContext(16, vocab_size=900, epochs=1), FLAG))
    text = {"type": "text", "paths": "python:stdlib", "tokenizer": "byte"}
    with pytest.raises(UserError, match="has 258 ids, the model's vocabulary is 257"):
        open_stream(text, StreamContext(16, vocab_size=257), FLAG)


def test_a_dataset_of_another_tokenizer_is_refused(tmp_path):
    from qtrain.data.tokenizers.sentencepiece_model import train_tokenizer

    (tmp_path / "x.model").write_bytes(train_tokenizer(source_texts(), 500, "--train_tokenizer"))
    byte = {"type": "text", "paths": "python:stdlib", "tokenizer": "byte"}
    pieces = {**byte, "tokenizer": str(tmp_path / "x.model")}
    run = StreamContext(16, tokenizer=dataset_tokenizer(byte, FLAG))
    assert len(take(open_stream(byte, run, FLAG), 2)) == 2
    with pytest.raises(UserError, match=r"x\.model' differs from the run's, 'byte'"):
        open_stream(pieces, run, "--eval_ds")
    mix = {"type": "mix", "datasets": [{"weight": 1, **byte}, {"weight": 1, **pieces}]}
    for use in (lambda: dataset_tokenizer(mix, FLAG), lambda: open_stream(mix, StreamContext(16), FLAG)):
        with pytest.raises(UserError, match=r"datasets\[1\]: its tokenizer"):
            use()


def test_local_files_are_read_without_the_network(datasets, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: (asked.append(a), (_ for _ in ()).throw(OSError))[1])
    for kind in datasets:
        for spec in datasets[kind]:
            take(open_stream(spec, StreamContext(LENGTHS[kind]), FLAG), 3)
    assert asked == []


def test_without_the_hub_there_is_one_message(monkeypatch):
    import datasets
    import huggingface_hub.constants

    from qtrain.core.hub import hub_reachable

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub_reachable.cache_clear()
    spec = {"type": "hf_text", "dataset": "nobody/nothing-here", "tokenizer": "byte"}
    with pytest.raises(
        UserError, match=r"^--train_ds: the dataset 'nobody/nothing-here' .*could not be reached"
    ) as caught:
        open_stream(spec, StreamContext(16), FLAG)
    assert "\n" not in str(caught.value)
    hub_reachable.cache_clear()


@pytest.mark.parametrize("kind", ["text", "hf_text", "instruct"])
@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".arrow"])
def test_compressed_and_arrow_files_are_read_by_every_type(kind, ending, tmp_path):
    """.zst too, without the package that `datasets` would need for it."""
    path = tmp_path / f"a{ending}"
    form, _, inner = ending[1:].partition(".")
    path.write_bytes(compress(encode([f"text {i} of many" for i in range(200)], f".{form}"), inner and f".{inner}"))
    spec = {"type": kind, "tokenizer": "byte", "paths" if kind == "text" else "dataset": str(path)}
    spec |= {"template": {"prompt": "{id}", "answer": "{text}"}} if kind == "instruct" else {}
    stream = open_stream(spec, StreamContext(seq_len=32, tokenizer=load_tokenizer("byte", "")), "--train_ds")
    assert b"of many" in bytes(stream.next_sample().tokens.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize(("kind", "which"), [case for case in CASES if case[0] in ("text", "hf_text", "instruct")])
def test_the_size_of_an_epoch_is_estimated(datasets, kind, which):
    """For the plan; the stream stays where it is."""
    ctx = StreamContext(seq_len=64, seed=3, epochs=1)
    stream = open_stream(datasets[kind][which], ctx, FLAG)
    start = stream.position()
    about = stream.estimated_samples()
    assert stream.position() == start
    count = 0
    with contextlib.suppress(StopIteration):
        while True:
            stream.next_sample()
            count += 1
    assert about == pytest.approx(count, rel=0.15), count


def test_a_position_with_something_else_for_a_count_is_refused():
    like = {"sample": 3, "datasets": [{"at": 1, "state": None}]}
    check_kind({"sample": 9, "datasets": [{"at": 0, "state": {}}]}, like, "--train_ds")
    for odd in ({"sample": "x"}, {"sample": -1}, {"datasets": [{"at": [1]}]}):
        with pytest.raises(UserError, match=r"--train_ds: cannot resume: .* for a count"):
            check_kind({**like, **odd}, like, "--train_ds")


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"text":'])
def test_json_that_is_nested_too_deeply_is_refused(opening, tmp_path):
    """pyarrow's parser would end the process. Brackets in a text are no nesting until there are too many in one."""
    deep = tmp_path / "deep.jsonl"
    record = '{"text":"[[[["}\n' * 500
    deep.write_text(f'{record}{{"text":{opening * 100_000}\n')
    spec = {"type": "hf_text", "dataset": str(deep), "tokenizer": "byte"}
    with pytest.raises(UserError, match=r"^--train_ds: .*deep\.jsonl' cannot be read: a record of JSON opens [12]00,0"):
        open_stream(spec, StreamContext(10), "--train_ds")
    deep.write_text(record)
    open_stream(spec, StreamContext(10), "--train_ds").next_sample()


@pytest.mark.parametrize("name", ["wide.csv", "wide.csv.gz"])
def test_a_csv_of_very_many_columns_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(compress(b"text" + b",x" * 20_000 + b"\n", ".gz" if name.endswith(".gz") else ""))
    spec = {"type": "hf_text", "dataset": f"{tmp_path}/{name}", "tokenizer": "byte"}
    with pytest.raises(UserError, match=rf"{name}' has 20,001 columns; at most 10,000 are read"):
        open_stream(spec, StreamContext(10), "--train_ds")
