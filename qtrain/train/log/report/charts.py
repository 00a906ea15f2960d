"""Charts as data, which `page.js` draws with BokehJS. All figures of a page share one x range, so a zoom in one is a
zoom in all.

Captions, legends and everything else in words are HTML (`page.py`): they wrap at any width, are read by a screen
reader, and text of a user never reaches a canvas. Bokeh's own Python models are not used: they would take a second to
make, at the end of every run, what the browser makes in a moment.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from qtrain.train.log.report.records import MODES, Curve
from qtrain.train.log.report.series import smoothed, thinned

PALETTE = ("#3478d4", "#d9652b", "#2a935a", "#9a5bc9", "#c43a5e", "#a87f10", "#138f93", "#85664f")
"""Colors of curves, each visible on white and on black; they repeat after eight."""
SMOOTHED_POINTS = 400
"""Of a curve that has no spikes left."""
Style = Literal["line", "smoothed", "points", "dashed", "area", "band"]


@dataclass(frozen=True)
class Series:
    """A curve of a chart."""

    name: str
    curve: Curve
    style: Style = "line"
    """smoothed: a mean over some steps, before the raw values in a lighter line; points: a line with its points; area:
    stacked on the areas before it; band: between `lower` and the curve."""
    color: str | None = None
    """None: the next of PALETTE."""
    lower: np.ndarray | None = None
    """Of a band, [n]."""


@dataclass(frozen=True)
class Chart:
    """Curves with a common y axis."""

    key: str
    """Names the chart in the page; letters and hyphens."""
    title: str
    unit: str
    series: Sequence[Series] = field(default_factory=tuple)
    note: str = ""
    log: bool = False
    """Whether a second figure shows it with a logarithmic y axis."""
    focus: tuple[float, float] | None = None
    """The y range to begin with; None: all."""

    @property
    def is_log(self) -> bool:
        """Whether it has the second figure, which takes positive values only."""
        # A value at or below 0 has no logarithm: the second figure is left out.
        return self.log and all(bool((series.curve.y > 0).all()) for series in self.series)

    @property
    def colored(self) -> list[Series]:
        """The series with their colors."""
        # Colors that are given do not use up the palette.
        free = iter(PALETTE * (len(self.series) // len(PALETTE) + 1))
        return [s if s.color else replace(s, color=next(free)) for s in self.series]


def modes_of(charts: Sequence[Chart]) -> list[str]:
    """The x columns that every curve of the charts has."""
    curves = [series.curve for chart in charts for series in chart.series]
    return [mode for mode in MODES if curves and all(mode in curve.x for curve in curves)]


def chart_data(chart: Chart) -> dict[str, Any]:
    """What `page.js` draws, as JSON: curves thinned, areas stacked."""
    low = min(float(series.curve.y.min()) for series in chart.series)
    high = max(float(series.curve.y.max()) for series in chart.series)
    found = []
    # Upper edge of the areas stacked so far, [n].
    below: np.ndarray | None = None
    for series in chart.colored:
        curve = series.curve
        entry: dict[str, Any] = {"name": series.name, "color": series.color, "style": series.style}
        entry["format"] = _value_format(curve)
        if series.style == "area":
            # Stacked areas have the same x, so they are not thinned apart from each other.
            top = curve.y if below is None else below + curve.y
            bottom = np.zeros(len(curve)) if below is None else below
            entry["data"] = _columns(Curve(curve.x, top)) | {"lower": _coded(bottom), "value": _coded(curve.y)}
            below, high = top, max(high, float(top.max()))
        elif series.style == "band" and series.lower is not None:
            # Not thinned: `lower` would need the same indices.
            entry["data"] = _columns(curve) | {"lower": _coded(series.lower)}
        elif series.style == "smoothed":
            entry["raw"] = _columns(thinned(curve))
            # Smoothed before thinning: extremes of the raw curve alone would bias the mean.
            entry["data"] = _columns(thinned(smoothed(curve), SMOOTHED_POINTS))
        else:
            entry["data"] = _columns(thinned(curve))
        found.append(entry)
    return {"key": chart.key, "log": chart.is_log, "focus": chart.focus, "range": [low, high], "series": found}


def _value_format(curve: Curve) -> str:
    """How a tooltip writes y; "" is Bokeh's own way, which writes small values with an exponent."""
    most = np.abs(curve.y).max()
    return "" if most < 0.01 else "{0,0.[00000]}" if most < 100 else "{0,0.[00]}"


def _columns(curve: Curve) -> dict[str, Mapping[str, str]]:
    # 32 bits are more than a screen has; steps are whole numbers.
    columns = {mode: _coded(column, "f8" if mode == "steps" else "f4") for mode, column in curve.x.items()}
    return columns | {"y": _coded(curve.y)}


def _coded(values: np.ndarray, dtype: str = "f4") -> Mapping[str, str]:
    """An array as base64 of little-endian floats."""
    # fp32 ends at 3.4e38: clipped, a huge value stays finite and so drawable.
    return {dtype: base64.b64encode(np.clip(values, -3e38, 3e38).astype(f"<{dtype}").tobytes()).decode()}
