"""What a scheme costs in learning, told by pairs: runs of a recipe under several schemes, with the same seeds each.

python -m qtrain.bench.seed_pairs --recipe configs/quickstart.json --schemes bf16,int8,fp8_rowwise --seeds 1,2,3

A pair is two runs with one seed, so with the same initial weights and the same batches; the table gives the validation
loss of each run, and of each scheme the mean difference from the first one with its standard error. Runs of one seed
are made before those of the next, each by llm_pretrain.py in its own process. The same command again goes on where it
was stopped: finished runs are read, not repeated, and unfinished ones resumed from their last checkpoint.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrain.bench.arguments import compared_schemes, name_and_options, split_list
from qtrain.bench.tables import Cell, Table, about_run, check_json, write_json
from qtrain.bench.train_step import child_environment, reason_of
from qtrain.checks import read_json, user_path
from qtrain.config import JsonDict, parse, read_recipe, run_script
from qtrain.errors import UserError
from qtrain.hardware import describe_hardware
from qtrain.train.device import choose_device
from qtrain.train.listing import listing
from qtrain.train.log.metrics import read_metrics
from qtrain.train.settings import Count
from qtrain.train.state.checkpoint_marker import newest_complete

OWN = ("quantize", "quantize_kwargs", "seed", "run_name", "runs_dir")
"""Settings that this command gives each run."""


@dataclass(frozen=True)
class SeedPairsSettings:
    """Compare the validation losses of schemes in pairs of runs with the same seed."""

    recipe: str = "configs/quickstart.json"
    """Recipe of llm_pretrain.py that every run follows; it names validation data (eval_ds)."""
    overrides: JsonDict = None
    """Settings that replace the recipe's, as a JSON object: '{"n_steps":1000,"compile":true}'."""
    schemes: str = "bf16,int8"
    """Schemes to compare with the first one, separated by commas; NAME:{JSON} sets the options of one."""
    seeds: str = "1,2,3"
    """Seeds, separated by commas: each is a run of every scheme."""
    jobs: Count = 1
    """Runs at a time."""
    runs_dir: str = "runs/seed_pairs"
    """Folder that holds the runs; those that are finished are not repeated."""
    json: str | None = None
    """JSON file to write the results to; None: RUNS_DIR/results.json."""


@dataclass(frozen=True)
class PairedRun:
    """A run of `recipe`, whose folder is below runs_dir."""

    scheme: str
    seed: int
    recipe: dict[str, Any]
    runs_dir: Path

    @property
    def name(self) -> str:
        return self.recipe["run_name"]

    def folders(self) -> list[Path]:
        """Those of this run, newest first."""
        configs = self.runs_dir.glob(f"llm_pretrain/*_{self.name}/config.json")
        return sorted((config.parent for config in configs), reverse=True)

    def losses(self) -> dict[int, float] | None:
        """Validation loss by step, of the finished run; None where there is none."""
        for folder in self.folders():
            records = [r for r in read_metrics(folder / "metrics.jsonl") if r.get("eval_loss") is not None]
            found = {record["step"]: record["eval_loss"] for record in records if record["step"]}
            if self._settings(folder)["n_steps"] in found:
                return found
        return None

    def check(self) -> None:
        """UserError where an earlier run of this name has other settings."""
        for folder in self.folders():
            earlier = self._settings(folder)
            for key, value in self.recipe.items():
                if key != "runs_dir" and earlier.get(key) != value:
                    raise UserError(
                        f"--runs_dir: {folder} was made with {key} = {json.dumps(earlier.get(key))}, not "
                        f"{json.dumps(value)}; give another --runs_dir, or delete that run."
                    )

    def train(self) -> str | None:
        """Start the run or go on with it, unless it is finished. Returns why it failed; None: it did not."""
        if self.losses() is not None:
            return None
        begun = next((folder for folder in self.folders() if newest_complete(folder / "checkpoints")), None)
        recipe = self.runs_dir / f"{self.name}.json"
        recipe.write_text(json.dumps(self.recipe, indent=1) + "\n")
        with (self.runs_dir / f"{self.name}.log").open("a") as log:
            resume = [] if begun is None else ["--resume", str(begun)]
            done = pretrain(["--config", str(recipe), *resume], stdout=log, stderr=subprocess.STDOUT)
        return None if done.returncode == 0 else f"exit status {done.returncode}: see {log.name}"

    @staticmethod
    def _settings(folder: Path) -> dict[str, Any]:
        return read_json(folder / "config.json", "--runs_dir")


def pretrain(arguments: list[str], **options: Any) -> subprocess.CompletedProcess:
    """llm_pretrain.py in a process of its own."""
    return subprocess.run([sys.executable, "-m", "llm_pretrain", *arguments], env=child_environment(), **options)


def main(argv: list[str]) -> None:
    settings = parse(SeedPairsSettings, argv, "-m qtrain.bench.seed_pairs", listing)
    runs = make_runs(settings)
    results = Path(settings.json) if settings.json else runs[0].runs_dir / "results.json"
    check_json(results)
    check_recipes(runs)
    runs[0].runs_dir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(settings.jobs) as pool:
        failures = list(pool.map(_train, runs))
    tables = make_tables(runs, failures)
    print(*(table.markdown() for table in tables), sep="\n\n")
    write_json(tables, results, about_run(settings, describe_hardware(choose_device("auto")).name))
    print(f"\nfigures     {results}")


