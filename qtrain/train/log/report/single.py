"""The charts of one run: what metrics.jsonl holds, in the order in which one asks. Without data there is no chart."""

import re
from collections.abc import Iterator

import numpy as np

from qtrain.train.log.report.charts import Chart, Series
from qtrain.train.log.report.records import Curve, RunRecords, number, planned_memory
from qtrain.train.log.report.series import evenly, smoothing_span

GIB = 1024**3
MAX_AREA_POINTS = 800

# key of the chart, title, unit, [(key of the record, name)], factor
LINES: tuple[tuple[str, str, str, tuple[tuple[str, str], ...], float], ...] = (
    ("lr", "Learning rate", "", (("lr", "learning rate"),), 1.0),
    ("norm", "Gradient norm", "before clipping", (("grad_norm", "gradient norm"),), 1.0),
    ("tokens", "Tokens per second", "without compile, evaluation and checkpoints", (("tok_s", "tok/s"),), 1.0),
    ("images", "Images per second", "without compile, evaluation and checkpoints", (("img_s", "img/s"),), 1.0),
    ("sol", "Speed of light", "% of the arithmetic in use; mfu: of bf16's peak", (("sol", "sol"), ("mfu", "mfu")), 100),
    ("wait", "Waiting for data", "% of the time", (("data_wait", "waiting"),), 100),
    ("gpu", "GPU utilization", "% of the time", (("gpu.util", "utilization"), ("gpu.memory_util", "memory")), 1.0),
    ("power", "GPU power", "W", (("gpu.power", "power"),), 1.0),
    ("clock", "SM clock", "MHz", (("gpu.sm_clock", "clock"),), 1.0),
    ("heat", "GPU temperature", "°C", (("gpu.temperature", "temperature"),), 1.0),
    ("joules", "Energy", "J a token", (("joules_token", "energy"),), 1.0),
    ("accuracy", "Accuracy", "%", (("accuracy", "exact match"), ("top1", "top-1"), ("top5", "top-5")), 100),
    ("hellaswag", "HellaSwag", "%", (("hellaswag", "accuracy"), ("hellaswag_norm", "length-normalized")), 100),
    ("experts", "Expert load", "largest load over the mean", (("expert_load", "largest load"),), 1.0),
    ("entropy", "Expert entropy", "of the load, 1: even", (("expert_entropy", "entropy"),), 1.0),
)
DRAWN = {key for *_, keys, _ in LINES for key, _ in keys} | {"loss", "eval_loss", "mem"}
NO_CURVE = {"step", "tokens", "images", "time", "hours_billion"}
POINTS = {"accuracy", "hellaswag"}
MAX_OTHERS = 12
"""Charts of values that this version does not know."""


def charts_of(run: RunRecords) -> list[Chart]:
    """The charts that the run has data for."""
    found = [*_losses(run), *_lines(run), *_memory(run), *_time(run)]
    return sorted([chart for chart in found if chart.series], key=lambda chart: _order(chart.key)) + _others(run)


ORDER = ["loss", "datasets", "norm", "lr", "tokens", "images", "sol", "time", "memory", "accuracy", "hellaswag"]


def _order(key: str) -> int:
    return ORDER.index(key) if key in ORDER else len(ORDER)


def named_losses(run: RunRecords, prefix: str) -> list[tuple[str, str]]:
    """(key, name) of the validation sets that have names, in their order."""
    return [(key, found[1]) for key in run.columns if (found := re.fullmatch(rf"{prefix}_([\w.-]+)_loss", key))]


def _losses(run: RunRecords) -> Iterator[Chart]:
    training, validation = run.curve("loss"), run.curve("eval_loss")
    series = []
    if training is not None:
        series += [Series("training", training, "smoothed", "#3478d4")]
    if validation is not None:
        series += [Series("validation", validation, "points", "#d9652b")]
    yield Chart(
        "loss", "Loss", "nats", series, smoothing_note(training), log=True, focus=focus_of(training, validation)
    )
    curves = {name: run.curve(key) for key, name in named_losses(run, "eval")}
    by_set = [Series(name, curve, "points") for name, curve in curves.items() if curve is not None]
    yield Chart("datasets", "Validation loss by dataset", "nats", by_set)


