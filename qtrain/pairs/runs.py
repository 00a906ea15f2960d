"""The runs of pairs: each by llm_pretrain.py in its own process on its own GPU, begun once, stopped at a deadline and
resumed from its checkpoint; and the differences of validation losses while they run."""

import contextlib
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qtrain.bench.arguments import split_list
from qtrain.bench.training_cell import child_environment
from qtrain.core.checks import read_json
from qtrain.pairs.results import RunResult, averaged, digest, shared_recipe, with_error
from qtrain.train.log.metrics import read_metrics
from qtrain.train.state.checkpoint_files import newest_complete

STOP_SECONDS = 60  # time to save a checkpoint after --time_limit, before a run is killed
START_SECONDS = 60  # no run is begun or resumed with less time left: it would not get past compiling
POLL_SECONDS = 5.0


@dataclass(frozen=True)
class PairedRun:
    """A run of `recipe`, whose folder is below runs_dir."""

    variant: str
    overrides: dict[str, Any]
    seed: int
    base: dict[str, Any]
    """The recipe without the variant's settings."""
    data: str
    runs_dir: Path

    @property
    def name(self) -> str:
        """Different for runs of other settings or data."""
        key = digest([shared_recipe(self.base), self.overrides, self.data])[:8]
        words = re.sub(r"[^\w-]+", "-", self.variant)[:40].strip("-")  # a variant may be NAME:{JSON}
        return f"{words}-{key}-seed{self.seed}"

    @property
    def recipe(self) -> dict[str, Any]:
        own = {"seed": self.seed, "run_name": self.name, "runs_dir": str(self.runs_dir)}
        return {**self.base, **self.overrides, **own}

    @property
    def key(self) -> tuple[str, str, int, str]:
        return digest(shared_recipe(self.base)), self.data, self.seed, self.variant

    def folders(self) -> list[Path]:
        """Those of this run, newest first."""
        configs = self.runs_dir.glob(f"llm_pretrain/*_{self.name}/config.json")
        return sorted((config.parent for config in configs), reverse=True)

    def begun(self) -> Path | None:
        """The folder with a checkpoint to go on from."""
        return next((folder for folder in self.folders() if newest_complete(folder / "checkpoints")), None)

    def losses(self) -> dict[int, float]:
        """Validation loss by step, so far, without step 0."""
        for folder in self.folders():
            if found := _eval_losses(read_metrics(folder / "metrics.jsonl")):
                return {int(step): loss for step, loss in found if step}
        return {}

    def result(self, device: str) -> RunResult | None:
        """The record of the finished run; None where there is none."""
        for folder in self.folders():
            config, records = read_json(folder / "config.json", "--runs_dir"), read_metrics(folder / "metrics.jsonl")
            losses = _eval_losses(records)
            if not losses or losses[-1][0] != config["n_steps"]:  # stopped, or still running
                continue
            speeds = [record["tok_s"] for record in records if record.get("tok_s")]
            steps = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
            times = [record["time"] for record in records if record.get("time")]
            return RunResult(
                variant=self.variant,
                overrides=self.overrides,
                seed=self.seed,
                recipe=shared_recipe(self.base),
                data=self.data,
                device=device,
                versions=config["_versions"],
                source=config["_versions"]["source"],  # what ran, not what lies there now
                finished=datetime.fromtimestamp(max(times, default=0), UTC).isoformat(timespec="seconds"),
                tokens=max((record.get("tokens") or 0 for record in records), default=0),
                tok_s=round(statistics.median(speeds)) if speeds else None,
                eval_loss=losses,
                train_loss=averaged(steps),
            )
        return None

    def train(self, gpu: str | None, seconds: float | None) -> str | None:
        """Start the run or go on with it. Returns why it has not finished; None: it has."""
        begun, recipe = self.begun(), self.runs_dir / f"{self.name}.json"
        recipe.write_text(json.dumps(self.recipe, indent=1) + "\n")
        with (self.runs_dir / f"{self.name}.log").open("a") as log:  # a resumed run goes on in its log
            resume = [] if begun is None else ["--resume", str(begun)]
            done = pretrain(
                ["--config", str(recipe), *resume], gpu=gpu, seconds=seconds, stdout=log, stderr=subprocess.STDOUT
            )
        if done.returncode == 0:
            return None
        if seconds is not None and done.returncode in (143, -15, -9):  # 128 + SIGTERM, SIGTERM, SIGKILL
            return "stopped at --time_limit; the same command goes on with it"
        return f"exit status {done.returncode}: see {log.name}"


