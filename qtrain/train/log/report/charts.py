"""Charts as data, and as figures of Bokeh. All figures of a page share one x range, so a zoom in one is a zoom in all.

Captions, legends and everything else in words are HTML (`page.py`): they wrap at any width, are read by a screen
reader, and text of a user never reaches a canvas. Colors of axes follow the page's theme by `report.js`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    CustomJSTickFormatter,
    HoverTool,
    LogTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
)
from bokeh.plotting import figure

from qtrain.train.log.report.records import MODES, Curve
from qtrain.train.log.report.series import smoothed, thinned

PALETTE = ("#3478d4", "#d9652b", "#2a935a", "#9a5bc9", "#c43a5e", "#a87f10", "#138f93", "#85664f")
"""Colors of curves, each visible on white and on black; they repeat after eight."""
SUFFIX = """
for (const [size, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
  if (Math.abs(tick) >= size) return +(tick / size).toPrecision(6) + suffix
return String(+tick.toPrecision(6))
"""
"""Ticks as 1.5k, 20M, 1B, as tokens are counted; Bokeh's own suffixes are small letters."""
Style = Literal["line", "smoothed", "points", "dashed", "area", "band"]
HEIGHT = 250
INK = "#3c444d"
"""Of axes, on white; `page.js` replaces it where the theme is dark."""


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
    def colored(self) -> list[Series]:
        """The series with their colors."""
        free = iter(PALETTE * (len(self.series) // len(PALETTE) + 1))
        return [s if s.color else replace(s, color=next(free)) for s in self.series]


def modes_of(charts: Sequence[Chart]) -> list[str]:
    """The x columns that every curve of the charts has."""
    curves = [series.curve for chart in charts for series in chart.series]
    return [mode for mode in MODES if curves and all(mode in curve.x for curve in curves)]


def draw(chart: Chart, mode: str, x_range: Range1d) -> list[figure]:
    """The figures of a chart: one, and with `log` a second one, which is hidden at first."""
    sources: dict[str, ColumnDataSource] = {}
    figures = [_figure(chart, mode, x_range, sources, "linear")]
    if chart.log and all((s.curve.y > 0).all() for s in chart.series):
        figures.append(_figure(chart, mode, x_range, sources, "log"))
        figures[1].visible = False
    return figures


def _figure(
    chart: Chart, mode: str, x_range: Range1d, sources: dict[str, ColumnDataSource], scale: Literal["linear", "log"]
) -> figure:
    plot = empty_figure(f"{chart.key}-{scale}", x_range, scale)
    ends = [(float(s.curve.y.min()), float(s.curve.y.max())) for s in chart.series]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    if scale == "linear" and high >= 1e4:
        plot.yaxis.formatter = CustomJSTickFormatter(code=SUFFIX)
    if scale == "log":
        plot.y_range = Range1d(low / 1.02, high * 1.02)
    elif chart.focus:
        plot.y_range = Range1d(*chart.focus)
        plot.tags = [list(chart.focus), [low, high]]  # for page.js, which goes from one to the other
    hovered = []
    below: np.ndarray | None = None
    for number, series in enumerate(chart.colored):
        curve, name = series.curve, f"{chart.key}:{number}"
        if series.style == "area":
            # Stacked areas have the same x, so they are not thinned apart from each other.
            top = curve.y if below is None else below + curve.y
            source = sources.setdefault(name, _source(Curve(curve.x, top), 0 if below is None else below, curve.y))
            plot.varea(mode, "lower", "y", source=source, fill_color=series.color, fill_alpha=0.65, name=name)
            line = plot.line(mode, "y", source=source, line_color=series.color, name=name)
            below = top
            hovered.append((series, line, "@value{0,0.[000]}"))
            continue
        if series.style == "band":
            source = sources.setdefault(name, _source(curve, series.lower))
            plot.varea(mode, "lower", "y", source=source, fill_color=series.color, fill_alpha=0.2, name=name)
            continue
        if series.style == "smoothed":
            raw = sources.setdefault(f"{name} raw", _source(thinned(curve)))
            plot.line(mode, "y", source=raw, line_color=series.color, line_alpha=0.35, name=name)
            curve = smoothed(curve)
        source = sources.setdefault(name, _source(thinned(curve)))
        dash = "dashed" if series.style == "dashed" else "solid"
        line = plot.line(mode, "y", source=source, line_color=series.color, line_width=1.8, line_dash=dash, name=name)
        if series.style == "points" or len(curve) == 1:
            plot.scatter(mode, "y", source=source, size=6, color=series.color, name=name)
        if series.style != "dashed":
            hovered.append((series, line, _value_format(curve)))
    # Two tooltips stand on both sides of the pointer; more would cover each other, so the nearest curve has one.
    mode_of_hover, sides = (
        ("vline", ["left", "right"]) if len(hovered) <= 2 else ("mouse", ["horizontal"] * len(hovered))
    )
    for (series, line, text), side in zip(hovered, sides, strict=False):
        tips = [(series.name, text), *((MODES[m], f"@{m}{{0,0.[000]}}") for m in series.curve.x)]
        tool = HoverTool(renderers=[line], tooltips=tips, mode=mode_of_hover, line_policy="nearest", attachment=side)
        plot.add_tools(tool)
    return plot


def _value_format(curve: Curve) -> str:
    """How a tooltip writes y; Bokeh's own way writes small values with an exponent."""
    most = np.abs(curve.y).max()
    return "@y" if most < 0.01 else "@y{0,0.[00000]}" if most < 100 else "@y{0,0.[00]}"


def _source(curve: Curve, lower: np.ndarray | float | None = None, value: np.ndarray | None = None) -> ColumnDataSource:
    # 32 bits are more than a screen has; steps are whole numbers.
    data = {mode: column if mode == "steps" else _float32(column) for mode, column in curve.x.items()}
    data["y"] = _float32(curve.y)
    if lower is not None:
        data["lower"] = _float32(np.broadcast_to(np.asarray(lower, np.float64), curve.y.shape))
    if value is not None:
        data["value"] = _float32(value)
    return ColumnDataSource(data)


def _float32(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -3e38, 3e38).astype(np.float32)


def empty_figure(name: str, x_range: Range1d, scale: str = "linear", height: int = HEIGHT) -> figure:
    """A figure with the page's axes and tools, whose background is the page's."""
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        x_range=x_range,
        y_axis_type=scale,
        tools=[zoom := BoxZoomTool(dimensions="width"), PanTool(dimensions="width"), ResetTool()],
        active_drag=zoom,
        toolbar_location=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=58,
        min_border_right=12,
        lod_threshold=None,
    )
    plot.xaxis.formatter = CustomJSTickFormatter(code=SUFFIX)
    plot.yaxis.formatter = LogTickFormatter() if scale == "log" else BasicTickFormatter(power_limit_low=-4)
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.grid.grid_line_color, plot.grid.grid_line_alpha = INK, 0.2
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.major_label_text_font = axis.axis_label_text_font = "system-ui, sans-serif"
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.major_label_text_color = axis.axis_label_text_color = INK
    return plot
