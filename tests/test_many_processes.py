"""The scripts on several processes: they train as one does, save what any number of them resumes, and fail as one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qtrain.distributed import ranks
from qtrain.distributed.ranks import join_world
from qtrain.errors import UserError
from qtrain.train.log.metrics import read_metrics
from tests.cases import sampled
from tests.data.corpora import functions, write_questions, write_raw
from tests.data.images.pictures import write_folder
from tests.system import PYTHON_FIRST, ROOT, contents, flags, losses, only_run, serving, tree, wait_until, write_model
from tests.worlds import environment

TOKENS = {"type": "token", "dataset_dir": "tokens", "tokenizer": "byte"}
SHARED = {"device": "cpu", "deterministic": True, "lr": 0.01, "ckpt_interval": 2, "keep_ckpts": 9}
PRETRAIN = {
    **SHARED,
    "model": "tiny.json",
    "train_ds": TOKENS,
    "eval_ds": TOKENS,
    "eval_sequences": 4,
    "seq_len": 32,
    "batch_size": 12,
    "micro_batch_size": 1,
    "n_steps": 4,
    "optim": "adamw_8bit",
}
INSTRUCT = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}
FINETUNE = {
    **{k: v for k, v in PRETRAIN.items() if k not in ("eval_ds", "eval_sequences")},
    "train_ds": INSTRUCT,
    "pretrained": False,
    "seq_len": 160,
    "batch_size": 4,
}
IMAGES = {"type": "image_folder", "path": "images"}
VISION = {
    **SHARED,
    "model": "vit_tiny_patch16_224",
    "model_kwargs": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "pretrained": False,
    "train_ds": IMAGES,
    "eval_ds": IMAGES,
    "n_steps": 4,
    "batch_size": 4,
    "micro_batch_size": 1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts scripts in a folder that holds data of every kind."""
    folder = tmp_path_factory.mktemp("processes")
    write_model(folder / "tiny.json", max_position_embeddings=512)
    text = "\n".join(functions()[:36]).encode()
    write_raw(folder / "tokens" / "0.bin", torch.frombuffer(bytearray(text[:6000]), dtype=torch.uint8).numpy())
    write_questions(folder / "questions.jsonl")
    write_folder(folder / "images")
    with serving(folder) as server:
        server.folder = folder
        yield server


def run(server, world: int, script: str, runs: Path, **settings: Any) -> Path:
    """The run folder of a whole run on `world` processes. Only rank 0 may say anything."""
    done = server.run_ranks(world, script, flags(**settings, runs_dir=runs))
    assert [outcome.code for outcome in done] == [0] * world, "\n".join(outcome.err for outcome in done)
    assert all("error" not in outcome.err for outcome in done) and all(outcome.out == "" for outcome in done[1:])
    return only_run(runs, script)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The exported weights; of a run with adapters those too."""
    return {f"{p.parent.name} {n}": t for p in folder.glob("*/*.safetensors") for n, t in load_file(p).items()}


def assert_equal(one: Path, other: Path, step: int = 4) -> None:
    """Losses, norms and data positions; the last checkpoint's tensors; the export."""
    assert [row[:5] for row in losses(one)] == [row[:5] for row in losses(other)]
    a, b = (contents(folder / "checkpoints" / f"{step:08d}") for folder in (one, other))
    a, b = ({name: t for name, t in found.items() if not name.startswith("rng.")} for found in (a, b))
    assert a.keys() == b.keys() and len(a) > 10
    assert not [name for name in a if not torch.equal(a[name], b[name])]
    a, b = exported(one), exported(other)
    assert a.keys() == b.keys() and len(a) > 10
    assert not [name for name in a if not torch.equal(a[name], b[name])]


