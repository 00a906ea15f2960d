"""Sizes that no machine has are refused at once; ones that this machine has not are a line of the plan."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

import llm_pretrain
import timm_finetune
import tokenize_data
from qtrain.core.errors import UserError
from qtrain.core.hardware import device, memory
from qtrain.data.images.images import class_names
from qtrain.models import build_model, export_hf, read_model_source
from tests.data.corpora import write_jsonl, write_raw
from tests.system import call, flags, write_model

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
SYNTHETIC = {"model": "timm/vit_tiny_patch16_224", "pretrained": False, "n_steps": 1}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_model(Path("deep.json"), num_hidden_layers=10**7)
    write_model(Path("deep_hf.json"), model_type="gpt2", n_layer=10**7)
    write_model(Path("wide.json"), hidden_size=10**12)
    write_jsonl(Path("jsonl"))
    return tmp_path


def plan(**settings) -> list[str]:
    chosen = {"model": "tiny.json", "train_ds": TEXT, "seq_len": 32, "device": "cpu", "dry_run": True}
    return flags(**{**chosen, **settings})


ABSURD = {
    "batch": (llm_pretrain, plan(batch_size=10**12), "--batch_size: 1000000000000 is out of range"),
    "micro-batch": (llm_pretrain, plan(micro_batch_size=10**12), "--micro_batch_size: 1000000000000 is out of range"),
    "sequence": (llm_pretrain, plan(seq_len=10**12), "--seq_len: 1000000000000 is out of range"),
    "layers": (llm_pretrain, plan(model="deep.json"), "num_hidden_layers: 10000000 is out of range"),
    "layers of another architecture": (
        llm_pretrain,
        plan(model="deep_hf.json", model_impl="hf"),
        "--model: n_layer 100",
    ),
    "width": (llm_pretrain, plan(model="wide.json"), "hidden_size: 1000000000000 is out of range"),
    "workers": (llm_pretrain, plan(num_workers=100_000), "--num_workers: 100000 is out of range"),
    "recipe without an end": (
        llm_pretrain,
        ["--config", "/dev/zero"],
        "--config: cannot read /dev/zero: it is a device, not a regular file",
    ),
    "images": (timm_finetune, flags(**SYNTHETIC, batch_size=10**12), "--batch_size: 1000000000000 is out of range"),
    "shards": (tokenize_data, flags(files=["jsonl"], shard_tokens=1), "--shard_tokens: 1 is out of range"),
    "processes": (tokenize_data, flags(files=["jsonl"], n_procs=10**6), "--n_procs: 1000000 is out of range"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_an_absurd_size_is_refused_before_anything_is_built(case):
    """Building it would take minutes or all memory; the processor's seconds leave out what else the machine does."""
    module, argv, message = ABSURD[case]
    start = time.process_time()
    done = call(module.main, argv)
    assert done.code == 2 and done.err.count("\n") == 1 and message in done.err, done
    assert time.process_time() - start < 10


def test_a_vision_model_of_ten_million_blocks_is_refused():
    from qtrain.train.assembly.vision_architecture import VisionArchitecture

    with pytest.raises(UserError, match="--model_kwargs: depth 10000000 is more than 10,000 layers"):
        VisionArchitecture("vit_tiny_patch16_224", {"depth": 10**7}, 10)


def test_a_label_of_a_billion_is_refused():
    with pytest.raises(UserError, match="--train_ds: the label 1000000000 would be one of more than 1,000,000 classes"):
        class_names(np.array([0, 10**9]), None, "--train_ds")
    assert class_names(np.array([0, 2]), None, "--train_ds") == ("0", "1", "2")


def memory_lines(**settings) -> tuple[str, str]:
    """The plan's line of memory and the next one."""
    done = call(llm_pretrain.main, plan(**settings))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("memory")]
    return lines[at], lines[at + 1]


def test_a_plan_beyond_the_hosts_memory_warns_in_a_line(monkeypatch):
    monkeypatch.setattr(device, "host_memory", lambda: 23 * 2**30)
    memory, warning = memory_lines(model="qwen2.5-7b", train_ds={**TEXT, "tokenizer": "byte"})
    assert " of 23.0 GiB, most at " in memory
    assert warning.strip().startswith("warning: this does not fit; the least that settings of memory reach is ")
    memory, warning = memory_lines(batch_size=10**6)
    assert warning.strip().startswith("warning: this does not fit; --") and " --micro_batch_size " in warning
    memory, following = memory_lines()
    assert " of 23.0 GiB, most at " in memory and "does not fit" not in following


@pytest.mark.parametrize(("limit", "expected"), [("1048576\n", 1048576), ("max\n", None), (None, None)])
def test_the_hosts_memory_is_that_of_its_cgroup_if_lower(tmp_path, monkeypatch, limit, expected):
    if limit:
        (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(memory, "CGROUPS", {tmp_path: ("limit", "used")})
    total = next(int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines())
    assert memory.host_memory() == pytest.approx(expected or total, rel=0.01)


@pytest.mark.parametrize("cached", ["inactive_file 500\n", "total_inactive_file 500\n"])
def test_what_a_cgroup_has_left_is_available(tmp_path, monkeypatch, cached):
    text = "MemTotal:  8000 kB\nMemFree:  1 kB\nMemAvailable:     7 kB\n"
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", {tmp_path: ("limit", "used")})
    assert memory.available_memory() is None is memory.pinnable_memory()
    (tmp_path / "meminfo").write_text(text)
    assert memory.available_memory() == 7 * 1024
    for name, content in (("limit", "8000\n"), ("used", "3000\n"), ("memory.stat", f"anon 2500\n{cached}file 500\n")):
        (tmp_path / name).write_text(content)
    assert memory.available_memory() == 8000 - 3000 + 500
    assert memory.pinnable_memory() == 5500 - 1600  # a fifth of 8000 stays free
    (tmp_path / "limit").write_text("max\n")
    assert memory.available_memory() == 7 * 1024


def test_the_plan_counts_epochs_of_token_shards():
    write_raw(Path("tokens/0.bin"), np.arange(3201) % 200)
    done = call(llm_pretrain.main, plan(train_ds={"type": "token", "dataset_dir": "tokens"}, n_steps=50, batch_size=4))
    assert "2 epochs of the training data's 100 sequences" in done.out


def test_more_tokens_than_positions_are_said_in_the_plan_and_in_the_export(tmp_path):
    done = call(llm_pretrain.main, plan(seq_len=128))
    line = "warning: --seq_len 128 is more than the model's 64 positions; the exported config says "
    assert f"{line}max_position_embeddings 128" in done.out.splitlines()
    assert "positions" not in call(llm_pretrain.main, plan(seq_len=64)).out
    source = read_model_source("tiny.json")
    for trained, exported in ((128, 128), (32, 64)):
        export_hf(build_model(source, seed=0), source, tmp_path / "hf", trained_positions=trained)
        assert json.loads((tmp_path / "hf/config.json").read_text())["max_position_embeddings"] == exported


def test_the_plan_says_about_how_many_epochs_of_text_the_steps_are(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 12_799)  # and the end token
    data = {"type": "text", "paths": str(tmp_path / "a.txt"), "tokenizer": "byte"}
    done = call(llm_pretrain.main, flags(model="quickstart", train_ds=data, seq_len=64, n_steps=100, dry_run=True))
    assert "about 2 epochs of the training data (some 200 sequences, estimated from a part of them)" in done.out
