"""Several runs on one page: their losses against steps, tokens, wall time and energy, and differences in nats.

Runs whose settings differ in the seed only are a group. Differences are to the group of the first run: of runs with the
same seed in pairs, since both have seen the same batches from the same weights; else of the groups' means. A band is
one standard error of the mean over seeds.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qtrain.train.log.report import tables
from qtrain.train.log.report.charts import PALETTE, Chart, Series
from qtrain.train.log.report.page import page
from qtrain.train.log.report.records import Curve, RunRecords, shown_value
from qtrain.train.log.report.series import smoothed
from qtrain.train.log.status import duration, short_number

NOT_COMPARED = {
    "seed", "run_name", "runs_dir", "project", "trackers", "resume", "ckpt_interval", "keep_ckpts", "async_checkpoint",
    "export", "log_interval", "num_workers", "profile", "dry_run",
}  # fmt: skip
"""Settings that change nothing of what a run learns: names, files, logs; and the seed, which makes a group."""
GRID = 300
"""Points at which training losses are subtracted."""


@dataclass(frozen=True)
class ComparedRun:
    """A run as the comparison needs it."""

    name: str
    settings: Mapping[str, Any]
    """All that it was run with."""
    train: Curve | None
    """Training loss, as it was logged."""
    validation: Curve | None
    speed: Curve | None = None
    unit: str = "tok/s"
    tokens: float | None = None
    seconds: float | None = None
    memory: float | None = None
    """GiB at the peak."""
    joules: float | None = None
    """A token."""

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def key(self) -> str:
        """Equal for runs of a group."""
        # Keys with "_" are facts such as versions, not settings. Without config.json a run is a group of its own.
        kept = {k: v for k, v in self.settings.items() if k not in NOT_COMPARED and not k.startswith("_")}
        return json.dumps(kept, sort_keys=True) if kept else self.name


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in the seed only."""

    name: str
    color: str
    runs: list[ComparedRun] = field(default_factory=list)


def compared(run: RunRecords) -> ComparedRun:
    """A run's folder for the comparison."""
    tokens, memory, joules = (run.curve(key) for key in (run.samples, "mem", "joules_token"))
    return ComparedRun(
        # Folders are named TIME_NAME; the time would only crowd the legend.
        re.sub(r"^\d{8}-\d{6}_", "", run.name),
        run.config,
        run.curve("loss"),
        run.curve("eval_loss"),
        run.curve(run.rate),
        "img/s" if run.samples == "images" else "tok/s",
        None if tokens is None else float(tokens.y[-1]),
        run.seconds(),
        None if memory is None else float(memory.y.max()) / 1024**3,
        None if joules is None else float(np.median(joules.y)),
    )


def compare_page(runs: Sequence[ComparedRun], title: str = "Comparison of runs", notes: Sequence[str] = ()) -> str:
    """The page of at least one run; the first is the reference. notes: lines above it."""
    groups = grouped(_distinct(runs))
    charts = [chart for chart in [*_losses(groups), *_differences(groups), *_speeds(groups)] if chart.series]
    above = "".join(f'<p class="failed">{tables.escaped(note)}</p>' for note in notes)
    return page(
        title,
        charts,
        above=above + results(groups),
        below=tables.section("settings", "Settings that differ", settings_that_differ(groups)),
        mode="tokens",
        counted="images" if all(run.unit == "img/s" for run in runs) else "tokens",
    )


