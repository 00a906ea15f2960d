"""The page around charts and tables: one HTML file with BokehJS, styles and data inside, which requests nothing.

A content security policy in the page holds that: a browser refuses every request, whatever the data say.
"""

import html
import json
from collections.abc import Sequence
from importlib.resources import files

from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.resources import Resources

from qtrain.train.log.report.charts import Chart, draw, empty_figure, modes_of
from qtrain.train.log.report.heatmaps import HeatMap
from qtrain.train.log.report.records import MODES
from qtrain.train.log.report.tables import escaped, section, summary_of

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""Bokeh compiles its templates of tooltips, hence eval."""
RAMP = f"linear-gradient(to right, {', '.join(Viridis256[::51])})"


def page(
    title: str,
    charts: Sequence[Chart],
    *,
    above: str,
    below: str = "",
    heat_maps: Sequence[tuple[HeatMap, str]] = (),
    mode: str = "steps",
    live: str | None = None,
) -> str:
    """The whole file.

    above, below: HTML before and after the charts. heat_maps: each with HTML below it. mode: the x axis to begin with.
    live: the version of the data, where the page is served and is to reload when it changes.
    """
    modes = modes_of(charts) or (["steps"] if heat_maps else [])
    mode = mode if mode in modes else next(iter(modes), "steps")
    x_range = Range1d(0, 1)  # set by page.js, which knows the extent in each unit
    drawn = {chart.key: draw(chart, mode, x_range) for chart in charts}
    maps = {heat.key: heat_figure(heat, x_range) for heat, _ in heat_maps}
    models = [*(plot for plots in drawn.values() for plot in plots), *maps.values()]
    curves = "".join(_chart(chart, drawn[chart.key]) for chart in charts)
    tables = "".join(
        section(heat.key, heat.title, _heat_map(heat, _place(maps[heat.key])), extra) for heat, extra in heat_maps
    )
    loss = next((chart for chart in charts if chart.key == "loss"), None)
    controls = _controls(modes, mode, loss, live is not None) if models else ""
    policy = POLICY + ("; connect-src 'self'" if live is not None else "")
    attribute = f' data-live="{escaped(live)}"' if live is not None else ""
    library = Resources("inline", log_level="warn", components=["bokeh"]).js_raw if models else []
    return "".join(
        (
            f'<!doctype html><html lang="en"{attribute}><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escaped(title)}</title><style>{_asset('page.css')}</style></head><body>",
            f"<header><h1>{escaped(title)}</h1></header><main>{above}{controls}",
            f'<h2 class="sr">Curves</h2><div class="charts" id="charts">{curves}</div>' if curves else "",
            f"{tables}{below}</main>",
            _data("modes", json.dumps({name: MODES[name] for name in modes})),
            _data("figures", _document(models)) if models else "",
            *(f"<script>{_inside(code)}</script>" for code in [*library, _asset("page.js")]),
            "</body></html>\n",
        )
    )


def _asset(name: str) -> str:
    return files("qtrain.train.log.report").joinpath(name).read_text(encoding="utf-8")


def _inside(code: str) -> str:
    """JavaScript that cannot end its script element: in strings, where these occur, the backslash changes nothing."""
    return code.replace("</", "<\\/").replace("<!--", "<\\!--")


def _data(key: str, text: str) -> str:
    """JSON for `page.js`, which cannot end its element either."""
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{key}">{text}</script>'


def _document(models: Sequence[figure]) -> str:
    """The figures as Bokeh's JSON, with their data."""
    document = Document()
    with document.models.freeze():  # each addition alone would walk through all figures, which share a range
        for plot in models:
            document.add_root(plot)
    return serialize_json(document.to_json(deferred=False))


def _place(plot: figure) -> str:
    """Where `page.js` puts a figure."""
    return f'<div class="plot" id="plot-{plot.name}"></div>'


# ---- parts ----------------------------------------------------------------------------------------------------------