FULLY = {"reshard_after_forward": "always"}
CASES = {
    "int8, ZeRO-2": (2, "llm_pretrain", {**PRETRAIN, "quantize": "int8"}),
    "fp8_tensorwise, HSDP": (4, "llm_pretrain", {**PRETRAIN, "quantize": "fp8_tensorwise", "dp_replicate": 2}),
    "bf16, DDP of 3": (3, "llm_pretrain", {**PRETRAIN, "dp_replicate": 3, "z_loss": 1e-4}),
    "stored in INT8, muon": (2, "llm_pretrain", {**PRETRAIN, "quantize": "int8_weight", "optim": "muon"}),
    "schedule-free": (2, "llm_pretrain", {**PRETRAIN, "quantize": "bitnet", "optim": "adamw_schedule_free"}),
    "transformers": (2, "llm_pretrain", {**PRETRAIN, "quantize": "int8", "model_impl": "hf"}),
    "LoRA on NF4": (2, "llm_finetune", {**FINETUNE, "lora": {"r": 2, "base": "nf4"}}),
    "fine-tuned, recomputed": (2, "llm_finetune", {**FINETUNE, "quantize": "int8", "activation_checkpointing": "full"}),
    "fp8_tensorwise, fully sharded": (2, "llm_pretrain", {**PRETRAIN, **FULLY, "quantize": "fp8_tensorwise"}),
    "stored in INT4, fully sharded": (3, "llm_pretrain", {**PRETRAIN, **FULLY, "quantize": "int4_weight"}),
    "schedule-free, fully sharded HSDP": (
        4,
        "llm_pretrain",
        {**PRETRAIN, **FULLY, "dp_replicate": 2, "quantize": "bitnet", "optim": "adamw_schedule_free"},
    ),
    "transformers, fully sharded": (
        2,
        "llm_pretrain",
        {**PRETRAIN, **FULLY, "quantize": "int8", "model_impl": "hf", "activation_checkpointing": "full"},
    ),
    "fine-tuned, recomputed, fully sharded": (
        2,
        "llm_finetune",
        {**FINETUNE, **FULLY, "quantize": "int8", "activation_checkpointing": "selective"},
    ),
    "timm, recomputed, fully sharded": (
        2,
        "timm_finetune",
        {**VISION, **FULLY, "quantize": "fp8_rowwise", "activation_checkpointing": "full"},
    ),
    "timm, averaged": (2, "timm_finetune", {**VISION, "quantize": "int8", "ema_decay": 0.9}),
}


SWEPT = (
    "bf16, DDP of 3",
    "schedule-free",
    "fine-tuned, recomputed",
    "stored in INT4, fully sharded",
    "fine-tuned, recomputed, fully sharded",
    "timm, recomputed, fully sharded",
)


@pytest.mark.parametrize("case", sampled([*CASES], lambda case: case in SWEPT))
def test_several_processes_train_as_one(server, case, tmp_path):
    world, script, settings = CASES[case]
    alone = {k: v for k, v in settings.items() if not k.startswith(("dp_", "reshard"))}
    one = run(server, 1, script, tmp_path / "one", **alone)
    assert_equal(one, run(server, world, script, tmp_path / "many", **settings))


def test_saved_by_four_and_resumed_by_any_number_and_back(server, tmp_path):
    """4 > 1, 4 > 2x2, 1 > 3: each goes on as the undisturbed run."""
    settings = {**PRETRAIN, "quantize": "int8", "n_steps": 4}
    whole = run(server, 1, "llm_pretrain", tmp_path / "whole", **settings)
    for first, then, mesh in ((4, 1, {}), (4, 4, {"dp_replicate": 2}), (1, 3, {})):
        runs = tmp_path / f"{first} {then} {len(mesh)}"
        begun = run(server, first, "llm_pretrain", runs, **settings)
        for path in begun.glob("checkpoints/00000004/*"):
            path.unlink()
        (begun / "checkpoints/00000004").rmdir()
        done = server.run_ranks(then, "llm_pretrain", flags(**settings, **mesh, runs_dir=runs, resume=begun))
        assert {outcome.code for outcome in done} == {0}, done[0].err
        assert "resumed at step 2" in done[0].out
        assert_equal(whole, begun)
    assert Path(os.devnull).is_char_device(), "the logs of other ranks are written there, and truncated nowhere"


