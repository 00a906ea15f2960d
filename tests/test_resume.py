"""A run that was killed and resumed equals an uninterrupted one: losses, evaluations, weights and all states, bit for
bit. The processes are real; kill -9 comes from outside."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.checkpoint_files import newest_complete
from tests.cases import sampled
from tests.data.corpora import functions, write_raw
from tests.system import (
    PYTHON_FIRST,
    ROOT,
    contents,
    flags,
    last_step,
    losses,
    only_run,
    place,
    serving,
    tree,
    write_model,
)

TEXT = {"type": "text", "paths": ["jsonl", "parquet/*.parquet"], "tokenizer": "byte"}
TOKEN = {"type": "token", "dataset_dir": "tokens", "tokenizer": "byte"}
HF_JSON = {
    "type": "hf_text",
    "dataset": "json",
    "data_files": "jsonl/*.jsonl",
    "tokenizer": "byte",
    "shuffle_buffer": 7,
}
HF_PARQUET = {**HF_JSON, "dataset": "parquet", "data_files": "parquet/*.parquet"}
MIX = {"type": "mix", "datasets": [{"weight": 2, **TEXT}, {"weight": 1, **HF_PARQUET}, {"weight": 0.5, **TOKEN}]}

INT8 = {"quantize": "int8"}
ROUNDED = {"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": True}}
CASES = {
    "token": {"train_ds": TOKEN, **INT8},
    "token, rounded stochastically, accumulated": {"train_ds": TOKEN, **ROUNDED, "micro_batch_size": 2},
    "text": {"train_ds": TEXT, **INT8, "num_workers": 1},
    "hf_text of json": {"train_ds": HF_JSON, **INT8},
    "hf_text of parquet": {"train_ds": HF_PARQUET, **INT8, "doc_mask": True},
    "mix, rounded stochastically": {"train_ds": MIX, **ROUNDED},
    "weights stored in INT8": {
        "train_ds": TOKEN,
        "quantize": "int8_weight",
        "quantize_kwargs": {"activations": "int8_sr"},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts scripts in a folder that holds data of every kind, small enough for several epochs in 40 steps."""
    folder = tmp_path_factory.mktemp("resume")
    write_model(folder / "tiny.json")
    texts = functions()[:36]
    _write_text(folder, texts)
    ids = np.frombuffer("\n".join(texts).encode(), np.uint8)
    for number, part in enumerate(np.split(ids[:1500], [700, 701, 1034])):  # one file of a single token
        write_raw(folder / "tokens" / f"{number}.bin", part)
    with serving(folder, "import datasets") as server:
        server.folder = folder
        yield server


def _write_text(folder: Path, texts: list[str]) -> None:
    for kind in ("jsonl", "parquet"):
        (folder / kind).mkdir()
    for number in range(2):
        rows = texts[number::2]
        (folder / f"jsonl/{number}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
        pyarrow.parquet.write_table(
            pyarrow.table({"text": rows}), folder / f"parquet/{number}.parquet", row_group_size=5
        )


def command(**settings: Any) -> list[str]:
    """40 steps of 4 sequences of 32 tokens, evaluated every 10 steps."""
    chosen = {"model": "tiny.json", "seq_len": 32, "batch_size": 4, "n_steps": 40, "lr": 0.01, "eval_interval": 10}
    chosen |= {"eval_ds": TEXT, "eval_sequences": 6, "ckpt_interval": 13, "keep_ckpts": 9}
    return flags(**{**chosen, "device": "cpu", **settings})


def assert_same_run(one: Path, other: Path) -> None:
    """Equal logs and equal last checkpoints, but for times and the run's own name."""
    assert losses(one) == losses(other)
    a, b = (contents(run / "checkpoints" / "00000040") for run in (one, other))
    assert a.keys() == b.keys() and len(a) > 40
    assert all(torch.equal(a[name], b[name]) for name in a), [n for n in a if not torch.equal(a[n], b[n])]
    states = [read_meta(run / "checkpoints" / "00000040")["state"] for run in (one, other)]
    assert place(states[0]) == place({**states[1], "run_id": states[0]["run_id"]})
    assert (one / "hf/model.safetensors").read_bytes() == (other / "hf/model.safetensors").read_bytes()


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sampled([*CASES], lambda case: case != "mix, rounded stochastically"))
def test_40_steps_equal_13_and_a_kill_and_the_rest(server, case, tmp_path):
    """The kill comes in step 18, four steps after the checkpoint."""
    folder, settings = tmp_path, CASES[case]
    whole = server.start("llm_pretrain", command(**settings, runs_dir=folder / "whole"))
    killed = server.start("llm_pretrain", command(**settings, runs_dir=folder / "killed"), hang_at=17)
    killed.until(lambda: last_step(folder / "killed") == 17)
    run = only_run(folder / "killed")
    assert killed.kill(signal.SIGKILL).code == -signal.SIGKILL
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["00000013"]

    resumed = server.start("llm_pretrain", command(**settings, runs_dir=folder / "killed", resume=run))
    assert resumed.wait().code == 0, resumed.errors.read_text()
    assert whole.wait().code == 0, whole.errors.read_text()
    whole_run = only_run(folder / "whole")
    assert only_run(folder / "killed") == run
    steps = [row for row in losses(run) if row[1] is not None]
    assert [row[0] for row in steps] == [*range(1, 41)] and len({row[1] for row in steps}) == 40
    assert [row[0] for row in losses(run) if row[6] is not None] == [0, 10, 20, 30, 40]
    assert_same_run(run, whole_run)