def _radios(name: str, title: str, choices: Sequence[tuple[str, str]], first: str) -> str:
    checked = {first: " checked"}
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{checked.get(value, "")}> {label}</label>'
        for value, label in choices
    )
    return f"<fieldset><legend>{title}</legend>{inputs}</fieldset>"


def _controls(modes: Sequence[str], mode: str, loss: Chart | None, live: bool) -> str:
    parts = [_radios("x", "x axis", [(name, MODES[name]) for name in modes], mode)]
    if loss is not None:
        choices = [("focus", "main part")] * (loss.focus is not None) + [("linear", "all"), ("log", "log")]
        parts.append(_radios("loss", "loss", choices, choices[0][0]))
    parts.append('<button type="button" id="reset">reset zoom</button><button type="button" id="print">print</button>')
    parts.append('<span class="soft" id="live" role="status"></span>' if live else "")
    return f'<form class="controls" aria-label="axes" onsubmit="return false">{"".join(parts)}</form>'


def _chart(chart: Chart, plots: Sequence[figure]) -> str:
    keys = "".join(
        f'<button type="button" aria-pressed="true" data-curve="{chart.key}:{number}">'
        f'<i style="background:{series.color}"></i>{escaped(series.name)}</button>'
        for number, series in enumerate(chart.colored)
        if series.style != "band"
    )
    words = ". ".join(summary_of(s.name, s.curve.y) for s in chart.series if s.style != "band")
    note = f'<span class="note">{escaped(chart.note)}</span>' if chart.note else ""
    wide = ' class="wide"' if chart.key == "loss" else ""
    return (
        f'<figure{wide} id="chart-{chart.key}"><figcaption><h3>{escaped(chart.title)}</h3>'
        f'<span class="unit">{escaped(chart.unit)}</span><span class="keys">{keys}</span>{note}'
        f'<span class="sr">{escaped(words)}</span></figcaption>{"".join(map(_place, plots))}</figure>'
    )


def heat_figure(heat: HeatMap, x_range: Range1d) -> figure:
    """An empty figure that `page.js` fills with cells."""
    rows = max(map(len, heat.rows.values()))
    plot = empty_figure(f"heat-{heat.key}", x_range, height=min(max(12 * rows + 60, 200), 560))
    plot.y_range = Range1d(0, rows)
    plot.grid.grid_line_color = None
    plot.yaxis.ticker = FixedTicker(ticks=[])
    plot.yaxis.axis_label = heat.row_title
    empty = ColumnDataSource({name: [] for name in ("left", "right", "top", "bottom", "shade", "value", "row")})
    color = {"field": "shade", "transform": LinearColorMapper(palette=list(Viridis256), low=0, high=1)}
    plot.quad("left", "right", "top", "bottom", source=empty, fill_color=color, line_color=None, name="cells")
    tips = [(heat.row_title, "@row"), ("value", "@value"), ("from", "@left{0,0.[00]}")]
    plot.add_tools(HoverTool(tooltips=tips))
    return plot


def _options(groups: dict[str, list[tuple[str, str]]]) -> str:
    parts = []
    for group, entries in groups.items():
        inside = "".join(f'<option value="{escaped(value)}">{escaped(label)}</option>' for value, label in entries)
        parts.append(f'<optgroup label="{escaped(group)}">{inside}</optgroup>' if group else inside)
    return "".join(parts)


def _heat_map(heat: HeatMap, div: str) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, (group, label, _) in heat.measures.items():
        groups.setdefault(group, []).append((key, label))
    chosen = _options({"": [(name, name) for name in heat.rows]})
    return (
        f'<figure data-heat="{heat.key}"><div class="choices"><label>{heat.first} <select>{chosen}</select></label>'
        f"<label>Measure <select>{_options(groups)}</select></label>"
        f'<span class="ramp"><span class="low"></span><i style="background:{RAMP}"></i>'
        f'<span class="high"></span></span></div><p class="sr about" role="status"></p>{div}</figure>'
        f"{_data(f'heat-{heat.key}', json.dumps(heat.data()))}"
    )


def plain(text: str) -> str:
    """A paragraph."""
    return f"<p>{html.escape(text)}</p>"
