"""The page around charts and tables: one HTML file with BokehJS, styles and data inside, which requests nothing.

A content security policy in the page holds that: a browser refuses every request, whatever the data say.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from qtrain.core.errors import missing_package
from qtrain.train.log.report.charts import Chart, chart_data, modes_of
from qtrain.train.log.report.heatmaps import HeatMap
from qtrain.train.log.report.records import MODES
from qtrain.train.log.report.tables import escaped, section, summary_of

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""Bokeh compiles the code that writes ticks, hence eval."""
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
"""Colors of heat maps, dark to bright; `page.js` interpolates between them."""
RAMP = f"linear-gradient(to right, {', '.join(VIRIDIS)})"


def bokeh_files() -> list[Path]:
    """BokehJS and its API in Bokeh's wheel, which is not imported. UserError where it is not installed."""
    # Only the .js files are needed, so the package is found but not imported.
    found = importlib.util.find_spec("bokeh")
    folder = Path(found.origin).parent / "server/static/js" if found and found.origin else None
    files = [folder / f"{name}.min.js" for name in ("bokeh", "bokeh-api")] if folder else []
    if not files or not all(path.is_file() for path in files):
        raise missing_package("bokeh", "report.html", "'bokeh>=3.9'")
    return files


def page(
    title: str,
    charts: Sequence[Chart],
    *,
    above: str,
    below: str = "",
    heat_maps: Sequence[tuple[HeatMap, str]] = (),
    mode: str = "steps",
    counted: str = "tokens",
    live: str | None = None,
) -> str:
    """The whole file.

    above, below: HTML before and after the charts. heat_maps: each with HTML below it. mode: the x axis to begin with.
    counted: what the runs count, tokens or images.
    live: the version of the data, where the page is served and is to reload when it changes.
    """
    # Heat maps always have steps, even where no curve has anything.
    modes = modes_of(charts) or (["steps"] if heat_maps else [])
    mode = mode if mode in modes else next(iter(modes), "steps")
    curves = "".join(map(_chart, charts))
    tables = "".join(section(heat.key, heat.title, _heat_map(heat), extra) for heat, extra in heat_maps)
    labels = {name: MODES[name] for name in modes} | ({"tokens": counted} if "tokens" in modes else {})
    controls = _controls(labels, mode, charts, live is not None) if modes else ""
    # Only a served page asks for the data's version; a file on disk requests nothing.
    policy = POLICY + ("; connect-src 'self'" if live is not None else "")
    attribute = f' data-live="{escaped(live)}"' if live is not None else ""
    # Without a figure the page needs no BokehJS, and works where Bokeh is not installed.
    library = [path.read_text(encoding="utf-8") for path in bokeh_files()] if modes else []
    return "".join(
        (
            f'<!doctype html><html lang="en"{attribute}><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escaped(title)}</title><style>{_asset('page.css')}</style></head><body>",
            f"<header><h1>{escaped(title)}</h1></header><main>{above}{controls}",
            f'<h2 class="sr">Curves</h2><div class="charts" id="charts">{curves}</div>' if curves else "",
            f"{tables}{below}</main>",
            _data("modes", json.dumps(labels)),
            _data("colors", json.dumps(VIRIDIS)),
            # allow_nan=False: NaN is no JSON, and JSON.parse would fail on the whole page.
            _data("data", json.dumps([chart_data(chart) for chart in charts], allow_nan=False)),
            *(f"<script>{_inside(code)}</script>" for code in [*library, _asset("page.js")]),
            "</body></html>\n",
        )
    )


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _inside(code: str) -> str:
    """JavaScript that cannot end its script element: in strings, where these occur, the backslash changes nothing."""
    return code.replace("</", "<\\/").replace("<!--", "<\\!--")


def _data(key: str, text: str) -> str:
    """JSON for `page.js`, which cannot end its element either."""
    # A "<" can occur in JSON only inside strings, where the escape means the same.
    text = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{key}">{text}</script>'


def _place(name: str) -> str:
    """Where `page.js` puts a figure."""
    return f'<div class="plot" id="plot-{name}"></div>'


# ---- parts ----------------------------------------------------------------------------------------------------------


def _radios(name: str, title: str, choices: Sequence[tuple[str, str]], first: str) -> str:
    checked = {first: " checked"}
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{checked.get(value, "")}> {label}</label>'
        for value, label in choices
    )
    return f"<fieldset><legend>{title}</legend>{inputs}</fieldset>"


def _controls(labels: Mapping[str, str], mode: str, charts: Sequence[Chart], live: bool) -> str:
    parts = [_radios("x", "x axis", list(labels.items()), mode)]
    has_focus, has_log = any(chart.focus for chart in charts), any(chart.is_log for chart in charts)
    if has_focus or has_log:
        choices = [("focus", "main part")] * has_focus + [("linear", "all")] + [("log", "log")] * has_log
        parts.append(_radios("y", "y axis", choices, choices[0][0]))
    parts.append('<button type="button" id="reset">reset zoom</button><button type="button" id="print">print</button>')
    parts.append('<span class="soft" id="live" role="status"></span>' if live else "")
    return f'<form class="controls" aria-label="axes" onsubmit="return false">{"".join(parts)}</form>'


def _chart(chart: Chart) -> str:
    keys = "".join(
        f'<button type="button" aria-pressed="true" data-curve="{chart.key}:{number}">'
        f'<i style="background:{series.color}"></i>{escaped(series.name)}</button>'
        for number, series in enumerate(chart.colored)
        # A band has the color of its line, whose button stands for both in the legend.
        if series.style != "band"
    )
    words = ". ".join(summary_of(s.name, s.curve.y) for s in chart.series if s.style != "band")
    note = f'<span class="note">{escaped(chart.note)}</span>' if chart.note else ""
    places = "".join(_place(f"{chart.key}-{scale}") for scale in ("linear", "log")[: 1 + chart.is_log])
    wide = ' class="wide"' if chart.key == "loss" else ""
    return (
        f'<figure{wide} id="chart-{chart.key}"><figcaption><h3>{escaped(chart.title)}</h3>'
        f'<span class="unit">{escaped(chart.unit)}</span><span class="keys">{keys}</span>{note}'
        f'<span class="sr">{escaped(words)}</span></figcaption>{places}</figure>'
    )


def _options(groups: dict[str, list[tuple[str, str]]]) -> str:
    parts = []
    for group, entries in groups.items():
        inside = "".join(f'<option value="{escaped(value)}">{escaped(label)}</option>' for value, label in entries)
        parts.append(f'<optgroup label="{escaped(group)}">{inside}</optgroup>' if group else inside)
    return "".join(parts)


def _heat_map(heat: HeatMap) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, (group, label, _) in heat.measures.items():
        groups.setdefault(group, []).append((key, label))
    chosen = _options({"": [(name, name) for name in heat.rows]})
    return (
        f'<figure data-heat="{heat.key}"><div class="choices"><label>{heat.first} <select>{chosen}</select></label>'
        f"<label>Measure <select>{_options(groups)}</select></label>"
        f'<span class="ramp"><span class="low"></span><i style="background:{RAMP}"></i>'
        f'<span class="high"></span></span></div><p class="sr about" role="status"></p>'
        f"{_place(f'heat-{heat.key}')}</figure>{_data(f'heat-{heat.key}', json.dumps(heat.data()))}"
    )