def test_an_earlier_checkpoint_is_resumed_in_a_new_run_and_its_own_loses_nothing(server, tmp_path):
    whole = server.run("llm_pretrain", command(train_ds=TOKEN, **INT8, runs_dir=tmp_path))
    assert whole.code == 0, whole.err
    run = only_run(tmp_path)
    before = tree(run)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["00000013", "00000026", "00000039", "00000040"]
    argv = command(train_ds=TOKEN, **INT8, runs_dir=tmp_path / "fork", resume=run / "checkpoints" / "00000013")
    part = server.start("llm_pretrain", [*argv, "--ckpt_interval=0"], hang_at=15)
    part.until(lambda: last_step(tmp_path / "fork") == 15)
    part.kill(signal.SIGKILL)
    assert tree(run) == before
    shutil.rmtree(tmp_path / "fork")
    done = server.run("llm_pretrain", argv)
    assert done.code == 0, done.err
    assert f"resumed at step 13 from {run}/checkpoints/00000013\n" in done.out
    assert tree(run) == before
    assert_same_run(only_run(tmp_path / "fork"), run)


@pytest.mark.sweep
def test_twenty_or_more_kills_at_random_moments_of_a_run_that_saves_every_step(server, tmp_path):
    """Every start finds the last complete checkpoint, and in the end no step was lost or repeated."""
    constant = {"warmup": 0, "decay": 0}
    settings = {"train_ds": TOKEN, **INT8, "n_steps": 100_000, "lr_schedule_kwargs": constant, "eval_interval": 7}
    argv = command(**settings, runs_dir=tmp_path / "killed", ckpt_interval=1, keep_ckpts=2, resume="auto")
    chance, torn, reached = random.Random(0), 0, []

    def saved() -> int:
        runs = sorted((tmp_path / "killed/llm_pretrain").glob("*"))
        newest = newest_complete(runs[0] / "checkpoints") if runs else None
        return newest[1].step if newest else 0

    for kill in range(60):
        if kill >= 20 and torn >= 3:  # on a busy machine few of the first twenty come inside a save
            break
        process, before = server.start("llm_pretrain", argv), saved()
        if kill % 4 or not before:
            process.until(lambda before=before: saved() > before)
        time.sleep(chance.uniform(0, 0.06 if kill % 4 else 0.6))  # every fourth: while it starts, or soon after
        outcome = process.kill(signal.SIGKILL)
        assert outcome.code == -signal.SIGKILL and outcome.err == ""
        run = only_run(tmp_path / "killed")
        torn += any(p.name.startswith(".tmp") for p in (run / "checkpoints").iterdir())
        reached.append(saved())
        assert reached[-1] >= before
    assert torn >= 3, f"only {torn} kills came inside a save: too few to mean anything"
    assert len(set(reached)) >= 15

    process = server.start("llm_pretrain", argv)
    process.until(lambda: saved() > reached[-1] + 2)
    process.kill(signal.SIGTERM)
    steps = last_step(tmp_path / "killed") - 1  # a signal leaves out an evaluation that is due
    reference = server.start("llm_pretrain", command(**settings, runs_dir=tmp_path / "whole", ckpt_interval=0))
    reference.until(lambda: last_step(tmp_path / "whole") > steps)
    reference.kill(signal.SIGKILL)
    found, expected = ([row for row in losses(r) if row[0] <= steps] for r in (run, only_run(tmp_path / "whole")))
    assert found == expected and len(found) > steps