def _train(run: PairedRun) -> str | None:
    failure = run.train()
    losses = run.losses()
    shown = failure or (f"validation loss {losses[max(losses)]:.4f}" if losses else "no validation loss")
    print(f"{run.scheme}, seed {run.seed}: {shown}", file=sys.stderr, flush=True)
    return failure


def make_runs(settings: SeedPairsSettings) -> list[PairedRun]:
    """Those of one seed after those of another. UserError for whatever the settings alone tell."""
    overrides = settings.overrides or {}
    recipe = {**read_recipe(settings.recipe, "--recipe"), **overrides}
    if given := [key for key in OWN if key in overrides]:
        raise UserError(f"--overrides: {given[0]} is set by this command: by --schemes, --seeds or --runs_dir.")
    if not recipe.get("eval_ds"):
        raise UserError(f"--recipe: {settings.recipe} names no validation data (eval_ds), whose loss is compared.")
    schemes = list(compared_schemes(split_list(settings.schemes)))
    if len(schemes) < 2:
        raise UserError(f"--schemes: {settings.schemes!r} leaves nothing to compare; name two or more.")
    runs_dir = user_path(settings.runs_dir, "--runs_dir")
    return [make_run(recipe, scheme, seed, runs_dir) for seed in parse_seeds(settings.seeds) for scheme in schemes]


def make_run(recipe: dict[str, Any], scheme: str, seed: int, runs_dir: Path) -> PairedRun:
    name, kwargs = name_and_options(scheme, "--schemes")
    options = f"-{zlib.crc32(json.dumps(kwargs, sort_keys=True).encode()):08x}" if kwargs else ""
    own = {"quantize": name, "quantize_kwargs": kwargs or None, "seed": seed, "runs_dir": str(runs_dir)}
    return PairedRun(scheme, seed, {**recipe, **own, "run_name": f"{name}{options}-seed{seed}"}, runs_dir)


def parse_seeds(text: str) -> list[int]:
    words = split_list(text)
    if not words or not all(re.fullmatch(r"\d{1,9}", word) for word in words) or len(set(words)) < len(words):
        raise UserError(f"--seeds: {text!r} is not a list of seeds; write different whole numbers as in 1,2,3.")
    return [int(word) for word in words]


def check_recipes(runs: Sequence[PairedRun]) -> None:
    """UserError for what llm_pretrain.py says of the recipe under each scheme that is still to run, and for a run with
    other settings that is there already."""
    for run in runs:
        run.check()
    for run in {run.scheme: run for run in runs if run.losses() is None}.values():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recipe.json"
            path.write_text(json.dumps(run.recipe))
            done = pretrain(["--config", str(path), "--dry_run"], capture_output=True, text=True)
        if done.returncode:
            said = reason_of(done).removeprefix("error: ").replace(f"--config ({path}): ", "")
            raise UserError(f"--recipe, --schemes ({run.scheme}): {said}")


def make_tables(runs: Sequence[PairedRun], failures: Sequence[str | None]) -> list[Table]:
    """Losses of every run, and of each scheme the mean over seeds of the difference from the first one. failures: why
    runs failed."""
    first, *others = dict.fromkeys(run.scheme for run in runs)
    losses = {(run.scheme, run.seed): run.losses() or {} for run in runs}
    steps = sorted({step for of_run in losses.values() for step in of_run})
    over, differences = f"over {first}", {scheme: [] for scheme in others}
    every = Table("Validation loss", "loss", [*(f"step {step}" for step in steps), over])
    for scheme in (first, *others):
        for run, failure in zip(runs, failures, strict=True):
            if run.scheme != scheme:
                continue
            row, of_run, reference = f"{scheme}, seed {run.seed}", losses[scheme, run.seed], losses[first, run.seed]
            if not of_run:
                every.put(row, over, Cell(reason=failure or "no validation loss"))
            for step, loss in of_run.items():
                every.put(row, f"step {step}", Cell(loss, text=f"{loss:.4f}"))
            if scheme != first and of_run and reference:
                difference = of_run[max(of_run)] / reference[max(reference)] - 1
                differences[scheme].append(difference)
                every.put(row, over, Cell(difference, text=f"{100 * difference:+.2f}%"))
    return [every, _means(first, differences)]


def _means(first: str, differences: dict[str, list[float]]) -> Table:
    table = Table(f"Loss at the end over {first}", "", ["pairs", "mean", "standard error"])
    for scheme, found in differences.items():
        table.put(scheme, "pairs", Cell(len(found), text=str(len(found))))
        if found:
            mean = statistics.fmean(found)
            table.put(scheme, "mean", Cell(mean, text=f"{100 * mean:+.2f}%"))
        if len(found) > 1:
            error = statistics.stdev(found) / len(found) ** 0.5
            table.put(scheme, "standard error", Cell(error, text=f"{100 * error:.2f}%"))
    return table


if __name__ == "__main__":
    run_script(main)