def smoothing_note(curve: Curve | None) -> str:
    span = smoothing_span(len(curve)) if curve is not None else 1
    return f"The solid line is the mean of the last {span} logged steps." if span > 1 else ""


def focus_of(*curves: Curve | None) -> tuple[float, float] | None:
    """The y range of what follows the first 3% of the steps, but for spikes: both would flatten the rest. None: it is
    all."""
    known = [curve for curve in curves if curve is not None]
    if not known or max(map(len, known)) < 50:
        return None
    end = max(curve.x["steps"][-1] for curve in known)
    late = np.concatenate([curve.y[curve.x["steps"] >= 0.03 * end] for curve in known])
    every = np.concatenate([curve.y for curve in known])
    if not len(late):
        return None
    median, usual = np.quantile(late, (0.5, 0.99))
    low, high = float(late.min()), float(min(late.max(), usual + 0.5 * (usual - median)))  # of noise to 3.5 sigma
    if every.max() - low < 1.5 * (high - low):
        return None
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _lines(run: RunRecords) -> Iterator[Chart]:
    for name, title, unit, keys, scale in LINES:
        style = "points" if name in POINTS else "line" if name == "lr" else "smoothed"
        curves = [(legend, run.curve(key, scale)) for key, legend in keys]
        yield Chart(
            name,
            title,
            unit,
            [Series(legend, curve, style) for legend, curve in curves if curve],
            throttling(run, name),
            focus=focus_of(*(curve for _, curve in curves)) if name == "norm" else None,
        )


def throttling(run: RunRecords, chart: str) -> str:
    """Beside the clock: for which reasons the GPU ran below it, and how often."""
    rows = [r["gpu"] for r in run.records if isinstance(r.get("gpu"), dict)] if chart == "clock" else []
    reasons: dict[str, int] = {}
    for row in rows:
        for reason in found if isinstance(found := row.get("throttled"), list) else ():
            reasons[str(reason)] = reasons.get(str(reason), 0) + 1
    shares = ", ".join(f"{reason} {100 * count / len(rows):.3g}%" for reason, count in reasons.items())
    return f"Throttled, of the samples: {shares}." if shares else ""


def _memory(run: RunRecords) -> Iterator[Chart]:
    measured, planned = run.curve("mem", 1 / GIB), planned_memory(run)
    if measured is None:
        return
    series = [Series("peak so far", measured)]
    tensors = sum(size for kind, size in planned.items() if not kind.startswith("CUDA"))
    if tensors:
        series.append(Series("plan", Curve(measured.x, np.full(len(measured), tensors)), "dashed", "#808a94"))
    yield Chart("memory", "Memory", "GiB of tensors", series)


def _time(run: RunRecords) -> Iterator[Chart]:
    """Of records that have all kinds, so that the areas add up."""
    kinds = [key for key in run.columns if key.startswith("ms.")]
    rows = [n for n, record in enumerate(run.records) if kinds and _has_all(record, kinds)]
    if not rows:
        return
    index = np.array(rows)[evenly(len(rows), MAX_AREA_POINTS)]
    x = {mode: column[index] for mode, column in run.positions.items()}
    series = []
    for key in kinds:
        y = np.array([float(run.records[n]["ms"][key.removeprefix("ms.")]) for n in index])
        series.append(Series(key.removeprefix("ms.").replace("_", " and "), Curve(x, y), "area"))
    yield Chart("time", "Time of a step by kind", "ms", series)


def _has_all(record: dict, kinds: list[str]) -> bool:
    times = record.get("ms")
    return isinstance(times, dict) and all(number(times.get(kind.removeprefix("ms."))) is not None for kind in kinds)


def _others(run: RunRecords) -> list[Chart]:
    """A chart of each value that none of the above draws, such as one that a later version records."""
    named = {key for prefix in ("eval", "final_eval") for key, _ in named_losses(run, prefix)}
    known = DRAWN | NO_CURVE | named | {"final_eval_loss"}
    left = [key for key in run.columns if key not in known and not key.startswith(("ms.", "lm_eval/"))]
    curves = [(key, run.curve(key)) for key in left]
    several = [(key, curve) for key, curve in curves if curve is not None and len(curve) > 1][:MAX_OTHERS]
    return [Chart(f"other-{n}", key, "", [Series(key, curve, "smoothed")]) for n, (key, curve) in enumerate(several)]