def test_a_live_run_is_not_resumed_and_a_killed_one_is(server, tmp_path):
    """While its process lives a second one changes nothing; after kill -9 it takes over."""
    argv = command(train_ds=TOKEN, **INT8, n_steps=30, ckpt_interval=5, runs_dir=tmp_path)
    first = server.start("llm_pretrain", argv, hang_at=7)
    first.until(lambda: last_step(tmp_path) == 7)
    run = only_run(tmp_path)
    before = tree(run)
    for resume in (run, "auto", run / "checkpoints/00000005"):
        second = server.run("llm_pretrain", [*argv, f"--resume={resume}"])
        assert second.code == 2 and second.err.count("\n") == 1, second
        assert second.err.startswith(f"error: --resume: {run} is in use by process {first.pid} on ")
    assert tree(run) == before
    first.kill(signal.SIGKILL)
    assert (run / "run.lock").exists()
    done = server.run("llm_pretrain", [f"--resume={run}"])  # with the settings of the run
    assert done.code == 0, done.err
    assert [row[0] for row in losses(run) if row[1] is not None] == [*range(1, 31)] and not (run / "run.lock").exists()


# ---- signals ---------------------------------------------------------------------------------------------------------


def printed_command(out: str) -> str:
    """The command that a stopped run prints."""
    found = re.search(r"stopped at step (\d+); resume with:\n\s+(python .*)\n", out)
    assert found, out
    return found.group(2)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGUSR1", 138), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_finishes_the_step_saves_and_shows_in_the_exit_code(server, tmp_path, name, code):
    process = server.start("llm_pretrain", command(train_ds=TOKEN, n_steps=100_000, ckpt_interval=0, runs_dir=tmp_path))
    process.until(lambda: last_step(tmp_path) >= 3)
    done = process.kill(signal.Signals[name])
    run = only_run(tmp_path)
    assert done.code == code and f"{name}: stopping after this step" in done.err and "Traceback" not in done.err
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert int(checkpoint.name) == last_step(tmp_path) == newest_complete(run / "checkpoints")[1].step
    assert f"stopped at step {last_step(tmp_path)}; resume with:" in done.out
    assert not (run / "hf").exists()  # what is exported is a finished model


def test_the_printed_command_resumes_as_it_stands(server, tmp_path):
    """Of a run ended by SIGTERM, the printed line in a shell."""
    folder: Path = server.folder
    argv = command(train_ds=TOKEN, **INT8, n_steps=40, runs_dir=tmp_path / "a run's")
    program = os.path.relpath(ROOT / "llm_pretrain.py", folder)
    process = server.start("llm_pretrain", argv, patch=f"sys.argv[0] = {program!r}")
    process.until(lambda: last_step(tmp_path / "a run's") >= 2)
    stopped = process.kill(signal.SIGTERM)
    run, stopped_at = only_run(tmp_path / "a run's"), last_step(tmp_path / "a run's")
    assert stopped.code == 143 and stopped.err.count("\n") <= 2 and 2 <= stopped_at < 40

    whole = server.start("llm_pretrain", command(train_ds=TOKEN, **INT8, n_steps=40, runs_dir=tmp_path / "whole"))
    line, environment = printed_command(stopped.out), {**PYTHON_FIRST, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert whole.wait().code == 0
    assert losses(run) == losses(only_run(tmp_path / "whole"))
