"""tokenize_data.py: what it writes is the corpus, whole, in order and the same however often it is stopped."""

import errno
import hashlib
import json
import multiprocessing.synchronize
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import tokenize_data
from qtrain.core.errors import UserError
from qtrain.data.stream import StreamContext, dataset_tokenizer, open_stream
from qtrain.data.text import corpus as corpus_module
from qtrain.data.text import tokenize as tokenize_module
from qtrain.data.text.manifest import read_manifest
from qtrain.data.text.shards import TokenArray, find_shards, shard_dtype
from qtrain.data.tokenizers.tokenizer import load_tokenizer
from tests.data.corpora import functions, source_texts, write_files, write_jsonl, write_parquet, write_questions
from tests.system import call, flags

ROOT = Path(__file__).parent.parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, with corpora beside it."""
    write_jsonl(tmp_path / "jsonl")
    write_files(tmp_path / "files")
    write_parquet(tmp_path / "parquet")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(corpus_module, "CHUNK_DOCUMENTS", 7)
    return tmp_path / "here"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.endswith(".tmp")}


def tokens_of(folder: Path) -> np.ndarray:
    manifest = read_manifest(folder, "test")
    return np.concatenate([np.fromfile(folder / shard.file, manifest.dtype) for shard in manifest.shards])


BYTE = ["--files", "../jsonl", "--tokenizer", "byte", "--split", "all", "--n_procs", "1"]


def test_shards_hold_every_document_with_its_end(here, capsys):
    tokenize_data.main([*BYTE, "--shard_tokens", "5000"])
    folder = here / "jsonl_all"
    manifest = read_manifest(folder, "test")
    texts = [text for f in range(2) for text in functions()[f::2] if text]
    expected = np.concatenate([[*text.encode(), 257] for text in texts])
    assert np.array_equal(tokens_of(folder), expected)
    assert manifest.complete and manifest.dtype == "uint16" and manifest.documents == len(texts)
    assert manifest.tokens == len(expected) and manifest.max_token_id == 257
    assert [s.tokens for s in manifest.shards[:-1]] == [5000] * (len(expected) // 5000)
    for shard in manifest.shards:
        assert hashlib.sha256((folder / shard.file).read_bytes()).hexdigest() == shard.sha256
    said = capsys.readouterr().out
    assert f"{len(expected):,} tokens" in said and "tokens/s" in said
    assert """llm_pretrain.py --model quickstart --train_ds '{"type":"token","dataset_dir":"jsonl_all"}'""" in said
    spec = {"type": "token", "dataset_dir": "jsonl_all"}
    sample = open_stream(spec, StreamContext(32, shuffle=False), "--train_ds").next_sample()
    tokenizer = dataset_tokenizer(spec, "--train_ds")
    assert tokenizer.decode(sample.tokens.tolist()) == texts[0][:33] and tokenizer.eos_id == 257


HEADERS = {"llmq": [0x2E4E4942, 0x0A4B4F54, 2, 4], "llmc": [20240520, 1], "raw": []}
"""The first integers that llm.q and llm.c compare."""


@pytest.mark.parametrize("layout", HEADERS)
def test_other_programs_shards_are_read_back(layout, here):
    """By their headers alone, as those programs read them, and with the manifest beside them."""
    tokenize_data.main([*BYTE, "--shard_tokens", "5000", "--format", layout, "--output_dir", "out"])
    texts = [text for f in range(2) for text in functions()[f::2] if text]
    expected = np.concatenate([[*text.encode(), 257] for text in texts])
    names = [shard.file for shard in read_manifest(here / "out", "test").shards]
    for name, count in [(names[0], 5000), (names[-1], len(expected) % 5000)]:
        data = (here / "out" / name).read_bytes()
        head = np.frombuffer(data[:1024], "<i4")
        size = {"llmq": 4, "llmc": 2, "raw": 2}[layout]
        assert len(data) == (1024 if HEADERS[layout] else 0) + size * count
        assert head[: len(HEADERS[layout])].tolist() == HEADERS[layout]
        assert layout != "llmq" or head[4:7].tolist() == [count, 258, 0]
        assert layout != "llmc" or head[2] == count
        assert hashlib.sha256(data).hexdigest() in (here / "out/manifest.json").read_text()
    (here / "alone").mkdir()
    for name in names:
        (here / "alone" / name).write_bytes((here / "out" / name).read_bytes())
    for folder in ("out", "alone"):
        shards, _ = find_shards(folder, "test")
        array = TokenArray(shards, "test")
        assert np.array_equal(array.read(0, len(array))[0], expected)


def test_masks_of_answers_are_read_back_as_they_are_trained(here):
    """llm.q's bits are those of the dataset type `instruct` on the same rows; shards cut them anywhere."""
    rows = write_questions(here / "q.jsonl")
    argv = ["--dataset", "q.jsonl", "--template", "gsm8k", "--tokenizer", "byte", "--n_procs", "1", "--format", "llmq"]
    tokenize_data.main([*argv, "--shard_tokens", "1003", "--output_dir", "out"])
    shards, _ = find_shards("out", "test")
    array = TokenArray(shards, "test")
    tokens, trained = array.read(0, len(array))
    learned = bytes(tokens[1:][trained[:-1] & (tokens[1:] < 256)].tolist()).decode()
    assert len(shards) > 3 and learned == "".join(row["answer"] for row in rows) and not trained[-1]
    assert (tokens[1:][trained[:-1]] == 257).sum() == len(rows)  # the ends are learned too
    sample = open_stream({"type": "token", "dataset_dir": "out", "verify": True}, StreamContext(64), "x").next_sample()
    assert sample.trained is not None


