"""report.html: curves and results of a run, from its metrics.jsonl and config.json alone; self-contained.

Keys of a record: loss, eval_loss and final_eval_loss, eval_NAME_loss and final_eval_NAME_loss (of a validation set by
name), lr, grad_norm, tok_s, sol (fraction), mem (peak bytes), tokens (so far; for images img_s, images), accuracy,
top1, top5, hellaswag and hellaswag_norm (fractions), samples (list of [prompt, text]).
All but `step` may be missing; what no record has is not drawn.
"""

import contextlib
import html
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtrain.core.checks import MAX_JSON
from qtrain.core.reading import read_small
from qtrain.train.log.metrics import IMAGES, TOKENS, SampleUnit, read_metrics
from qtrain.train.log.status import duration, short_number

Points = list[tuple[float, float]]

# (title, [(key, legend)], factor)
CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...] = (
    ("Loss", (("loss", "training"), ("eval_loss", "validation")), 1.0),
    ("Learning rate", (("lr", "lr"),), 1.0),
    ("Gradient norm", (("grad_norm", "grad_norm"),), 1.0),
    ("Tokens per second", (("tok_s", "tok_s"),), 1.0),
    ("Images per second", (("img_s", "img_s"),), 1.0),
    ("Speed of light (%)", (("sol", "sol"),), 100.0),
    ("Accuracy (%)", (("accuracy", "exact match"), ("top1", "top-1"), ("top5", "top-5")), 100.0),
    ("HellaSwag (%)", (("hellaswag", "accuracy"), ("hellaswag_norm", "length-normalized")), 100.0),
)
WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 10, 24  # margins
MAX_POINTS = 600
COLORS = "abcdef"  # classes of STYLE

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; flex: 1 1 480px; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
.grid { stroke: currentColor; opacity: .15; } .line { fill: none; stroke-width: 1.6; }
.a { stroke: #2f6fdb; fill: #2f6fdb; } .b { stroke: #e0702a; fill: #e0702a; } .c { stroke: #2c9a5b; fill: #2c9a5b; }
.d { stroke: #8a55c8; fill: #8a55c8; } .e { stroke: #b8860b; fill: #b8860b; } .f { stroke: #c43a5e; fill: #c43a5e; }
.line.a, .line.b, .line.c, .line.d, .line.e, .line.f { fill: none; }
table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 1rem; }
td { overflow-wrap: anywhere; }
"""


# ---- curves ---------------------------------------------------------------------------------------------------------


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _points(records: Iterable[Mapping[str, Any]], key: str, scale: float = 1.0) -> Points:
    return [(r["step"], r[key] * scale) for r in records if _number(r.get(key))]


def _averaged_points(points: Points) -> Points:
    """At most MAX_POINTS points: means over intervals of equally many."""
    if len(points) <= MAX_POINTS:
        return points
    # A run has more steps than a chart has pixels.
    size = -(-len(points) // MAX_POINTS)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def axis_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within [low, high], 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    # 0.999: rounding must not skip a gap that fits exactly.
    gap = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [gap * n for n in range(math.ceil(low / gap - 1e-9), math.floor(high / gap + 1e-9) + 1)]


def _spread(values: Iterable[float]) -> tuple[float, float]:
    low, high = min(values := list(values)), max(values)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    half = abs(low) * 0.05 or 0.5  # a constant needs a height
    return low - half, high + half


def _chart(title: str, series: Sequence[tuple[str, Points]]) -> str:
    """An SVG of curves over the step; colors repeat after six."""
    series = [(color, *curve) for color, curve in zip(itertools.cycle(COLORS), series, strict=False)]
    x_low, x_high = _spread(x for *_, points in series for x, _ in points)
    y_low, y_high = _spread(y for *_, points in series for _, y in points)

    def x_at(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_at(y: float) -> float:
        return TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for y in axis_ticks(y_low, y_high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_at(y):.1f}" y2="{y_at(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_at(y) + 4:.1f}" text-anchor="end">{short_number(y, 4)}</text>')
    for x in axis_ticks(x_low, x_high, 6):
        parts.append(f'<text x="{x_at(x):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{short_number(x, 4)}</text>')
    for color, name, points in series:
        shown = _averaged_points(points)
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in shown)
        parts.append(f'<polyline class="line {color}" points="{path}"/>')
        for x, y in shown if len(shown) <= 60 else ():
            tip = f"<title>{name}, step {x:g}: {y:.6g}</title>"
            parts.append(f'<circle class="{color}" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.2">{tip}</circle>')
    if len(series) > 1:
        for row, (color, name, _) in enumerate(series):
            parts.append(f'<rect class="{color}" x="{WIDTH - 110}" y="{TOP + 4 + 16 * row}" width="10" height="10"/>')
            parts.append(f'<text x="{WIDTH - 94}" y="{TOP + 13 + 16 * row}">{name}</text>')
    drawing = "".join(parts)
    return f'<figure><h2>{title}</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{drawing}</svg></figure>'


def _named_losses(records: Iterable[Mapping[str, Any]], prefix: str) -> list[tuple[str, str]]:
    """(key, name) of the validation sets that have names, in their order."""
    keys = dict.fromkeys(key for record in records for key in record)
    return [(key, found[1]) for key in keys if (found := re.fullmatch(rf"{prefix}_([A-Za-z0-9_.-]+)_loss", key))]


# ---- tables ---------------------------------------------------------------------------------------------------------


def _training_seconds(records: Iterable[Mapping[str, Any]], unit: SampleUnit) -> float:
    """Time spent training: each record's new tokens (or images) over its speed."""
    seconds, tokens_before = 0.0, 0
    for record in records:
        if _number(tokens := record.get(unit.many)):
            # The log has speeds, not times: pauses for evaluation and checkpoints are left out of them.
            if _number(speed := record.get(unit.rate)) and speed > 0:
                seconds += max(tokens - tokens_before, 0) / speed
            tokens_before = tokens
    return seconds


def _summary(records: list[dict[str, Any]], config: Mapping[str, Any]) -> list[tuple[str, str]]:
    step, planned = (records[-1]["step"] if records else 0), config.get("n_steps")
    evaluated = [loss for _, loss in _points(records, "eval_loss")]
    since_best = len(evaluated) - 1 - evaluated.index(min(evaluated)) if evaluated else 0
    early = since_best >= (config.get("early_stopping") or math.inf)
    unfinished = isinstance(planned, int) and step < planned and not early
    rows = [("Steps", f"{step:,} of {planned:,} (unfinished)" if unfinished else f"{step:,}")]

    def add(title: str, key: str, choose: Callable[[Points], tuple[float, float]], show: Callable[..., str]) -> None:
        if points := _points(records, key):
            at, value = choose(points)
            rows.append((title, show(value, at)))

    def last(points: Points) -> tuple[float, float]:
        return points[-1]

    def lowest(points: Points) -> tuple[float, float]:
        return min(points, key=lambda point: point[1])

    def highest(points: Points) -> tuple[float, float]:
        return max(points, key=lambda point: point[1])

    add("Final loss", "loss", last, lambda value, _: f"{value:.4f}")
    add("Final validation loss", "eval_loss", last, lambda value, at: f"{value:.4f} (step {at:,})")
    add("Best validation loss", "eval_loss", lowest, lambda value, at: f"{value:.4f} (step {at:,})")
    for key, name in _named_losses(records, "eval"):
        add(f"Final validation loss, {name}", key, last, lambda value, at: f"{value:.4f} (step {at:,})")
    add("Loss over all validation data", "final_eval_loss", last, lambda value, at: f"{value:.4f} (step {at:,})")
    for key, name in _named_losses(records, "final_eval"):
        add(f"Loss over all of {name}", key, last, lambda value, at: f"{value:.4f} (step {at:,})")
    add("HellaSwag", "hellaswag", last, lambda value, at: f"{100 * value:.2f}% (step {at:,})")
    add("HellaSwag, length-normalized", "hellaswag_norm", last, lambda value, at: f"{100 * value:.2f}% (step {at:,})")
    add("Top-1 accuracy", "top1", last, lambda value, at: f"{100 * value:.2f}% (step {at:,})")
    add("Best top-1 accuracy", "top1", highest, lambda value, at: f"{100 * value:.2f}% (step {at:,})")
    add("Top-5 accuracy", "top5", last, lambda value, at: f"{100 * value:.2f}% (step {at:,})")
    for key in sorted({key for record in records for key in record if key.startswith("lm_eval/")}):
        add(key, key, last, lambda value, at: f"{value:.4f} (step {at:,})")
    unit = IMAGES if any(IMAGES.many in record for record in records) else TOKENS
    add(unit.many.capitalize(), unit.many, last, lambda value, _: f"{value:,}")
    if seconds := _training_seconds(records, unit):
        rows.append(("Training time, without compile, evaluation and checkpoints", duration(seconds)))
        speeds = sorted(value for _, value in _points(records, unit.rate))
        rows.append((f"{unit.many.capitalize()} per second, median", f"{speeds[len(speeds) // 2]:,.0f}"))
        if unit is TOKENS:
            rows.append(("Time for a billion tokens, at that speed", duration(1e9 / speeds[len(speeds) // 2])))
    add("Peak memory", "mem", highest, lambda value, _: f"{value / 1024**3:.2f} GiB")
    return rows


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    cells = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(v if isinstance(v, str) else json.dumps(v))}</td></tr>"
        for name, v in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _samples(records: Iterable[Mapping[str, Any]]) -> str:
    """The samples of the last record with any."""
    found = [(r["step"], r["samples"]) for r in records if isinstance(r.get("samples"), list) and r["samples"]]
    if not found:
        return ""
    step, samples = found[-1]
    texts = "".join(
        f"<pre><b>{html.escape(str(pair[0]))}</b>{html.escape(str(pair[1]))}</pre>"
        for pair in samples
        if isinstance(pair, list) and len(pair) == 2
    )
    return f"<h2>Samples at step {step:,}</h2>{texts}"


def write_report(run_dir: Path, failure: str | None = None) -> Path:
    """Write report.html into the folder of a finished or unfinished run. Returns its path. failure: why it ended."""
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / "metrics.jsonl")
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        config = json.loads(read_small(run_dir / "config.json", MAX_JSON))
    charts = []
    by_set = ("Validation loss by dataset", _named_losses(records, "eval"), 1.0)
    for title, keys, scale in (CHARTS[0], by_set, *CHARTS[1:]):
        series = [(name, points) for key, name in keys if (points := _points(records, key, scale))]
        if series:
            charts.append(_chart(title, series))
    name = html.escape(run_dir.resolve().name)
    body = [
        f"<h1>{name}</h1>",
        f"<p><b>The run has ended with an error:</b> {html.escape(failure)}</p>" if failure else "",
        _table(_summary(records, config)),
        f'<div class="charts">{"".join(charts)}</div>' if charts else "<p>No step has been logged yet.</p>",
        _samples(records),
        "<h2>Settings</h2>",
        _table(config.items()),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
    unfinished = run_dir / ".report.html.tmp"
    unfinished.write_text(page, encoding="utf-8", errors="backslashreplace")
    # A browser that reloads finds a whole page.
    os.replace(unfinished, run_dir / "report.html")
    return run_dir / "report.html"