def _eval_losses(records: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    return [[r["step"], r["eval_loss"]] for r in records if r.get("eval_loss") is not None]


def pretrain(
    arguments: list[str], *, gpu: str | None = None, seconds: float | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """llm_pretrain.py in a process of its own, on one GPU of several; stopped with a checkpoint after `seconds`."""
    environment = {**child_environment(), **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    command = [sys.executable, "-m", "qtrain.scripts.llm_pretrain", *arguments]
    process = subprocess.Popen(command, env=environment, **options)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # SIGTERM: llm_pretrain.py saves a checkpoint and ends with 143.
        process.terminate()
        try:
            out, err = process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


# ---- running --------------------------------------------------------------------------------------------------------


def train_all(runs: Sequence[PairedRun], jobs: int, deadline: float | None, progress: "Progress") -> dict[str, str]:
    """Train the runs, one a GPU at a time; returns why some have not finished, by 'VARIANT, seed N'."""
    # Runs of several GPUs each see all of them, one run at a time.
    gpus = [] if any((run.recipe.get("gpus") or 0) > 1 for run in runs) else visible_gpus()
    jobs = jobs or max(len(gpus), 1)  # on a CPU one at a time: several would share its cores
    # None: leave CUDA_VISIBLE_DEVICES as it is.
    free = FreeGpus([gpus[job % len(gpus)] if len(gpus) > 1 else None for job in range(jobs)])

    def train(run: PairedRun) -> str | None:
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and seconds < START_SECONDS:
            return "not begun within --time_limit"
        with free.one() as gpu:
            return run.train(gpu, seconds)

    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[Future, PairedRun] = {pool.submit(train, run): run for run in runs}
        waiting, failures = set(futures), {}
        while waiting:
            done, waiting = wait(waiting, POLL_SECONDS)
            for future in done:
                run = futures[future]
                if reason := future.result():
                    failures[f"{run.variant}, seed {run.seed}"] = reason
                    print(f"{run.variant}, seed {run.seed}: {reason}", file=sys.stderr, flush=True)
            progress.update(runs)
    return failures


class FreeGpus:
    """Names of GPUs that the jobs of several threads share, each with one of its own; None: no particular one."""

    def __init__(self, names: Sequence[str | None]):
        self._free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for name in names:
            self._free.put(name)

    @contextlib.contextmanager
    def one(self) -> Iterator[str | None]:
        """Waits until one is free."""
        name = self._free.get()
        try:
            yield name
        finally:
            self._free.put(name)


def visible_gpus() -> list[str]:
    """Names of the GPUs for CUDA_VISIBLE_DEVICES."""
    import torch

    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return split_list(os.environ["CUDA_VISIBLE_DEVICES"])
    return [str(index) for index in range(torch.cuda.device_count())]


class Progress:
    """Prints each new validation loss with its difference from the reference, and the mean over seeds so far."""

    def __init__(self, runs: Sequence[PairedRun], reference: str, known: Sequence[RunResult]):
        self._reference = reference
        self._losses = {run.key: run.losses for run in known}
        for run in runs:
            # Losses of an earlier call are known, and not printed again.
            self._losses.setdefault(run.key, run.losses())
        self._shown = {(key, step) for key, losses in self._losses.items() for step in losses}

    def update(self, runs: Sequence[PairedRun]) -> None:
        for run in runs:
            self._losses[run.key] = {**self._losses.get(run.key, {}), **run.losses()}
        for run in runs:
            for step, loss in self._losses[run.key].items():
                if (run.key, step) not in self._shown and self._ready(run.key, step):
                    self._shown.add((run.key, step))
                    print(f"{run.variant}, seed {run.seed}, step {step}: {loss:.4f}{self._over(run, step)}", flush=True)

    def _partner(self, key: tuple[str, str, int, str]) -> dict[int, float] | None:
        return self._losses.get((*key[:3], self._reference))

    def _ready(self, key: tuple[str, str, int, str], step: int) -> bool:
        """Whether nothing is gained by waiting for the reference, which is running too."""
        partner = self._partner(key)
        return key[3] == self._reference or partner is None or step in partner

    def _over(self, run: PairedRun, step: int) -> str:
        reference = self._partner(run.key) or {}
        if run.variant == self._reference or step not in reference:
            return ""
        differences = [
            losses[step] - partner[step]
            for key, losses in self._losses.items()
            if (key[0], key[3]) == (run.key[0], run.variant) and (partner := self._partner(key))
            if step in losses and step in partner
        ]
        own = self._losses[run.key][step] - reference[step]
        mean = f" (mean of {len(differences)}: {with_error(differences)})" if len(differences) > 1 else ""
        return f", {own:+.4f} over {self._reference}{mean}"