def test_output_does_not_depend_on_the_number_of_processes(here):
    for n in ("1", "3"):
        tokenize_data.main([*BYTE[:-1], n, "--shard_tokens", "3000", "--output_dir", f"out{n}"])
    assert contents(here / "out1") == contents(here / "out3")


def test_without_shared_memory_this_process_encodes(here, monkeypatch, capsys):
    """The semaphores of a pool are files of /dev/shm, which may be read-only."""
    tokenize_data.main([*BYTE, "--output_dir", "usual"])

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", refuse)
    tokenize_data.main([*BYTE, "--output_dir", "alone"])
    assert (
        "encoding in this process: no other can be started (Read-only file system, of /dev/shm)"
        in capsys.readouterr()[0]
    )
    assert (here / "alone/tokens_00000.bin").read_bytes() == (here / "usual/tokens_00000.bin").read_bytes()


def test_names_of_files_need_not_be_text(here):
    """A newline, and bytes that are not UTF-8, as a glob finds them."""
    for name in (b"n\xff.txt", b"n\n.txt"):
        (here / os.fsdecode(name)).write_text("some text")
    tokenize_data.main(["--files", "n*.txt", *BYTE[2:], "--output_dir", "named"])
    assert read_manifest(here / "named", "test").documents == 2
    tokenize_data.main(["--files", "n*.txt", *BYTE[2:4], "--split", "train", "--validation_fraction", "0", *BYTE[6:]])


def test_a_local_file_is_a_dataset_too(here, capsys):
    """With the split train only; another file under its name is told from it."""
    file = next((here.parent / "parquet").glob("*.parquet")).rename(here / "rows.parquet")
    argv = ["--dataset", "./rows.parquet", "--tokenizer", "byte", "--n_procs", "1"]
    tokenize_data.main([*argv, "--split", "train"])
    texts = pyarrow.parquet.read_table(file)["text"].to_pylist()
    expected = np.concatenate([[*text.encode(), 257] for text in texts if text])
    assert np.array_equal(tokens_of(here / "rows_train"), expected)
    tokenize_data.main(["--files", "./rows.parquet", *argv[2:], "--split", "all", "--output_dir", "as_files"])
    assert np.array_equal(tokens_of(here / "as_files"), expected)
    with pytest.raises(UserError, match=r"--dataset: unknown split of './rows.parquet' 'validation'.* Allowed: train"):
        tokenize_data.main([*argv, "--split", "validation"])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["other"]}), file)
    with pytest.raises(UserError, match="rows_train was made from files that have changed since"):
        tokenize_data.main([*argv, "--split", "train"])


