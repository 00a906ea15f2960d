"""SIGKILL of a random rank at random times of a real run, which resumes after each: `python -m tests.kill_campaign`.

    python -m tests.kill_campaign --gpus 3 --kills 20 --async_checkpoint
    python -m tests.kill_campaign --gpus 1 --n_steps 2000 --settings '{"device":"cuda","offload":"[\\"m\\"]"}'

Prints a line for each kill, and whether weights, optimizer states, losses and the export are in the end those of a run
that nothing disturbed, bit for bit. About ten minutes on two cores.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qtrain.train.log.metrics import read_metrics
from tests.processes import PRETRAIN, launched, ranks_of, write_pretraining
from tests.system import contents, last_step, losses, wait_until


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--n_steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async_checkpoint", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={}, help="more of them, as a JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return campaign(Path(folder), given)


def campaign(folder: Path, given: argparse.Namespace) -> int:
    """Returns 0 if nothing was lost."""
    write_pretraining(folder)
    settings: dict[str, Any] = {**PRETRAIN, "quantize": "int8", "gpus": given.gpus, "n_steps": given.n_steps}
    settings |= {
        "eval_interval": 0,
        "ckpt_interval": 3,
        "keep_ckpts": 2,
        "batch_size": 6,
        "async_checkpoint": given.async_checkpoint,
        **given.settings,
    }
    undisturbed = launched(folder, **settings, runs_dir=folder / "undisturbed")
    _, errors = undisturbed.communicate()
    assert undisturbed.returncode == 0, errors
    draw, runs, failures = random.Random(given.seed), folder / "killed", 0
    columns = "{:>4} {:>4} {:>8} {:>7} {:>10} {:>11} {:>4}  {}"
    print(columns.format("kill", "rank", "moment", "at step", "resumed at", "ended after", "code", "said"), flush=True)
    for number in range(given.kills):
        before = last_step(runs)
        process = launched(folder, **settings, runs_dir=runs, resume="auto")
        if starting := draw.random() < 0.25:
            wait_until(lambda process=process: len(ranks(process)) == given.gpus)
            time.sleep(draw.uniform(0, 6))
        else:
            wait_until(
                lambda process=process, before=before: last_step(runs) > before or process.poll() is not None, 120
            )
            time.sleep(draw.uniform(0, 5))
        rank = draw.randrange(given.gpus)
        step, started = last_step(runs), time.monotonic()
        if process.poll() is None:
            os.kill(ranks(process)[rank], signal.SIGKILL)
        out, errors = process.communicate()
        seconds = time.monotonic() - started
        resumed = next((line.split()[3] for line in out.splitlines() if line.startswith("resumed at step")), "-")
        expected = (128 + signal.SIGKILL, f"error: rank {rank} was killed by SIGKILL; all ranks end.\n")
        if given.gpus == 1:  # without a launcher, which would tell
            expected = (-signal.SIGKILL, "")
        ok = (process.returncode, errors) == expected and seconds < 60
        failures += not ok
        said = "as it should" if ok else errors
        moment = "starting" if starting else "training"
        row = (number + 1, rank, moment, step, resumed, f"{seconds:.1f} s", process.returncode, said)
        print(columns.format(*row), flush=True)
    last = launched(folder, **settings, runs_dir=runs, resume="auto")
    _, errors = last.communicate()
    print(f"the last run ends with code {last.returncode}{': ' + errors if errors else ''}")
    odd = differences(finished_run(folder / "undisturbed"), finished_run(runs), given.n_steps)
    print(f"against the undisturbed run: {', '.join(odd) or 'every weight, state and loss is equal'}")
    return int(bool(odd or failures or last.returncode))


def finished_run(runs: Path) -> Path:
    """The one that was exported. A run killed before its first checkpoint begins anew, in a folder of its own."""
    (export,) = runs.glob("*/*/hf")
    return export.parent


def ranks(process: subprocess.Popen) -> list[int]:
    """Process ids by rank. One process has no launcher."""
    return ranks_of(process) or [process.pid]


def differences(one: Path, other: Path, step: int) -> list[str]:
    """What differs between two finished runs."""
    odd = [] if [row[:5] for row in losses(one)] == [row[:5] for row in losses(other)] else ["losses"]
    odd += ["steps"] if [r["step"] for r in read_metrics(other / "metrics.jsonl") if "loss" in r][-1] != step else []
    pairs = [(contents(run / f"checkpoints/{step:08d}")) for run in (one, other)]
    pairs_of_export = [load_file(run / "hf/model.safetensors") for run in (one, other)]
    for a, b in (pairs, pairs_of_export):
        names = {name for name in a.keys() | b.keys() if not name.startswith("rng.")}
        odd += sorted(name for name in names if name not in a or name not in b or not torch.equal(a[name], b[name]))
    return odd


if __name__ == "__main__":
    sys.exit(main())
