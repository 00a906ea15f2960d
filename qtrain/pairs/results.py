"""Finished runs as records, and what pairs of them tell: the difference of validation losses in nats.

A record is one line of a .jsonl file: settings, seed, data, versions, speed and losses of a run, all that the tables
and plots need. Files of several machines and days lie in one folder. A pair is two runs with the same seed, the same
recipe and the same data: by the sha256 of the token shards, not by their path, since a corpus that was made again may
differ. Runs of other recipes are other tables; runs without a partner on the same data are shown and not compared.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from qtrain.bench.tables import Cell, Table
from qtrain.core.checks import check_fields, parse_json
from qtrain.core.errors import UserError
from qtrain.data.files import text_files
from qtrain.data.text.shards import find_shards

T = TypeVar("T")

NOT_LEARNING = (
    "train_ds", "eval_ds", "seed", "run_name", "runs_dir", "ckpt_interval", "keep_ckpts", "async_checkpoint", "export",
    "log_interval", "trackers", "project", "num_workers", "profile",
)  # fmt: skip
"""Settings that are not part of what two runs of a pair share: names, files, logs; and the data, which has a
fingerprint of its own."""
CURVE_POINTS = 300


def digest(value: Any) -> str:
    """A short hash of a value that JSON has."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    variant: str
    overrides: dict[str, Any]
    """Settings of the recipe that the variant replaces."""
    seed: int
    recipe: dict[str, Any]
    """Settings that all variants share, without NOT_LEARNING."""
    data: str
    """Fingerprint of training data, validation data and tokenizer."""
    device: str
    versions: dict[str, Any]
    source: str
    """Digest of this package's source, where `versions` has no git hash."""
    finished: str
    """Time of the last step, UTC."""
    tokens: int
    tok_s: float | None
    """Median over the steps."""
    eval_loss: list[list[float]]
    """[step, validation loss] of every evaluation."""
    train_loss: list[list[float]]
    """[step, training loss], means over intervals of steps."""

    @property
    def recipe_key(self) -> str:
        return digest(self.recipe)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Equal for two runs of which one repeats the other."""
        return self.recipe_key, self.data, self.seed, self.variant

    @property
    def losses(self) -> dict[int, float]:
        """Validation loss by step, without step 0."""
        return {int(step): loss for step, loss in self.eval_loss if step}

    @property
    def end(self) -> float:
        return self.losses[max(self.losses)]

    def line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True)
class Pair:
    """A run and the reference with the same seed, recipe and data."""

    run: RunResult
    reference: RunResult

    @property
    def end(self) -> float:
        """At the last step of the run, which may have been stopped before the reference's."""
        step = max(self.run.losses)
        return self.run.losses[step] - self.reference.losses.get(step, self.reference.end)

    @property
    def stopped(self) -> str | None:
        """Where the run was stopped before the reference's end, in words."""
        step, last = max(self.run.losses), max(self.reference.losses)
        return None if step >= last else f"{self.run.variant}, seed {self.run.seed}, at step {step:,} of {last:,}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None of a single value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.fmean(values), error


def with_error(values: Sequence[float]) -> str:
    mean, error = mean_and_error(values)
    return f"{mean:+.4f}" if error is None else f"{mean:+.4f} ± {error:.4f}"


# ---- files ----------------------------------------------------------------------------------------------------------