def _distinct(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """The runs, of which those with the same name are numbered."""
    names = [run.name for run in runs]
    seen: dict[str, int] = {}
    found = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        number = f" ({seen[run.name]})" if names.count(run.name) > 1 else ""
        found.append(replace(run, name=run.name + number))
    return found


def grouped(runs: Sequence[ComparedRun]) -> list[RunGroup]:
    """The groups in the order of their first runs."""
    by_key: dict[str, list[ComparedRun]] = {}
    for run in runs:
        by_key.setdefault(run.key, []).append(run)
    found = []
    for number, members in enumerate(by_key.values()):
        # "int8-seed1" of a group is "int8".
        name = re.sub(r"[-_ ,.]*seed[-_ =]*\w+$", "", members[0].name) if len(members) > 1 else members[0].name
        found.append(RunGroup(name or members[0].name, PALETTE[number % len(PALETTE)], members))
    return found


# ---- charts ---------------------------------------------------------------------------------------------------------


def _each(groups: Sequence[RunGroup], curve: str, style: Any) -> list[Series]:
    return [
        Series(run.name, found, style, group.color)
        for group in groups
        for run in group.runs
        if (found := getattr(run, curve)) is not None
    ]


def _losses(groups: Sequence[RunGroup]) -> list[Chart]:
    training = [
        Series(s.name, smoothed(s.curve), color=s.color) for s in _each(groups, "train", "line") if len(s.curve)
    ]
    note = "The mean over 2% of the run's steps. Runs that differ in the seed only have one color."
    validation = _each(groups, "validation", "points")
    return [
        Chart("loss", "Training loss", "nats", training, note, log=True, focus=_focus(training)),
        Chart("validation", "Validation loss", "nats", validation, focus=_focus(validation)),
    ]


def _focus(series: Sequence[Series]) -> tuple[float, float] | None:
    """The y range without the first 5% of each run, at least its first point."""
    # The initial drop from ln(vocabulary) would flatten all that follows.
    late = [s.curve.y[1 + len(s.curve) // 20 :] for s in series if len(s.curve) >= 5]
    if not late:
        return None
    low, high = min(float(y.min()) for y in late), max(float(y.max()) for y in late)
    margin = 0.05 * (high - low) or 0.5  # a constant curve has no range
    return low - margin, high + margin


def _speeds(groups: Sequence[RunGroup]) -> list[Chart]:
    units = sorted({run.unit for group in groups for run in group.runs})
    return [Chart("speed", "Speed", ", ".join(units), _each(groups, "speed", "smoothed"))]


def _differences(groups: Sequence[RunGroup]) -> list[Chart]:
    note = f"Above 0 is worse than {groups[0].name}. A band is one standard error of the mean over seeds."
    found = []
    for curve, key, title in (
        ("validation", "over-validation", "Validation loss"),
        ("train", "over-train", "Training loss"),
    ):
        series: list[Series] = []
        # The reference has no difference to itself.
        for group in groups[1:]:
            if (difference := group_difference(groups[0], group, curve)) is None:
                continue
            mean, error = difference
            if error is not None:
                upper = Curve(mean.x, mean.y + error)
                series.append(Series(group.name, upper, "band", group.color, lower=mean.y - error))
            series.append(Series(group.name, mean, "points" if curve == "validation" else "line", group.color))
        # Early differences are large and say little; the range follows the last 80%.
        late = [s.curve.y[len(s.curve) // 5 :] for s in series]
        focus = None
        if late and max(map(len, late)) > 3:
            # Symmetric about 0; never so narrow that noise of a few thousandths looks like a result.
            most = 1.2 * max(0.005, *(float(np.abs(y).max()) for y in late))
            focus = (-most, most)
        found.append(Chart(key, f"{title} over {groups[0].name}", "nats", series, note, focus=focus))
    return found


def group_difference(reference: RunGroup, group: RunGroup, curve: str) -> tuple[Curve, np.ndarray | None] | None:
    """(mean difference in nats, its standard error [n]) of a group to the reference; None where they share no point.

    curve: "train" or "validation". The error is None of groups of one run each."""
    # By seed: of runs with equal seeds the last one counts.
    ours = {run.seed: c for run in group.runs if (c := _loss(run, curve)) is not None}
    theirs = {run.seed: c for run in reference.runs if (c := _loss(run, curve)) is not None}
    if not ours or not theirs:
        return None
    # By tokens, runs with different batch sizes are compared at the same data.
    mode = "tokens" if all("tokens" in c.x for c in (*ours.values(), *theirs.values())) else "steps"
    points = _shared_points([*ours.values(), *theirs.values()], mode, curve)
    if not len(points):
        return None
    own = {seed: np.interp(points, c.x[mode], c.y) for seed, c in ours.items()}  # each [points]
    other = {seed: np.interp(points, c.x[mode], c.y) for seed, c in theirs.items()}
    # In pairs, what a seed does to both runs cancels.
    if pairs := [own[seed] - other[seed] for seed in own if seed in other]:
        mean, error = _mean_and_error(np.array(pairs))
    else:
        (mean, error), (base, base_error) = (_mean_and_error(np.array([*curves.values()])) for curves in (own, other))
        mean = mean - base
        both = [e for e in (error, base_error) if e is not None]
        # Independent errors add in squares; a group of one run has none to add.
        error = np.sqrt(sum(e**2 for e in both)) if both else None
    # Other x axes, such as hours, are those of the group's first run.
    first = next(iter(ours.values()))
    x = {name: np.interp(points, first.x[mode], column) for name, column in first.x.items()}
    return Curve(x, mean), error


def _loss(run: ComparedRun, curve: str) -> Curve | None:
    found = getattr(run, curve)
    if found is None:
        return None
    return smoothed(found) if curve == "train" else found


def _shared_points(curves: Sequence[Curve], mode: str, curve: str) -> np.ndarray:
    """Positions at which all curves are known: of validation the evaluations that all have, without step 0, since a
    line between two of them is no measurement; of training a grid over what they share."""
    if curve == "validation":
        shared = set.intersection(*(set(c.x[mode].tolist()) for c in curves))
        return np.array(sorted(shared - {0.0}))
    low, high = max(c.x[mode][0] for c in curves), min(c.x[mode][-1] for c in curves)
    return np.linspace(low, high, GRID) if high > low else np.array([])


def _mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Over rows: [seeds, n] -> mean [n] and its standard error [n], None of one row."""
    # ddof=1: the sample's own mean is subtracted.
    error = values.std(axis=0, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else None
    return values.mean(axis=0), error


# ---- tables ---------------------------------------------------------------------------------------------------------


def results(groups: Sequence[RunGroup]) -> str:
    """A row for each run, and for each group of several their mean."""
    rows = []
    for group in groups:
        rows += [_row(run.name, [run]) for run in group.runs]
        if len(group.runs) > 1:
            rows.append(_row(f"{group.name}: mean of {len(group.runs)} runs", group.runs))
    differences = [group_difference(groups[0], group, "validation") for group in groups[1:]]
    over = []
    for group, difference in zip(groups[1:], differences, strict=True):
        if difference is not None:
            mean, error = difference
            spread = f" ± {error[-1]:.4f}" if error is not None else ""
            over.append((group.name, f"{mean.y[-1]:+.4f}{spread}", f"{mean.x['steps'][-1]:,.0f}"))
    head = ["run", "training loss", "validation loss", "tokens", "speed", "training time", "peak memory", "J a token"]
    last = f"Validation loss over {groups[0].name}, at the last evaluation that both have"
    if not any(row[-1] for row in rows):  # no GPU has measured energy
        head, rows = head[:-1], [row[:-1] for row in rows]
    return tables.table(head, rows) + (tables.table(["group", "nats", "step"], over, last) if over else "")


def _row(name: str, runs: Sequence[ComparedRun]) -> list[str]:
    def mean(values: Sequence[float | None], show: Any) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return ""
        spread = (
            f" ± {statistics.stdev(known) / len(known) ** 0.5:.4f}" if show is _loss_text and len(known) > 1 else ""
        )
        return show(statistics.fmean(known)) + spread

    def last(curve: Curve | None) -> float | None:
        return None if curve is None else float(curve.y[-1])

    speeds = [None if run.speed is None else float(np.median(run.speed.y)) for run in runs]
    cells = [
        mean([None if run.train is None else last(smoothed(run.train)) for run in runs], _loss_text),
        mean([last(run.validation) for run in runs], _loss_text),
        mean([run.tokens for run in runs], tables.count),
        mean(speeds, lambda value: f"{short_number(value)} {runs[0].unit}"),
        mean([run.seconds for run in runs], duration),
        mean([run.memory for run in runs], lambda value: f"{value:.2f} GiB"),
        mean([run.joules for run in runs], lambda value: f"{value:.3g}"),
    ]
    return [name, *(cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in cells)]


def _loss_text(value: float) -> str:
    return f"{value:.4f}"


def settings_that_differ(groups: Sequence[RunGroup]) -> str:
    """A row for each setting of which two runs have different values; a column for each run."""
    runs = [run for group in groups for run in group.runs]
    names = dict.fromkeys(key for run in runs for key in run.settings if not key.startswith("_"))
    rows = []
    for name in names:
        values = [shown_value(run.settings[name]) if name in run.settings else "" for run in runs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    versions = {name for run in runs for name in _versions(run)}
    for name in sorted(versions):
        values = [shown_value(_versions(run).get(name, "")) for run in runs]
        if len(set(values)) > 1:
            rows.append([f"version of {name}", *values])
    table = tables.table(["setting", *(run.name for run in runs)], rows)
    return f'<div class="differ">{table}</div>' if rows else ""


def _versions(run: ComparedRun) -> Mapping[str, Any]:
    found = run.settings.get("_versions")
    return found if isinstance(found, dict) else {}