# ---- processes that end ----------------------------------------------------------------------------------------------


def launched(folder: Path, *words: str, **settings: Any) -> subprocess.Popen:
    """llm_pretrain.py as a user starts it, in a folder."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "llm_pretrain.py"), *flags(**settings), *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**PYTHON_FIRST, "OMP_NUM_THREADS": "1"},
    )


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The processes that a launcher started, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    by_rank = {}
    for pid in map(int, children):
        found = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        if found:
            by_rank[int(found[1])] = pid
    return [by_rank[rank] for rank in sorted(by_rank)]


def test_a_killed_rank_ends_the_run_and_the_run_resumes(server, tmp_path):
    settings = {**PRETRAIN, "quantize": "int8", "n_steps": 400, "eval_interval": 0, "runs_dir": tmp_path}
    process = launched(server.folder, gpus=2, **settings)
    wait_until(lambda: [*tmp_path.glob("*/*/checkpoints/00000002/COMPLETE")], 120)
    folder = only_run(tmp_path)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert process.returncode == 128 + signal.SIGKILL
    assert errors == "error: rank 1 was killed by SIGKILL; all ranks end.\n"
    last = max(r["step"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r)
    saved = max(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
    assert saved in (last - 1, last, last - 2)

    again = launched(server.folder, **{**settings, "n_steps": saved + 2}, gpus=2, resume="auto")
    out, errors = again.communicate(timeout=120)
    assert (again.returncode, errors) == (0, "") and f"resumed at step {saved}" in out
    steps = [r["step"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
    assert steps == [*range(1, saved + 3)]


def test_a_signal_to_one_rank_is_one_save_of_all(server, tmp_path):
    settings = {**PRETRAIN, "n_steps": 400, "ckpt_interval": 0, "eval_interval": 0, "runs_dir": tmp_path}
    ranks = [server.start("llm_pretrain", flags(**settings), **variables) for variables in environment(2)]
    wait_until(lambda: [p for p in tmp_path.glob("*/*/metrics.jsonl") if len(read_metrics(p)) > 2], 60)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert [rank.wait().code for rank in ranks] == [143, 143]
    folder = only_run(tmp_path)
    last = [r["step"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r][-1]
    assert [int(p.name) for p in (folder / "checkpoints").iterdir()] == [last]


def test_a_nonfinite_gradient_of_one_rank_stops_all_before_the_update(server, tmp_path):
    """The second half of the stream's first step, which rank 1 reads, would make every gradient infinite."""
    settings = {**PRETRAIN, "lr": 1e30, "clip_grad_norm": 0, "n_steps": 6, "runs_dir": tmp_path}
    done = server.run_ranks(2, "llm_pretrain", flags(**settings))
    assert done[0].code == 1 and done[1].code in (1, -signal.SIGKILL)
    assert done[0].err.count("error:") == 1 and "is nan" in done[0].err.lower() and done[1].err == ""


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "says", "settings"),
    [
        (2, "--batch_size: 5 sequences cannot be shared equally by 2", {"batch_size": 5, "micro_batch_size": 0}),
        (2, "--dp_shard: 3 does not divide the 2 processes", {"dp_shard": 3}),
        (2, "--dp_replicate: 4 does not divide the 2 processes", {"dp_replicate": 4}),
        (2, "--dp_replicate, --dp_shard: 2 x 2 is not the 2 processes", {"dp_replicate": 2, "dp_shard": 2}),
        (2, "--gpus: 3, but the launcher started WORLD_SIZE=2 processes", {"gpus": 3}),
        (2, "--gradient_wire, --deterministic: the one rounds", {"gradient_wire": "int8"}),
        (2, "--optimizer_in_backward", {"optimizer_in_backward": True, "clip_grad_norm": 0, "batch_size": 2}),
        (2, "--quantize: unknown scheme 'int9'", {"quantize": "int9"}),
        (2, "--resume: nowhere cannot be loaded: there is no such folder", {"resume": "nowhere"}),
        (2, "--train_ds", {"train_ds": {"type": "token", "dataset_dir": "nowhere", "tokenizer": "byte"}}),
    ],
)
def test_a_mistake_is_one_message_of_rank_0(server, world, says, settings, tmp_path):
    done = server.run_ranks(world, "llm_pretrain", flags(**{**PRETRAIN, "runs_dir": tmp_path / "runs", **settings}))
    assert done[0].code == 2 and {outcome.code for outcome in done} <= {2, -signal.SIGKILL}
    first, *others = [outcome.err for outcome in done]
    assert first.startswith("error: ") and says in first and first.count("\n") == 1
    assert others == [""] * (world - 1) and [outcome.out for outcome in done] == [""] * world
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' is not a number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not a number of processes"),
        ({"WORLD_SIZE": "2"}, "RANK: it is not set, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "the 2 processes did not meet"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "did not meet"),
    ],
)
def test_a_broken_launch_is_one_message(server, variables, says, tmp_path):
    settings = {**PRETRAIN, "runs_dir": tmp_path / "runs"}
    done = server.start("llm_pretrain", flags(**settings), **variables).wait()
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1 and done.out == ""
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("rank", ["5", "x", "-1"])
def test_a_rank_outside_the_world(rank, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^RANK: '{rank}' is not a number from 0 to 1"):
        join_world(torch.device("cpu"))


def test_a_port_that_is_taken_and_a_rank_that_is_missing(server, tmp_path, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        taken = {**variables, "MASTER_PORT": str(other.getsockname()[1])}
        done = server.start("llm_pretrain", flags(**PRETRAIN, runs_dir=tmp_path / "runs"), **taken).wait()
    assert done.code == 2 and "the 2 processes did not meet" in done.err and done.err.count("\n") == 1
    monkeypatch.setattr(ranks, "MEETING_TIMEOUT", timedelta(seconds=1))
    for name, value in environment(2)[0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="the 2 processes did not meet"):
        join_world(torch.device("cpu"))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("says", "settings"),
    [
        ("--gpus: -1 is out of range", {"gpus": -1}),
        ("--gpus", {"gpus": "two"}),
        ("--gpus: 2 is more than the 0 that torch sees", {"gpus": 2, "device": "cuda"}),
        ("--dp_shard: 2 does not divide the 1 process", {"dp_shard": 2}),
        ("--gradient_wire", {"gradient_wire": "int2"}),
    ],
)
def test_a_mistake_before_any_process_is_started(server, says, settings, tmp_path):
    done = server.run("llm_pretrain", flags(**{**PRETRAIN, "runs_dir": tmp_path / "runs", **settings}))
    assert done.code == 2 and says in done.err and done.out == "" and tree(tmp_path) == {}


def test_gpus_2_as_a_new_user_types_it(server, tmp_path):
    """One screen, one run folder, a log of every rank, the losses of one process."""
    settings = {**PRETRAIN, "quantize": "int8", "n_steps": 2}
    one = run(server, 1, "llm_pretrain", tmp_path / "one", **settings)
    process = launched(server.folder, gpus=2, runs_dir=tmp_path / "two", **settings)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert "1 x 2 (replicate x shard, ZeRO-2)" in out and out.count("report ") == 1
    two = only_run(tmp_path / "two")
    assert_equal(one, two, 2)
    assert {p.name for p in two.glob("train*.log")} == {"train.log", "train.rank1.log"}
    assert json.loads((two / "config.json").read_text())["gpus"] == 2