def shared_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a recipe that both runs of a pair have."""
    return {key: value for key, value in sorted(recipe.items()) if key not in NOT_LEARNING}


def data_fingerprint(*specs: Mapping[str, Any]) -> str:
    """Of token shards a digest of their sha256 and tokenizer; of local text of the files' names and sizes; of other
    data of the specification alone."""
    return digest([_contents(spec) for spec in specs])


def _contents(spec: Mapping[str, Any]) -> Any:
    if spec.get("type") == "token" and spec.get("dataset_dir"):
        shards, manifests = find_shards(spec["dataset_dir"], "--train_ds, --eval_ds")
        if manifests:
            # Contents: a corpus that was copied is the same one.
            return [[m.tokenizer["fingerprint"], [shard.sha256 for shard in m.shards]] for _, m in manifests]
        return [[shard.path.name, shard.path.stat().st_size] for shard in shards]
    if spec.get("type") == "text" and spec.get("paths"):
        named = {key: value for key, value in spec.items() if key != "paths"}
        files = text_files(spec["paths"], "all", 0.0, "--train_ds, --eval_ds")
        return [named, [[file.relative, file.path.stat().st_size] for file in files]]
    return dict(spec)


def averaged(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """At most CURVE_POINTS [step, mean loss], over intervals of equally many steps."""
    size = -(-len(points) // CURVE_POINTS)  # steps that are averaged into a point
    spans = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [[span[-1][0], round(statistics.fmean(loss for _, loss in span), 5)] for span in spans]


def read_results(folders: Iterable[Path], flag: str) -> list[RunResult]:
    """The runs in the .jsonl files of the folders, the newest of those that repeat each other, in the order in which
    they finished. UserError for a file that holds anything else, and for one variant with different settings."""
    newest: dict[tuple, RunResult] = {}
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{flag}: {folder} is not a folder.")
        for path in sorted(folder.glob("*.jsonl")):
            for number, line in enumerate(_lines(path, flag), 1):
                run = _parsed(line, f"{flag} ({path}, line {number})")
                if run.key not in newest or newest[run.key].finished < run.finished:
                    newest[run.key] = run
    runs = sorted(newest.values(), key=lambda run: run.finished)
    check_variants(runs, flag)
    return runs


def _lines(path: Path, flag: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{flag}: cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}."
        ) from None


def _parsed(line: str, where: str) -> RunResult:
    record = parse_json(line, where)
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object; results are written by python -m qtrain.pairs.seed_pairs.")
    run = RunResult(**check_fields(RunResult, record, where))
    for name in ("eval_loss", "train_loss"):
        if not all(len(point) == 2 for point in getattr(run, name)):
            raise UserError(f"{where}: {name} must be a list of [step, loss].")
    if not run.losses:
        raise UserError(f"{where}: it has no validation loss after step 0.")
    return run


def check_variants(runs: Iterable[Any], flag: str) -> None:
    """UserError where one name means different settings in runs of one recipe. runs: finished ones, `RunResult`, or
    those to be made, `PairedRun`."""
    known: dict[tuple[str, str], Any] = {}
    for run in runs:
        other = known.setdefault((run.key[0], run.variant), run)  # the first of that name
        if other.overrides != run.overrides:
            raise UserError(
                f"{flag}: {run.variant!r} of seed {run.seed} is {json.dumps(run.overrides)}, and of seed {other.seed} "
                f"{json.dumps(other.overrides)}; they cannot be averaged. Give one of them another name."
            )


# ---- pairs and tables -----------------------------------------------------------------------------------------------


def make_pairs(runs: Iterable[RunResult], reference: str) -> list[Pair]:
    """Each run of another variant with the reference of its recipe, data and seed; none of those that have no such."""
    runs = list(runs)
    references = {run.key[:3]: run for run in runs if run.variant == reference}  # by (recipe, data, seed)
    return [
        Pair(run, references[run.key[:3]]) for run in runs if run.variant != reference and run.key[:3] in references
    ]


def grouped(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """The items by their keys, in the order of the first of each."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def title_of(run: RunResult) -> str:
    """Model, tokens and steps."""
    model = Path(str(run.recipe.get("model", "model"))).stem
    tokens = f"{run.tokens / 1e6:,.0f} M" if run.tokens >= 10**6 else f"{run.tokens:,}"
    return f"{model}, {tokens} tokens, {max(run.losses):,} steps"