def test_splits_share_one_tokenizer_trained_on_train(here, capsys):
    options = ["--files", "../files", "--validation_fraction", "0.3", "--train_tokenizer", "800", "--n_procs", "1"]
    tokenize_data.main([*options, "--split", "train,validation", "--output_dir", "both"])
    assert "--eval_ds" in capsys.readouterr().out
    for split in ("validation", "train"):
        tokenize_data.main([*options, "--split", split])
        assert contents(here / f"files_{split}") == contents(here / f"both_{split}")
    tokenizer = load_tokenizer("both_train/tokenizer.model", "test")
    decoded = {split: tokenizer.decode(tokens_of(here / f"both_{split}").tolist()) for split in ("train", "validation")}
    texts = {split: set(text.split("</s>")[:-1]) for split, text in decoded.items()}
    assert texts["train"] | texts["validation"] == set(source_texts()) and not texts["train"] & texts["validation"]
    for split in texts:
        own = dataset_tokenizer({"type": "token", "dataset_dir": f"both_{split}"}, "test")
        assert own.fingerprint() == tokenizer.fingerprint() == load_tokenizer(f"both_{split}", "test").fingerprint()


def test_large_vocabularies_are_written_in_four_bytes(here):
    vocab = {"</s>": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, 70_000)}
    backend = Backend(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    backend.save(str(here / "words.json"))
    (here / "x.txt").write_text("w3 w69999 w65536 other")
    tokenize_data.main(["--files", "x.txt", "--split", "all", "--tokenizer", "words.json", "--n_procs", "1"])
    assert tokens_of(here / "x_all").tolist() == [3, 69_999, 65_536, 1, 0]
    assert read_manifest(here / "x_all", "test").dtype == "uint32"
    assert [shard_dtype("raw", size) for size in (65_536, 65_537)] == ["uint16", "uint32"]


def test_a_dataset_folder_is_streamed_like_a_hub_dataset(here):
    options = ["--dataset", "../parquet", "--tokenizer", "byte", "--n_procs", "2"]
    tokenize_data.main(options)
    texts = [text for f in range(3) for text in functions()[f::3] if text]
    expected = np.concatenate([[*text.encode(), 257] for text in texts])
    assert np.array_equal(tokens_of(here / "parquet_train"), expected)


# ---- stopping and going on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        ["--files", "../jsonl", "--split", "all"],
        pytest.param(["--dataset", "../parquet"], marks=pytest.mark.sweep),
    ],
)
def test_stopped_at_any_shard_it_goes_on_to_the_same_bytes(here, source, monkeypatch, capsys):
    options = [*source, "--tokenizer", "byte", "--n_procs", "1", "--shard_tokens", "7001"]
    tokenize_data.main([*options, "--output_dir", "whole"])
    publish = tokenize_module.publish
    for moment in ("before", "after"):  # before and after a shard gets its name; the manifest does not list it yet
        out, calls = f"stopped_{moment}", 0

        def stop(temporary, path, moment=moment):
            nonlocal calls
            calls += 1
            if calls % 2 or moment == "after":
                publish(temporary, path)
            if calls % 2 == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(tokenize_module, "publish", stop)
        for _ in range(100):
            try:
                tokenize_data.main([*options, "--output_dir", out])
                break
            except KeyboardInterrupt:
                assert not read_manifest(here / out, "test").complete
                with pytest.raises(UserError, match="not finished"):
                    open_stream({"type": "token", "dataset_dir": out}, StreamContext(32), "--train_ds")
        assert calls > 4 and "resuming after" in capsys.readouterr().out
        assert contents(here / out) == contents(here / "whole")


