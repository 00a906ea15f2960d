"""What the report says in words and tables, as HTML. Every text of a user or a file is escaped here."""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from qtrain.train.log.report.heatmaps import TENSORS, linear_samples
from qtrain.train.log.report.records import RunRecords, lookup, number, planned_memory, shown_value
from qtrain.train.log.report.series import evenly
from qtrain.train.log.report.single import named_losses
from qtrain.train.log.status import duration, short_number, three_digits

MAX_ROWS, MAX_SAMPLES, MAX_WARNINGS, MAX_LINEARS = 60, 12, 50, 12
MAX_TEXT = 4000
"""Characters of a sample or a setting that are shown."""
GIB = 1024**3


def escaped(text: Any) -> str:
    """Text for HTML, of at most MAX_TEXT characters; a lone surrogate, which no file can hold, as an escape."""
    text = str(text).encode("utf-8", "backslashreplace").decode()
    return html.escape(text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ... ({len(text):,} characters)")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table whose first column names its rows. Cells are texts or numbers."""
    title = f"<caption>{escaped(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escaped(first)}</th>{"".join(f"<td>{escaped(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    thead = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    scroll = f'<div class="scroll" tabindex="0" role="group" aria-label="{escaped(caption or "table")}">'
    return f"{scroll}<table>{title}{thead}<tbody>{body}</tbody></table></div>"


def section(key: str, title: str, *parts: str) -> str:
    """A section of the page; nothing where its parts are empty."""
    heading = f'<h2 id="{key}-title">{escaped(title)}</h2>'
    inside = "".join(parts)
    return f'<section id="{key}" aria-labelledby="{key}-title">{heading}{inside}</section>' if inside else ""


def count(value: float) -> str:
    """A number of things: 655,360 below a million, then 1.31 M, 2.60 B."""
    if value < 1e6:
        return f"{value:,.0f}"
    for unit in ("M", "B"):
        value /= 1000 if unit == "B" else 1e6
        if value < 999.5:
            return f"{three_digits(float(value))} {unit}"
    return f"{three_digits(value / 1000)} T"


# ---- headline figures -----------------------------------------------------------------------------------------------


def state_of(run: RunRecords) -> str:
    """Finished, training, or stopped; with the step."""
    step, planned = (run.records[-1]["step"] if run.records else 0), run.config.get("n_steps")
    evaluated = run.curve("eval_loss")
    # Where the lowest loss lies so many evaluations back, --early_stopping has ended the run.
    since_best = len(evaluated) - 1 - int(evaluated.y.argmin()) if evaluated is not None else 0
    patience = number(run.config.get("early_stopping"))
    early = bool(patience) and since_best >= patience
    if not isinstance(planned, int) or step >= planned or early:
        return f"{step:,}"
    return f"{step:,} of {planned:,} ({'training' if run.is_locked else 'unfinished'})"


def headline(run: RunRecords) -> list[tuple[str, str, str]]:
    """(name, value, a word beside it) of the figures that one asks for first."""
    found = [("Steps", state_of(run), "")]
    last: Callable[[np.ndarray], int] = lambda y: len(y) - 1  # noqa: E731

    def add(title: str, key: str, show: Callable[[float], str], choose: Callable = last, step: bool = False) -> None:
        if (curve := run.curve(key)) is not None:
            at = int(choose(curve.y))
            found.append((title, show(float(curve.y[at])), f"step {curve.x['steps'][at]:,.0f}" if step else ""))

    def loss(value: float) -> str:
        return f"{value:.4f}"

    def percent(value: float) -> str:
        return f"{100 * value:.2f}%"

    add("Final loss", "loss", loss)
    add("Final validation loss", "eval_loss", loss, step=True)
    add("Best validation loss", "eval_loss", loss, np.argmin, step=True)
    for key, name in named_losses(run, "eval"):
        add(f"Final validation loss, {name}", key, loss, step=True)
    add("Loss over all validation data", "final_eval_loss", loss, step=True)
    for key, name in named_losses(run, "final_eval"):
        add(f"Loss over all of {name}", key, loss, step=True)
    for title, key in (("HellaSwag", "hellaswag"), ("HellaSwag, length-normalized", "hellaswag_norm")):
        add(title, key, percent, step=True)
    add("Exact match", "accuracy", percent, step=True)
    add("Top-1 accuracy", "top1", percent, step=True)
    add("Best top-1 accuracy", "top1", percent, np.argmax, step=True)
    add("Top-5 accuracy", "top5", percent, step=True)
    for key in sorted(key for key in run.columns if key.startswith("lm_eval/") and "_stderr" not in key):
        add(key, key, loss, step=True)
    add(run.samples.capitalize(), run.samples, count)
    if (seconds := run.seconds()) and (rate := run.curve(run.rate)) is not None:
        speed = float(np.median(rate.y))
        found.append(("Training time", duration(seconds), "without compile, evaluation and checkpoints"))
        found.append((f"{run.samples.capitalize()} per second", short_number(speed), "median"))
        if run.samples == "tokens" and speed > 0:
            found.append(("Time for a billion tokens", duration(1e9 / speed), "at that speed"))
    if (sol := run.curve("sol")) is not None:
        found.append(("Speed of light", f"{100 * np.median(sol.y):.1f}%", "median"))
    add("Peak memory", "mem", lambda value: f"{value / GIB:.2f} GiB", np.argmax)
    if (power := run.curve("gpu.power")) is not None:
        found.append(("GPU power", f"{np.mean(power.y):,.0f} W", "mean of this rank"))
    if run.records and "joules" in run.positions and (joules := run.curve("joules_token")) is not None:
        each = three_digits(float(np.median(joules.y)))
        found.append(("Energy", energy(float(run.positions["joules"][-1])), f"{each} J a token"))
    return found


def energy(joules: float) -> str:
    return f"{three_digits(joules / 3.6e6)} kWh" if joules >= 3.6e5 else f"{three_digits(joules / 1000)} kJ"


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    def card(name: str, value: str, note: str) -> str:
        small = f"<small>{escaped(note)}</small>" if note else ""
        return f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}{small}</dd></div>"

    return f'<dl class="cards">{"".join(card(*figure) for figure in figures)}</dl>'


# ---- evaluations, samples -------------------------------------------------------------------------------------------


def evaluations(run: RunRecords) -> str:
    """A row for each evaluation, a column for each of its values."""
    rows = [r for r in run.records if "loss" not in r]
    skipped = {"step", "tokens", "images", "time"}
    keys = dict.fromkeys(
        key for r in rows for key, value in r.items() if number(value) is not None and key not in skipped
    )
    rows = [r for r in rows if any(number(r.get(key)) is not None for key in keys)]
    if not rows:
        return ""
    chosen = evenly(len(rows), MAX_ROWS)

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"

    body = [[f"{rows[n]['step']:,}", *(cell(number(rows[n].get(key))) for key in keys)] for n in chosen]
    note = f"{len(chosen)} of {len(rows):,} evaluations" if len(chosen) < len(rows) else ""
    return table(["step", *keys], body, note)


def samples(run: RunRecords) -> str:
    """What the model wrote, at some of the evaluations; the newest is open."""
    rows = [r for r in run.records if isinstance(r.get("samples"), list) and r["samples"]]
    found = []
    for place, n in enumerate(chosen := evenly(len(rows), MAX_SAMPLES)):
        texts = "".join(
            f"<pre><b>{escaped(pair[0])}</b>{escaped(pair[1])}</pre>"
            for pair in rows[n]["samples"][:20]
            if isinstance(pair, list) and len(pair) == 2
        )
        is_last = " open" if place == len(chosen) - 1 else ""
        found.append(f"<details{is_last}><summary>Step {rows[n]['step']:,}</summary>{texts}</details>")
    return "".join(reversed(found))


# ---- health ---------------------------------------------------------------------------------------------------------


def warnings(run: RunRecords) -> str:
    found = [(r["step"], r["warning"]) for r in run.health if isinstance(r.get("warning"), str)]
    if not found:
        return ""
    items = "".join(f"<li>step {step:,}: {escaped(text)}</li>" for step, text in found[-MAX_WARNINGS:])
    left = f"<p>The last {MAX_WARNINGS} of {len(found):,} warnings.</p>" if len(found) > MAX_WARNINGS else ""
    return f'{left}<ul class="warnings">{items}</ul>'


def what_if(run: RunRecords) -> str:
    """The operands with the largest errors in the newest samples, and their errors under other schemes."""
    newest: dict[str, dict[str, Any]] = {}
    for sample in linear_samples(run):
        # Other schemes are tried in some samples only: those of the last one that has them.
        tried = {"what_if": newest[sample["linear"]].get("what_if")} if sample["linear"] in newest else {}
        newest[sample["linear"]] = tried | sample
    rows = []
    for linear, sample in newest.items():
        others = sample["what_if"] if isinstance(sample.get("what_if"), dict) else {}
        for tensor in TENSORS:
            if (error := number(lookup(sample, f"{tensor}.error"))) is not None:
                by_scheme = {
                    str(name): value
                    for name, errors in others.items()
                    if isinstance(errors, dict) and (value := _error(errors.get(tensor))) is not None
                }
                rows.append((error, linear, tensor, str(sample.get("scheme") or ""), by_scheme))
    rows = sorted(rows, key=lambda row: -row[0])[:MAX_LINEARS]
    schemes = list(dict.fromkeys(name for *_, by_scheme in rows for name in by_scheme))[:12]

    def cell(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.3g}%"

    body = [
        [f"{linear}, {tensor}", scheme, cell(error), *(cell(by_scheme.get(name)) for name in schemes)]
        for error, linear, tensor, scheme, by_scheme in rows
    ]
    caption = "Largest relative errors of operands in the last sample, and under other schemes"
    return table(["linear, operand", "scheme", "error", *schemes], body, caption) if rows else ""


def _error(measured: Any) -> float | None:
    """A relative error, given alone or among other measures."""
    return number(measured.get("error") if isinstance(measured, dict) else measured)


# ---- memory, settings -----------------------------------------------------------------------------------------------


def memory_plan(run: RunRecords) -> str:
    """The plan's memory by kind, and the peak that was measured, as bars."""
    kinds = planned_memory(run)
    if not kinds:
        return ""
    rows = [(kind, size, "") for kind, size in sorted(kinds.items(), key=lambda item: -item[1])]
    rows.append(("planned in all", sum(kinds.values()), "total"))
    if (measured := run.curve("mem")) is not None:
        rows.append(("measured peak of tensors", float(measured.y.max()) / GIB, "total"))
    most = max(size for _, size, _ in rows) or 1.0
    body = "".join(
        f'<tr class="{style}"><th scope="row">{escaped(kind)}</th><td>{size:.2f} GiB</td>'
        f'<td><span class="bar" style="width:{100 * size / most:.1f}%"></span></td></tr>'
        for kind, size, style in rows
    )
    return f'<table class="bars"><caption>Memory by kind in the plan</caption><tbody>{body}</tbody></table>'


def machine(run: RunRecords) -> str:
    """Model, batch, device and the rest of the plan, and versions."""
    rows: dict[str, list[str]] = {}
    for name, text in run.plan:
        rows.setdefault(name, []).append(text)
    return table([], [(name, "; ".join(texts)) for name, texts in rows.items()], "Plan") if rows else ""


def versions_table(run: RunRecords) -> str:
    found = run.config.get("_versions")
    rows = [(name, shown_value(value)) for name, value in found.items() if value] if isinstance(found, dict) else []
    command = run.config.get("_command")
    line = " ".join(map(str, command)) if isinstance(command, list) else ""
    shown = f"<p>Command</p><pre>{escaped(line)}</pre>" if line else ""
    return shown + (table([], rows, "Versions") if rows else "")


def settings(run: RunRecords) -> str:
    rows = [(key, shown_value(value)) for key, value in run.config.items() if not key.startswith("_")]
    return table([], rows) if rows else ""


def summary_of(name: str, y: np.ndarray) -> str:
    """A curve in words, for those who do not see it."""
    return f"{name}: from {_short(y[0])} to {_short(y[-1])}, lowest {_short(y.min())}, highest {_short(y.max())}"


def _short(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else "none"