def make_tables(runs: Sequence[RunResult], reference: str, failures: Mapping[str, str] | None = None) -> list[Table]:
    """For each recipe the mean difference of each variant, and every run. failures: reasons by 'VARIANT, seed N'."""
    tables = []
    for recipe_runs in grouped(runs, lambda run: run.recipe_key).values():
        pairs, title = make_pairs(recipe_runs, reference), title_of(recipe_runs[0])
        if pairs:
            by_variant = grouped(pairs, lambda pair: pair.run.variant)
            tables.append(_differences(by_variant, f"Validation loss over {reference}: {title}"))
            if stopped := [pair.stopped for pair in pairs if pair.stopped]:
                tables[-1].notes.append(f"Stopped, and compared there: {'; '.join(stopped)}.")
        tables.append(_every_run(recipe_runs, pairs, reference, f"Every run: {title}"))
    for row, reason in (failures or {}).items():
        if not tables:
            tables.append(Table("Every run", "", ["loss"]))
        tables[-1].put(row, tables[-1].columns[0], Cell(reason=reason))
    return tables


def _differences(pairs: Mapping[str, Sequence[Pair]], title: str) -> Table:
    table = Table(title, "nats", ["loss", "difference", "standard error", "pairs", "speed"])
    for variant, found in pairs.items():
        mean, error = mean_and_error([pair.end for pair in found])
        loss = statistics.fmean(pair.run.end for pair in found)
        table.put(variant, "loss", Cell(loss, text=f"{loss:.4f}"))
        table.put(variant, "difference", Cell(mean, text=f"{mean:+.4f}"))
        if error is not None:
            table.put(variant, "standard error", Cell(error, text=f"{error:.4f}"))
        table.put(variant, "pairs", Cell(len(found), text=str(len(found))))
        speeds = [p.run.tok_s / p.reference.tok_s for p in found if p.run.tok_s and p.reference.tok_s]
        if speeds:
            speed = statistics.median(speeds)
            table.put(variant, "speed", Cell(speed, text=f"{speed:.2f}x"))
    return table


def _every_run(runs: Sequence[RunResult], pairs: Sequence[Pair], reference: str, title: str) -> Table:
    over = f"over {reference}"
    table = Table(title, "loss in nats", ["loss", over, "tok/s", "data", "GPU", "commit"])
    compared = {pair.run.key: pair.end for pair in pairs}
    order = {name: place for place, name in enumerate(dict.fromkeys([reference, *(run.variant for run in runs)]))}
    several = len({run.data for run in runs}) > 1  # then a row says which data its run has read
    for run in sorted(runs, key=lambda run: (order[run.variant], run.seed)):
        row = f"{run.variant}, seed {run.seed}" + (f", data {run.data[:4]}" if several else "")
        table.put(row, "loss", Cell(run.end, text=f"{run.end:.4f}", details={"losses": run.losses}))
        if run.key in compared:
            table.put(row, over, Cell(compared[run.key], text=f"{compared[run.key]:+.4f}"))
        elif run.variant != reference:
            table.put(row, over, Cell(reason=f"no run of {reference} with this seed and data"))
        if run.tok_s:
            table.put(row, "tok/s", Cell(run.tok_s, text=f"{run.tok_s:,.0f}"))
        git, _, dirty = str(run.versions.get("git") or "").partition("-")  # hash, or hash-dirty
        commit = f"{git[:10]}{dirty and '-dirty'}" if git else f"source {run.source}"
        for column, text in (("data", run.data[:8]), ("GPU", run.device), ("commit", commit)):
            table.put(row, column, Cell(text=text))
    if mixed := [p for p in pairs if _code(p.run) != _code(p.reference) or p.run.device != p.reference.device]:
        table.notes.append(f"{len(mixed)} of {len(pairs)} pairs are of different commits, versions or GPUs.")
    return table


def _code(run: RunResult) -> list[Any]:
    return [run.source, *(run.versions.get(name) for name in ("torch", "triton"))]
