"""Faults of one process of several end all within a minute, with one message that names the rank and the cause."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qtrain.train.log.metrics import read_metrics
from tests.cases import sampled
from tests.processes import PRETRAIN, launched, ranks_of, write_pretraining
from tests.system import PYTHON_FIRST, ROOT, flags, last_step, only_run, serving, wait_until
from tests.worlds import environment


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    write_pretraining(folder)
    with serving(folder) as server:
        server.folder = folder
        yield server


LONG = {**PRETRAIN, "n_steps": 400, "eval_interval": 0}

IN_STEP_3 = """
import errno, time
import torch
import qtrain.core.process
from qtrain.core.errors import UserError
qtrain.core.process.CAUSE_SECONDS = 1
step = Training._step
def fails(self, *arguments):
    if self.run.state.step == 2:
        {}
    step(self, *arguments)
Training._step = fails
"""
BEATS = "import qtrain.comm.heartbeat as h; h.BEAT_SECONDS = 0.2\n"
NO_SPACE = """
import errno
from qtrain.train.state import checkpoint
def seal(path):
    raise OSError(errno.ENOSPC, "No space left on device")
checkpoint.seal = seal
"""


FAULTS = {
    "host memory": (1, 1, IN_STEP_3.format("raise MemoryError"), "rank 1: error: step 3: out of memory on rank 1"),
    "GPU memory": (
        0,
        1,
        IN_STEP_3.format("raise torch.OutOfMemoryError('CUDA out of memory')"),
        "error: step 3: out of memory on rank 0",
    ),
    "a bad batch": (
        1,
        2,
        IN_STEP_3.format("raise UserError('--train_ds: tokens/0.bin is damaged')"),
        "rank 1: error: --train_ds: tokens/0.bin is damaged",
    ),
    "a full disk": (1, 1, NO_SPACE, "could not be saved: rank 1: No space left on device"),
    "hung": (
        1,
        1,
        IN_STEP_3.format("time.sleep(300)"),
        "last step 2) has kept the others waiting for 3 s (--rank_timeout): it is at ",
    ),
}


@pytest.mark.parametrize(
    "fault", sampled([*FAULTS], lambda fault: fault in ("host memory", "a full disk", "GPU memory"))
)
def test_a_fault_of_one_rank_is_one_message_that_names_it(server, fault, tmp_path):
    rank, code, patch, says = FAULTS[fault]
    started = time.monotonic()
    argv = flags(**LONG, rank_timeout=3, runs_dir=tmp_path)
    done = server.run_ranks(2, "llm_pretrain", argv, {0: BEATS, 1: BEATS, rank: BEATS + patch})
    assert time.monotonic() - started < 60
    errors = "".join(outcome.err for outcome in done)
    assert errors.count("error:") == 1 and says in errors, errors
    assert code in [outcome.code for outcome in done] and {outcome.code for outcome in done} <= {code, -signal.SIGKILL}


MISTAKE = """
import qtrain.train.plan.checked_settings as checked_settings
from qtrain.core.errors import UserError
from qtrain.parallel.sharding.data_parallel import DataParallel
def fails(*_):
    raise UserError("--x: a mistake")
{} = fails
"""
AT_ONCE = "import qtrain.core.process; qtrain.core.process.CAUSE_SECONDS = 0\n"
FULLY = {"n_steps": 2, "reshard_after_forward": "always"}
LOST = {
    "rank 0 in set-up": (0, "checked_settings.make_mesh", {}, "set-up"),
    "rank 1 in set-up": (1, "checked_settings.make_mesh", {}, "set-up"),
    "rank 1 before step 1": (1, "Training._evaluate", {}, "after step 0"),
    "rank 0 in the export": (0, "DataParallel.restore_full_weights", FULLY, "after step 2"),
}


@pytest.mark.parametrize("case", LOST)
def test_a_rank_that_another_one_has_left_ends_with_one_message(server, case, tmp_path):
    """Wherever it communicates; without a launcher, which would end it before it says so."""
    lost, where, settings, when = LOST[case]
    argv = flags(**{**PRETRAIN, **settings}, runs_dir=tmp_path)
    patches = {lost: AT_ONCE + MISTAKE.format(where), 1 - lost: AT_ONCE}
    world = [
        server.start("llm_pretrain", argv, patch=patches[rank], **variables)
        for rank, variables in enumerate(environment(2))
    ]
    done = [process.wait() for process in world]
    assert done[lost].code == 2 and done[lost].err.endswith("error: --x: a mistake\n")
    code, said = done[1 - lost].code, done[1 - lost].err.removeprefix("rank 1: ")
    assert said.startswith(f"error: {when}: another process has ended or does not answer ("), said
    assert code == 1 and said.count("\n") == 1


def test_a_full_disk_of_one_rank_while_training_goes_on(server, tmp_path):
    done = server.run_ranks(2, "llm_pretrain", flags(**LONG, async_checkpoint=True, runs_dir=tmp_path), {1: NO_SPACE})
    errors = "".join(outcome.err for outcome in done)
    assert errors.count("error:") == 1 and "step 2: the checkpoint" in errors, errors
    assert "could not be saved: rank 1: No space left on device" in errors and last_step(tmp_path) <= 4


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_ends_the_run_within_a_minute(server, rank, tmp_path):
    process = launched(server.folder, gpus=2, **LONG, runs_dir=tmp_path)
    wait_until(lambda: last_step(tmp_path) > 2, 120)
    stopped = ranks_of(process)[rank]
    os.kill(stopped, signal.SIGSTOP)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 60 and process.returncode == 1
    assert errors.count("error:") == 1 and errors.startswith(f"error: rank {rank} (process {stopped} on "), errors


@pytest.mark.sweep
def test_torchrun_starts_again_by_itself_after_a_kill(server, tmp_path):
    settings = {**LONG, "n_steps": 60, "runs_dir": tmp_path, "resume": "auto"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1"]
    process = subprocess.Popen(
        [*torchrun, "--monitor-interval", "0.1", str(ROOT / "llm_pretrain.py"), *flags(**settings)],
        cwd=server.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**PYTHON_FIRST, "OMP_NUM_THREADS": "1"},
    )
    wait_until(lambda: [*tmp_path.glob("*/*/checkpoints/00000004/COMPLETE")], 120)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and "resumed at step" in out, out
    folder = only_run(tmp_path)
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r] == [*range(1, 61)]


@pytest.mark.sweep
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


THREADS_IN_CPP = """
import os, threading
os.environ |= {"WORLD_SIZE": "2", "RANK": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
import torch.distributed as dist
from qtrain.core.process import run_script

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def main(_):
    def check(client):
        while True:
            client.check(["x"])
    for _ in range(3):
        threading.Thread(target=check, args=(store.clone(),), daemon=True).start()
    print("the last line")

run_script(main)
"""


def test_a_rank_ends_in_order_while_a_thread_is_in_the_store():
    """Python's finalization ends such a thread inside of C++, which aborts: "terminate called without ..."."""
    done = subprocess.run([sys.executable, "-c", THREADS_IN_CPP], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the last line\n", "")


@pytest.mark.parametrize("when", ["start", pytest.param("training", marks=pytest.mark.sweep)])
def test_ranks_end_when_their_launcher_is_killed(server, when, tmp_path):
    """As they start, when no rank has met another one, and as they train."""
    process = launched(server.folder, gpus=2, **{**LONG, "n_steps": 4000}, runs_dir=tmp_path)
    wait_until(lambda: len(ranks_of(process)) == 2, 120)
    if when == "training":
        wait_until(lambda: last_step(tmp_path) > 2, 120)
    ranks = ranks_of(process)
    process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 15)
    _, errors = process.communicate(timeout=10)
    assert (
        errors == f"error: the launcher (process {process.pid}) was killed; all ranks end. Go on with --resume auto.\n"
    )


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