def test_killed_processes_leave_nothing_wrong_behind(here):
    """A real second process, killed without warning twice; the last run ends it."""
    (here / "big.txt").write_text("".join(source_texts()) * 8)
    command = [sys.executable, str(ROOT / "tokenize_data.py"), "--files", "big.txt", "../jsonl", "../files"]
    command += ["--split", "all", "--tokenizer", "byte", "--n_procs", "2", "--shard_tokens", "12000", "--output_dir"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "whole"], env=environment, check=True, stdout=subprocess.DEVNULL)
    shards = len(read_manifest(here / "whole", "test").shards)
    assert shards > 60
    for goal in (1, shards // 2):
        process = subprocess.Popen([*command, "killed"], env=environment, stdout=subprocess.DEVNULL)
        wait_for(lambda g=goal: len(list(here.glob("killed/tokens_*.bin"))) >= g, 60)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it had finished before it was killed"
        wait_for(lambda c=children: not any(Path(f"/proc/{pid}").exists() for pid in c), 10)
    done = len(read_manifest(here / "killed", "test").shards)
    assert shards // 2 - 1 <= done < shards
    result = subprocess.run([*command, "killed"], env=environment, check=True, capture_output=True, text=True)
    assert f"resuming after {done} finished shards" in result.stdout
    assert contents(here / "killed") == contents(here / "whole")


def wait_for(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def test_a_finished_folder_is_left_as_it_is(here, capsys):
    tokenize_data.main(BYTE)
    before = contents(here / "jsonl_all")
    capsys.readouterr()
    tokenize_data.main(BYTE)
    assert "complete already" in capsys.readouterr().out and contents(here / "jsonl_all") == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--shard_tokens", "3000"], "--shard_tokens 5000, not 3000"),
        (["--tokenizer", "llama2"], "--tokenizer 'byte', not 'llama2'"),
        (["--text_column", "id"], None),
        (["--validation_fraction", "0.1"], "--validation_fraction 0.05, not 0.1"),
        (["--files", "../files"], "--files ['../jsonl'], not ['../files']"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(here, change, said):
    tokenize_data.main([*BYTE, "--shard_tokens", "5000", "--output_dir", "out"])
    before = contents(here / "out")
    options = [*BYTE, "--shard_tokens", "5000", "--output_dir", "out"]
    at = options.index(change[0]) if change[0] in options else len(options)
    with pytest.raises(UserError) as caught:
        tokenize_data.main([*options[:at], *change, *options[at + 2 :]])
    assert said is None or said in str(caught.value)
    assert contents(here / "out") == before


def test_changed_files_and_damaged_shards_are_refused(here, monkeypatch):
    options = [*BYTE, "--shard_tokens", "5000", "--output_dir", "out"]
    monkeypatch.setattr(tokenize_module.ShardWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenize_data.main(options)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    shard = here / "out" / "tokens_00001.bin"
    good = shard.read_bytes()
    shard.write_bytes(good[:100] + b"\0" + good[101:])
    with pytest.raises(UserError, match=r"tokens_00001\.bin is missing or damaged"):
        tokenize_data.main(options)
    shard.write_bytes(good)
    (here / "../jsonl/2.jsonl").write_text('{"text": "new"}\n')
    with pytest.raises(UserError, match="from files that have changed since"):
        tokenize_data.main(options)


def test_a_damaged_tokenizer_file_is_found_when_the_folder_is_read(here):
    """Also in bytes that the tokenizer's fingerprint does not see, such as the scores in tokenizer.model: an export
    copies them."""
    tokenize_data.main(["--files", "../files", "--split", "all", "--train_tokenizer", "800", "--output_dir", "out"])
    spec = {"type": "token", "dataset_dir": "out"}
    dataset_tokenizer(spec, "--train_ds")
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        path = here / "out" / name
        good = path.read_bytes()
        path.write_bytes(good[:-30] + bytes([good[-30] ^ 1]) + good[-29:])
        with pytest.raises(UserError, match=rf"^--train_ds: .*{name} is missing or damaged: its sha256"):
            dataset_tokenizer(spec, "--train_ds")
        path.write_bytes(good)
    record = json.loads((here / "out/manifest.json").read_text())
    del record["tokenizer"]["files"]  # of an older folder
    (here / "out/manifest.json").write_text(json.dumps(record))
    dataset_tokenizer(spec, "--train_ds")


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "neither is given"),
        (["--dataset", "tinystories", "--files", "../jsonl"], "both are given"),
        (["--dataset", "tinystorys"], "Did you mean 'tinystories'"),
        (["--dataset", "tinystories", "--split", "train"], "could not be reached"),
        (["--dataset", "c4_realnewslike"], "'allenai/c4' is not in the local cache"),
        (["--dataset", "fineweb_edu"], "'HuggingFaceFW/fineweb-edu'"),
        (["--dataset", "../parquet", "--split", "validation", "--tokenizer", "byte"], "Allowed: train"),
        (["--dataset", "../parquet", "--text_column", "txt", "--tokenizer", "byte"], "Did you mean 'text'"),
        (["--files", "../jsonl", "--split", "trian"], "Did you mean 'train'"),
        (["--files", "../jsonl", "--split", "train,test"], "'test'"),
        (["--files", "../jsonl", "--split", "validation", "--validation_fraction", "0"], "none of the 2 files"),
        (["--files", "../jsonl", "--split", "all"], "'llama2' (NousResearch/Llama-2-7b-hf) is not in the local cache"),
        (["--files", "../jsonl", "--split", "all", "--tokenizer", "bite"], "Did you mean 'byte'"),
        (["--files", "../jsonl", "--subset", "x"], "no subsets"),
        (["--files", "../jsonl", "--tokenizer", "byte", "--train_tokenizer", "500"], "both are given"),
        (["--files", "../jsonl", "--split", "all", "--train_tokenizer", "300"], "Give at least"),
        (["--files", "../jsonl", "--split", "all", "--train_tokenizer", "90000"], "Give at most"),
        (["--files", "../nothing*"], "matches no file"),
        (["--files", "../here"], "matches no file"),
        ([*BYTE, "--shard_tokens", "0"], "from 1000 to 2e+08"),
        ([*BYTE, "--n_procs", "-1"], "from 0 to 1024"),
        ([*BYTE, "--text_column", "txt"], "Did you mean 'text'"),
        ([*BYTE, "--output_dir", "../files"], "holds other files"),
        ([*BYTE, "--output_dir", "/proc/nothing/here"], "cannot write"),
        ([*BYTE, "--shards", "3"], "unknown flag"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(here, options, said, monkeypatch):
    import datasets
    import huggingface_hub.constants

    from qtrain.core.hub import hub_reachable

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub_reachable.cache_clear()
    with pytest.raises(UserError) as caught:
        tokenize_data.main(options)
    hub_reachable.cache_clear()
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not list(here.iterdir())


def test_the_command_exits_with_two_and_without_a_traceback(here):
    command = [sys.executable, str(ROOT / "tokenize_data.py"), "--files", "gone.txt"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: --files: 'gone.txt' does not exist.\n"


def test_a_recipe_does_the_same(here):
    recipe = {"files": ["../jsonl"], "tokenizer": "byte", "split": "all", "n_procs": 1, "output_dir": "out"}
    (here / "r.json").write_text(json.dumps(recipe))
    tokenize_data.main(["--config", "r.json"])
    tokenize_data.main(BYTE)
    assert contents(here / "out") == contents(here / "jsonl_all")


def test_progress_without_a_terminal_is_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(tokenize_module, "PLAIN_INTERVAL_S", 0.0)
    with tokenize_module.TokenizeProgress("x", 10, 2) as progress:
        time.sleep(0.01)
        progress.advance(4, 1000)
    line = capsys.readouterr().out
    assert "6 documents  1,000 tokens" in line and "60%  ETA 00:00:00" in line and "\x1b" not in line


def test_the_printed_next_command_names_a_model_that_fits_the_machine(tmp_path, monkeypatch):
    """Without --model it would train the scripts' default of 470 M parameters."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text " * 50)
    outcome = call(tokenize_data.main, flags(files="a.txt", split="all", tokenizer="byte", n_procs=1, output_dir="t"))
    assert "Train on it: python llm_pretrain.py --model quickstart --train_ds" in outcome.out
