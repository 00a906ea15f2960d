"""The scripts on several processes: they train as one does, save what any number of them resumes, and fail as one."""

import json
import os
import shutil
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qtrain.comm import ranks
from qtrain.comm.launch import check_gpus, count_gpus
from qtrain.comm.ranks import check_launcher, join_world
from qtrain.core.errors import UserError
from qtrain.core.process import LAUNCHER
from qtrain.train.log.metrics import read_metrics
from tests.cases import sampled
from tests.data.corpora import write_questions
from tests.data.images.pictures import write_folder
from tests.processes import PRETRAIN, SHARED, TOKENS, write_pretraining
from tests.system import ROOT, contents, flags, losses, only_run, serving, tree, write_model
from tests.test_mixture_runs import DEEPSEEK
from tests.train.test_spikes import DRAW
from tests.worlds import environment

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


SPIKES = {
    "n_steps": 40,
    "spike_threshold": 5.0,
    "micro_batch_size": 6,
    "ckpt_interval": 33,
    "eval_interval": 0,
    "export": False,
    "lr_schedule_kwargs": {"warmup": 0, "decay": 0},
}
NO_PROCESSES = "import qtrain.comm.launch; qtrain.comm.launch.run_processes = None"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts scripts in a folder that holds data of every kind."""
    folder = tmp_path_factory.mktemp("processes")
    write_pretraining(folder)
    write_model(folder / "mixture.json", **DEEPSEEK)
    write_model(folder / "untied.json", tie_word_embeddings=False)
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
    assert_same_checkpoint(one, other, step)
    a, b = exported(one), exported(other)
    assert a.keys() == b.keys() and len(a) > 10
    assert not [name for name in a if not torch.equal(a[name], b[name])]


def assert_same_checkpoint(one: Path, other: Path, step: int) -> None:
    a, b = (contents(folder / "checkpoints" / f"{step:08d}") for folder in (one, other))
    a, b = ({name: t for name, t in found.items() if not name.startswith("rng.")} for found in (a, b))
    assert a.keys() == b.keys() and len(a) > 10
    assert not [name for name in a if not torch.equal(a[name], b[name])]


HSDP_ASYNC = {"dp_replicate": 2, "async_checkpoint": True}
MIXTURE = {**PRETRAIN, "model": "mixture.json", "router_bias_rate": 0.01, "router_balance_loss": 0.01}
DIVIDED = {"model": "mixture.json", "ep": 2}
FULLY, RECOMPUTED = {"reshard_after_forward": "always"}, {"activation_checkpointing": "selective"}
AVERAGED = {**VISION, "quantize": "int8_weight", "ema_decay": 0.9}
UNTIED = {"model": "untied.json"}
CASES = {
    "int8, ZeRO-2": (2, "llm_pretrain", {**PRETRAIN, "quantize": "int8"}),
    "fp8_tensorwise, HSDP": (4, "llm_pretrain", {**PRETRAIN, "quantize": "fp8_tensorwise", **HSDP_ASYNC}),
    "bf16, DDP of 3": (3, "llm_pretrain", {**PRETRAIN, "dp_replicate": 3, "z_loss": 1e-4}),
    "stored in INT8, muon": (2, "llm_pretrain", {**PRETRAIN, "quantize": "int8_weight", "optim": "muon"}),
    "schedule-free": (2, "llm_pretrain", {**PRETRAIN, "quantize": "bitnet", "optim": "adamw_schedule_free"}),
    "transformers": (2, "llm_pretrain", {**PRETRAIN, "quantize": "int8", "model_impl": "hf"}),
    "LoRA on NF4": (2, "llm_finetune", {**FINETUNE, "lora": {"r": 2, "base": "nf4"}}),
    "LoRA in fp8_tensorwise, recomputed, fully sharded HSDP": (
        4,
        "llm_finetune",
        {**FINETUNE, **FULLY, **RECOMPUTED, "dp_replicate": 2, "quantize": "fp8_tensorwise", "lora": {"r": 2}},
    ),
    "fine-tuned, recomputed": (2, "llm_finetune", {**FINETUNE, "quantize": "int8", "activation_checkpointing": "full"}),
    "fp8_tensorwise, head too, fully sharded": (
        2,
        "llm_pretrain",
        {**PRETRAIN, **UNTIED, **FULLY, "quantize": "fp8_tensorwise", "quantize_lm_head": True, "loss_chunks": 3},
    ),
    "int8, a head with the embedding's weight too, fully sharded": (
        2,
        "llm_pretrain",
        {**PRETRAIN, **FULLY, "quantize": "int8", "quantize_lm_head": True},
    ),
    "transformers, head too, fully sharded": (
        2,
        "llm_pretrain",
        {**PRETRAIN, **UNTIED, **FULLY, "quantize": "int8", "quantize_lm_head": True, "model_impl": "hf"},
    ),
    "timm, classifier too, fully sharded": (
        2,
        "timm_finetune",
        {**VISION, **FULLY, "quantize": "fp8_tensorwise", "quantize_lm_head": True},
    ),
    "stored in INT4, fully sharded": (3, "llm_pretrain", {**PRETRAIN, **FULLY, "quantize": "int4_weight"}),
    "schedule-free, fully sharded HSDP": (
        4,
        "llm_pretrain",
        {**PRETRAIN, **UNTIED, **FULLY, "dp_replicate": 2, "quantize": "bitnet", "optim": "adamw_schedule_free"},
    ),
    "transformers, fully sharded": (
        2,
        "llm_pretrain",
        {**PRETRAIN, **FULLY, "quantize": "int8", "model_impl": "hf", "activation_checkpointing": "full"},
    ),
    "fine-tuned, frozen embedding, fully sharded": (
        2,
        "llm_finetune",
        {**FINETUNE, **UNTIED, **FULLY, "quantize": "int8", "freeze_embedding_layer": True},
    ),
    "timm, recomputed, fully sharded": (
        2,
        "timm_finetune",
        {**VISION, **FULLY, "quantize": "fp8_rowwise", "activation_checkpointing": "full"},
    ),
    "a mixture of experts": (2, "llm_pretrain", {**MIXTURE, "dp_replicate": 2}),
    "a mixture of experts, recomputed, fully sharded": (
        2,
        "llm_pretrain",
        {**MIXTURE, **FULLY, "activation_checkpointing": "selective"},
    ),
    "a mixture of experts, divided": (2, "llm_pretrain", {**MIXTURE, "ep": 2}),
    "a mixture of experts, fine-tuned, divided": (2, "llm_finetune", {**FINETUNE, **DIVIDED, "quantize": "int8"}),
    **{
        f"a mixture of experts, adapters on {base}, divided": (2, "llm_finetune", {**FINETUNE, **DIVIDED, "lora": lora})
        for base, lora in (("bf16", {"r": 2}), ("NF4", {"r": 2, "base": "nf4"}), ("FP8", {"r": 2, "base": "fp8"}))
    },
    "a mixture of experts, divided, HSDP": (4, "llm_pretrain", {**MIXTURE, **HSDP_ASYNC, "ep": 2, "optim": "muon"}),
    "a mixture of experts, fully sharded, its experts divided": (
        4,
        "llm_pretrain",
        {**MIXTURE, **FULLY, "ep": 2, "quantize": "int8", "optim": "muon"},
    ),
    "a mixture of experts, fully sharded but for its experts": (
        2,
        "llm_pretrain",
        {**MIXTURE, **FULLY, "ep": 2, "quantize": "fp8_tensorwise", "activation_checkpointing": "full"},
    ),
    "timm, averaged": (2, "timm_finetune", {**VISION, "quantize": "int8", "ema_decay": 0.9}),
    "timm, stored in INT8, averaged, HSDP": (4, "timm_finetune", {**AVERAGED, "dp_replicate": 2}),
}


SWEPT = (
    "int8, ZeRO-2",
    "bf16, DDP of 3",
    "a mixture of experts",
    "a mixture of experts, recomputed, fully sharded",
    "a mixture of experts, divided",
    "a mixture of experts, divided, HSDP",
    "a mixture of experts, fully sharded but for its experts",
    "schedule-free",
    "transformers",
    "fine-tuned, recomputed",
    "transformers, fully sharded",
    "transformers, head too, fully sharded",
    "timm, classifier too, fully sharded",
    "LoRA on NF4",
    "LoRA in fp8_tensorwise, recomputed, fully sharded HSDP",
    "timm, averaged",
    "timm, stored in INT8, averaged, HSDP",
    "stored in INT4, fully sharded",
    "schedule-free, fully sharded HSDP",
    "fine-tuned, frozen embedding, fully sharded",
    "timm, recomputed, fully sharded",
)


@pytest.mark.parametrize("case", sampled([*CASES], lambda case: case in SWEPT))
def test_several_processes_train_as_one(server, case, tmp_path):
    world, script, settings = CASES[case]
    alone = {k: v for k, v in settings.items() if k not in {**HSDP_ASYNC, **FULLY, "ep": 2}}
    one = run(server, 1, script, tmp_path / "one", **alone)
    many = run(server, world, script, tmp_path / "many", **settings)
    assert_equal(one, many)
    assert_same_checkpoint(one, many, 2)


@pytest.mark.parametrize("sharding", sampled([{}, FULLY], lambda sharding: not sharding))
def test_updates_within_the_backward_pass_are_those_after_it(server, sharding, tmp_path):
    settings = {**PRETRAIN, **sharding, "deterministic": False, "batch_size": 2, "clip_grad_norm": 0}
    settings |= {"quantize": "fp8_tensorwise", "optimizer_in_backward": False}
    after = run(server, 2, "llm_pretrain", tmp_path / "after", **settings)
    within = run(server, 2, "llm_pretrain", tmp_path / "within", **{**settings, "optimizer_in_backward": True})
    assert_equal(after, within)


STOCHASTIC = {"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": True}}
RESUMED = {
    "timm, averaged": ("timm_finetune", {**VISION, "quantize": "fp8_rowwise", "ema_decay": 0.9}, "ema."),
    "LoRA on NF4": ("llm_finetune", {**FINETUNE, "lora": {"r": 2, "base": "nf4"}}, "lora_a"),
    "DoRA in BF16": ("llm_finetune", {**FINETUNE, "lora": {"r": 2, "dora": True}}, "magnitude"),
    "LoRA, rounded stochastically": ("llm_finetune", {**FINETUNE, **STOCHASTIC, "lora": {"r": 2}}, "lora_a"),
}


@pytest.mark.parametrize("case", sampled([*RESUMED], lambda case: case in ("DoRA in BF16", "LoRA on NF4")))
def test_one_process_goes_on_with_what_two_have_saved_fully_sharded(server, case, tmp_path):
    """Weights that layers do not train, and averages of those that they do, are divided too."""
    script, settings, saved = RESUMED[case]
    one = run(server, 1, script, tmp_path / "one", **settings)
    many = run(server, 2, script, tmp_path / "many", **{**settings, **FULLY})
    assert_equal(one, many)
    assert [row[6:] for row in losses(one)] == [row[6:] for row in losses(many)]  # of evaluations
    assert sum(saved in name for name in contents(many / "checkpoints/00000002")) > 3
    shutil.rmtree(many / "checkpoints/00000004")
    done = server.run(script, flags(**settings, runs_dir=tmp_path / "many", resume=many))
    assert done.code == 0, done.err
    assert_equal(one, many)


FASTEST = """import qtrain.quant.schemes.auto as auto
auto.time_linear = lambda scheme, *others: float(scheme.gemm_dtypes()["output"] != {!r})"""


@pytest.mark.parametrize("parts", sampled([{}, {"tp": 2}], lambda parts: bool(parts)))
def test_the_scheme_that_is_the_fastest_on_rank_0_is_that_of_all(server, parts, tmp_path):
    write_model(server.folder / "heads.json", max_position_embeddings=512, num_key_value_heads=2)
    settings = {**PRETRAIN, **parts, "model": "heads.json", "quantize": "auto", "n_steps": 2}
    settings["quantize_kwargs"] = {"candidates": ["int8", "fp8_rowwise"]}
    argv = flags(**settings, runs_dir=tmp_path / "auto")
    done = server.run_ranks(2, "llm_pretrain", argv, {0: FASTEST.format("int8"), 1: FASTEST.format("fp8")})
    assert [outcome.code for outcome in done] == [0, 0], done[0].err
    auto = only_run(tmp_path / "auto")
    assert set(json.loads((auto / "config.json").read_text())["quantize_kwargs"]["chosen"].values()) == {"int8"}
    named = {**settings, "quantize": "int8", "quantize_kwargs": {}}
    assert_equal(run(server, 2, "llm_pretrain", tmp_path / "named", **named), auto, 2)


@pytest.mark.sweep
def test_saved_by_four_and_resumed_by_any_number_and_back(server, tmp_path):
    """4 > 3, 1 > 2x2: each goes on as the undisturbed run."""
    settings = {**PRETRAIN, "quantize": "int8", "n_steps": 4}
    whole = run(server, 1, "llm_pretrain", tmp_path / "whole", **settings)
    for first, then, mesh in ((4, 3, {}), (1, 4, {"dp_replicate": 2, **FULLY})):
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
        (2, "--optimizer_in_backward: with --deterministic weights", {"optimizer_in_backward": True, "batch_size": 2}),
        (
            2,
            "give --gradient_accumulation 1 --micro_batch_size 6",
            {"optimizer_in_backward": True, "deterministic": False},
        ),
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
    ("action", "sharding"),
    sampled([("skip", {}), ("rewind", FULLY), ("rewind", {})], lambda action, sharding: not sharding),
)
def test_ranks_skip_and_rewind_alike(server, action, sharding, tmp_path):
    """What only one rank's batch has is seen by all; their losses are those of one process."""
    settings = {**PRETRAIN, **SPIKES, "on_spike": action, "runs_dir": tmp_path / "two"}
    patch = f"from tests.train.test_spikes import spoil; spoil({{{DRAW}}})"
    done = server.run_ranks(2, "llm_pretrain", flags(**settings, **sharding), {1: patch})
    assert [outcome.code for outcome in done] == [0, 0], done[0].err
    (spike,) = (r["spike"] for r in read_metrics(only_run(tmp_path / "two") / "metrics.jsonl") if "spike" in r)
    assert (spike["action"], spike["step"]) == (action, DRAW)
    assert f"step {DRAW}: --on_spike: " in done[0].out
    rows = [r for r in read_metrics(only_run(tmp_path / "two") / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in rows] == [*range(1, SPIKES["n_steps"] + 1)]
    left_out = {DRAW} if action == "skip" else {*range(SPIKES["ckpt_interval"] + 1, DRAW + 1)}
    patch = f"from tests.train.test_spikes import spoil; spoil({left_out}, leave_out=True)"
    (one,) = server.run_ranks(1, "llm_pretrain", flags(**{**settings, "runs_dir": tmp_path / "one"}), {0: patch})
    assert one.code == 0, one.err
    expected = [r["loss"] for r in read_metrics(only_run(tmp_path / "one") / "metrics.jsonl") if "loss" in r]
    found = [r["loss"] for r in rows if action == "rewind" or r["step"] != DRAW]
    assert found == expected[: len(found)]


@pytest.mark.parametrize(
    ("says", "settings", "patch"),
    [
        ("--lr: it is 0.02 on rank 1 and 0.01 on rank 0; start all processes with the same flags", {"lr": 0.02}, ""),
        (
            "--train_ds: rank 1 reads other data than rank 0: windows is 93 there and 168 on rank 0",
            {},
            "import shutil; shutil.copytree('tokens', 'own/tokens')\n"
            "import numpy; numpy.fromfile('tokens/0.bin', 'u2')[:3000].tofile('own/tokens/0.bin')\n"
            "shutil.copy('tiny.json', 'own'); os.chdir('own')",
        ),
        (
            "WORLD_SIZE: rank 1 runs qtrain other and rank 0 ",
            {},
            "import qtrain.train.plan.checked_settings as c; c.source_digest = lambda: 'other'",
        ),
        (
            "--runs_dir: rank 1 does not see ",
            {},
            "from qtrain.train.state import run; run.SHARED_SECONDS = 0.5\n"
            "from pathlib import Path; Path.exists = lambda self, **_: False",
        ),
    ],
    ids=["settings", "data", "version", "folder"],
)
def test_ranks_that_differ_are_one_message_that_names_one(server, says, settings, patch, tmp_path):
    argv = flags(**{**PRETRAIN, "runs_dir": tmp_path / "runs"})
    done = server.run_ranks(2, "llm_pretrain", argv, {1: patch}, {1: flags(**settings)})
    assert done[0].code == 2 and {outcome.code for outcome in done} <= {2, -signal.SIGKILL}
    assert done[0].err.startswith("error: ") and says in done[0].err and done[0].err.count("\n") == 1
    assert done[1].err == "" and not [*tmp_path.glob("**/metrics.jsonl")]


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' is not a number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not a number of processes"),
        ({"WORLD_SIZE": "2"}, "RANK: it is not set, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "the 2 processes did not meet"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "did not meet"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "no host"}, "MASTER_ADDR: the host 'no host' is not known"),
        ({"QTRAIN_TUNE": "maybe"}, "QTRAIN_TUNE: 'maybe' is not allowed; 0 times nothing"),
    ],
)
def test_a_broken_launch_is_one_message(server, variables, says, tmp_path):
    settings = {**PRETRAIN, "runs_dir": tmp_path / "runs"}
    done = server.start("llm_pretrain", flags(**settings), **variables).wait()
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1 and done.out == ""
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(("rank", "says"), [("5", "5 is not below WORLD_SIZE, 2"), ("x", "'x' is not"), ("-1", "'-1'")])
def test_a_rank_outside_the_world(rank, says, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^RANK: {says}"):
        check_launcher()


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
        ("--gpus: 'two' is not allowed; it must be a whole number from 0 to 1024 or one of 'all'", {"gpus": "two"}),
        ("--gpus: all counts the GPUs of this machine, and --device cpu has none; give a number", {"gpus": "all"}),
        ("--dp_shard: 2 does not divide the 1 process", {"dp_shard": 2}),
        ("--gradient_wire", {"gradient_wire": "int2"}),
        (
            "--world_size: one process plans",
            {"gpus": 2, "world_size": 4, "gpu": "h200", "dry_run": True, "device": "auto"},
        ),
    ],
)
def test_a_mistake_before_any_process_is_started(server, says, settings, tmp_path):
    argv = flags(**{**PRETRAIN, "runs_dir": tmp_path / "runs", **settings})
    done = server.start("llm_pretrain", argv, patch=NO_PROCESSES).wait()
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1
    assert done.out == "" and tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("says", "settings"),
    [
        ("--optim: unknown optimizer 'adamv'", {"optim": "adamv"}),
        ("--train_ds", {"train_ds": {**TOKENS, "dataset_dir": "tokenz"}}),
        ("--model", {"model": "tinny.json"}),
        ("--ep: 2 does not divide the 1 process that reads data", {"tp": 2, "ep": 2}),
    ],
)
def test_what_all_ranks_refuse_rank_0_says(server, says, settings, tmp_path):
    argv = flags(**{**PRETRAIN, "gpus": 2, "runs_dir": tmp_path / "runs", **settings})
    first, second = server.run_ranks(2, "llm_pretrain", argv)
    assert first.code == 2 and says in first.err and first.err.count("\n") == 1
    assert first.out == second.out == second.err == "" and tree(tmp_path) == {}


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_rank_that_launch_started_says_how_many_gpus_are_missing(device, monkeypatch):
    """Under another launcher the ranks may be those of several machines."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_gpus(2, device)
    monkeypatch.setenv(LAUNCHER, "1")
    check_gpus(2, "cpu")
    with pytest.raises(UserError, match="--gpus: 2 is more than the 1 that torch sees on this machine"):
        check_gpus(2, device)


@pytest.mark.parametrize("launcher", [False, True])
def test_all_gpus_are_those_of_the_machine_or_the_launchers_ranks(launcher, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if launcher:
        monkeypatch.setenv("WORLD_SIZE", "8")
    assert count_gpus("all", "auto") == (8 if launcher else 3) and count_gpus(2, "auto") == 2


def test_ranks_whose_time_is_up_stop_after_the_same_step(server, tmp_path):
    settings = {**PRETRAIN, "n_steps": 100_000, "eval_interval": 0, "ckpt_interval": 0, "max_hours": 0.001}
    found = run(server, 2, "llm_pretrain", tmp_path / "runs", **settings)
    (checkpoint,) = (found / "checkpoints").iterdir()
    assert int(checkpoint.name) == read_metrics(found / "metrics.jsonl")[-1]["step"] < 100_000


def test_gpus_2_is_planned_without_processes(server, tmp_path):
    argv = flags(**{**PRETRAIN, "gpus": 2}, dry_run=True, runs_dir=tmp_path / "runs")
    done = server.start("llm_pretrain", argv, patch=NO_PROCESSES).wait()
    assert (done.code, done.err) == (0, "") and "1 x 2 (replicate x shard, ZeRO-2)" in done.out
    assert "12 sequences (1 x 6 accumulated x 2 devices)" in done.out and tree(tmp_path) == {}


def test_gpus_2_as_a_new_user_types_it(server, tmp_path):
    """One screen, one run folder, a log of every rank, the losses of one process, also in micro-batches of the default
    size."""
    settings = {**PRETRAIN, "quantize": "int8", "n_steps": 2, "micro_batch_size": 0}
    one = run(server, 1, "llm_pretrain", tmp_path / "one", **settings)
    argv = flags(gpus=2, runs_dir=tmp_path / "two", **settings)
    done = server.start("llm_pretrain", argv, patch=f"sys.argv[0] = {str(ROOT / 'llm_pretrain.py')!r}").wait()
    assert (done.code, done.err) == (0, "")
    assert "1 x 2 (replicate x shard, ZeRO-2)" in done.out and done.out.count("report ") == 1
    two = only_run(tmp_path / "two")
    assert_equal(one, two, 2)
    assert {p.name for p in two.glob("train*.log")} == {"train.log", "train.rank1.log"}
    assert json.loads((two / "config.json").read_text())["gpus"] == 2
