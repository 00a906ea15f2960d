// What the page does beyond BokehJS: the x axis, legends, the theme, heat maps, and reloading while a run goes.
// No request leaves the page, except for the page itself where the report is served.
(function () {
"use strict";
const root = document.documentElement;
const modes = JSON.parse(document.getElementById("modes").textContent);
const colors = JSON.parse(document.getElementById("colors").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const number = (v) => !isFinite(v) ? "–" : v === 0 ? "0" :
  Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5 ? String(+v.toPrecision(3)) : v.toExponential(1);
const store = (key, value) => {
  try {
    if (value === undefined) return sessionStorage.getItem("report " + key);
    sessionStorage.setItem("report " + key, value);
  } catch (error) { /* a browser may forbid it for files */ }
  return null;
};
const LIGHT = {text: "#3c444d", grid: "#3c444d"}, DARK = {text: "#c9d1d9", grid: "#8d98a5"};
let figures = [], heats = [], range = null, ends = {}, ink = LIGHT;

async function start() {
  const document_ = modes.steps && new (Bokeh.require("document").Document)();
  if (document_) {
    range = new Bokeh.Range1d({start: 0, end: 1});
    ink = dark.matches ? DARK : LIGHT;
    figures = JSON.parse(document.getElementById("data").textContent).flatMap(drawChart);
    heats = Array.from(document.querySelectorAll("[data-heat]"), heatMap);
  }
  for (const mode of Object.keys(modes)) ends[mode] = extent(mode);
  // A finger that scrolls the page must not draw a zoom box.
  if (window.matchMedia("(pointer: coarse)").matches)
    for (const plot of figures) plot.toolbar.active_drag = null;
  each("input[name=x]", (input) => {
    if (store("x") === input.value) input.checked = true;
    input.addEventListener("change", () => { store("x", input.value); showMode(input.value); });
  });
  each("input[name=y]", (input) => {
    if (store("y") === input.value) input.checked = true;
    input.addEventListener("change", () => { store("y", input.value); showScale(input.value); });
  });
  each("button[data-curve]", (button) => button.addEventListener("click", () => toggle(button)));
  each("#reset", (button) => button.addEventListener("click", () => showMode(checked("x"))));
  for (const plot of figures) plot.on_event("doubletap", () => showMode(checked("x")));
  dark.addEventListener("change", () => theme(dark.matches));
  window.addEventListener("beforeprint", fitPaper);
  each("#print", (button) => button.addEventListener("click", printPage));
  theme(dark.matches);
  showMode(checked("x"));
  showScale(checked("y"));
  if (document_) await drawAll(document_);
  if (root.dataset.live) setTimeout(poll, 3000);
  root.dataset.ready = "yes";
}

// The figures that a screen shows first are drawn first; then the others, one after the other, while the page answers.
async function drawAll(document_) {
  const places = figures.map((plot) => document.getElementById("plot-" + plot.name));
  for (const plot of figures.slice(0, 4)) document_.add_root(plot);
  await Bokeh.embed.add_document_standalone(document_, document.body, places);
  root.dataset.ready = "first";
  for (const plot of figures.slice(4)) {
    await new Promise((done) => setTimeout(done));
    document_.add_root(plot);
  }
}

const each = (selector, action) => document.querySelectorAll(selector).forEach(action);
const checked = (name) => (document.querySelector(`input[name=${name}]:checked`) || {}).value;
const curves = (plot) => plot.renderers.filter((r) => r.glyph);

// ---- figures ----

const SUFFIX = `for (const [size, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
  if (Math.abs(tick) >= size) return +(tick / size).toPrecision(6) + suffix
return String(+tick.toPrecision(6))`;

// An array from base64: {f4: ...} or {f8: ...}, by its dtype.
function decode(coded) {
  const text = atob(coded.f4 !== undefined ? coded.f4 : coded.f8), bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n); // much faster than a callback for each
  return coded.f4 !== undefined ? new Float32Array(bytes.buffer) : new Float64Array(bytes.buffer);
}

function sourceOf(columns) {
  const data = {};
  for (const [name, coded] of Object.entries(columns)) data[name] = decode(coded);
  return new Bokeh.ColumnDataSource({data});
}

// A figure with the page's axes and tools, whose background is the page's.
function emptyFigure(name, scale, height) {
  const zoom = new Bokeh.BoxZoomTool({dimensions: "width"});
  const plot = Bokeh.Plotting.figure({
    name, height, sizing_mode: "stretch_width", x_range: range, y_axis_type: scale, toolbar_location: null,
    tools: [zoom, new Bokeh.PanTool({dimensions: "width"}), new Bokeh.ResetTool()], active_drag: zoom,
    background_fill_color: null, border_fill_color: null, outline_line_color: null, min_border_left: 58,
    min_border_right: 12,
  });
  for (const axis of plot.axes) axis.setv({
    axis_line_color: null, major_tick_line_color: null, minor_tick_line_color: null,
    major_label_text_font: "system-ui, sans-serif", axis_label_text_font: "system-ui, sans-serif",
    major_label_text_font_size: "12px", axis_label_text_font_size: "12px", axis_label_text_font_style: "normal",
    major_label_text_color: ink.text, axis_label_text_color: ink.text,
  });
  for (const grid of plot.grids) grid.setv({grid_line_color: ink.grid, grid_line_alpha: 0.2});
  plot.xaxes[0].formatter = new Bokeh.CustomJSTickFormatter({code: SUFFIX});
  plot.xaxes[0].ticker.desired_num_ticks = 5;
  return plot;
}

function drawChart(chart) {
  const sources = chart.series.map((s) => [sourceOf(s.data), s.raw && sourceOf(s.raw)]);
  return (chart.log ? ["linear", "log"] : ["linear"]).map((scale) => {
    const plot = emptyFigure(`${chart.key}-${scale}`, scale, 250), [low, high] = chart.range;
    if (scale === "log") plot.setv({y_range: new Bokeh.Range1d({start: low / 1.02, end: high * 1.02}), visible: false});
    else if (chart.focus) plot.y_range = new Bokeh.Range1d({start: chart.focus[0], end: chart.focus[1]});
    plot.tags = [chart];
    if (scale === "linear") plot.yaxes[0].formatter = high >= 1e4
      ? new Bokeh.CustomJSTickFormatter({code: SUFFIX}) : new Bokeh.BasicTickFormatter({power_limit_low: -4});
    const hovered = [];
    chart.series.forEach((s, number) => {
      const name = `${chart.key}:${number}`, [source, raw] = sources[number], x = {field: "steps"}, y = {field: "y"};
      const line = (from, options) => plot.line({x, y, source: from, line_color: s.color, line_width: 1.8, name, ...options});
      const area = (alpha) => plot.varea({x, y1: {field: "lower"}, y2: y, source, fill_color: s.color, fill_alpha: alpha, name});
      if (s.style === "band") return area(0.2);
      if (s.style === "area") area(0.65);
      if (raw) line(raw, {line_width: 1, line_alpha: 0.35});
      const main = line(source, s.style === "dashed" ? {line_dash: "dashed"} : s.style === "area" ? {line_width: 1} : {});
      if (s.style === "points" || source.data.y.length === 1)
        plot.scatter({x, y, source, size: 6, line_color: s.color, fill_color: s.color, name});
      if (s.style !== "dashed") hovered.push([s, main]);
    });
    // Two tooltips stand on both sides of the pointer; more would cover each other, so the nearest curve has one.
    hovered.forEach(([s, main], place) => plot.add_tools(new Bokeh.HoverTool({
      renderers: [main], line_policy: "nearest", mode: hovered.length <= 2 ? "vline" : "mouse",
      attachment: hovered.length <= 2 ? ["left", "right"][place] : "horizontal",
      tooltips: [[s.name, (s.style === "area" ? "@value" : "@y") + s.format],
        ...Object.keys(modes).filter((mode) => mode in s.data).map((mode) => [modes[mode], `@${mode}{0,0.[000]}`])],
    })));
    return plot;
  });
}

// ---- x axis ----

function extent(mode) {
  let low = Infinity, high = -Infinity;
  for (const plot of figures) for (const r of curves(plot)) {
    const x = r.data_source.data[mode] || [];
    if (x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
  }
  for (const heat of heats) if (heat.data.edges[mode]) {
    const edges = heat.data.edges[mode];
    low = Math.min(low, edges[0]); high = Math.max(high, edges[edges.length - 1]);
  }
  if (!(high > low)) { low -= 0.5; high = low + 1; }
  return [low, high];
}

function showMode(mode) {
  if (!mode || !range) return;
  for (const plot of figures) {
    for (const r of curves(plot)) {
      if (r.data_source.data[mode]) r.glyph.x = {field: mode};
    }
    for (const axis of plot.below) if ("axis_label" in axis) axis.axis_label = modes[mode];
  }
  heats.forEach((heat) => heat.show());
  const [low, high] = ends[mode], margin = (high - low) * 0.01;
  range.setv({start: low - margin, end: high + margin});
}

// focus: the main part of charts that have one; linear: all; log: the logarithm of those that have it, all of others.
function showScale(scale) {
  for (const plot of figures) {
    const [chart] = plot.tags;
    if (!chart || !scale) continue; // a heat map
    if (chart.log) plot.visible = plot.name === `${chart.key}-${scale === "log" ? "log" : "linear"}`;
    if (chart.focus && plot.name.endsWith("-linear")) {
      const [low, high] = scale === "focus" ? chart.focus : chart.range;
      plot.y_range.setv({start: low, end: high});
    }
  }
}

function toggle(button) {
  const shown = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(shown));
  for (const plot of figures) for (const r of curves(plot)) if (r.name === button.dataset.curve) r.visible = shown;
}

// ---- theme ----

function theme(isDark) {
  root.dataset.theme = isDark ? "dark" : "light";
  const next = isDark ? DARK : LIGHT;
  if (next === ink) return; // each figure is drawn once
  ink = next;
  for (const plot of figures) {
    for (const axis of plot.axes) axis.setv({major_label_text_color: ink.text, axis_label_text_color: ink.text});
    for (const line of plot.grids) if (line.grid_line_color) line.grid_line_color = ink.grid;
  }
}

// ---- paper ----

const PAPER = 700; // CSS pixels between the margins of A4 and letter

// A browser that prints does not wait for figures to be drawn anew: the ones on the screen are scaled.
function fitPaper() {
  each(".plot", (place) => {
    const width = place.getBoundingClientRect().width;
    if (width) place.style.setProperty("--zoom", PAPER / width);
  });
}

// The button does wait: the page is laid out for paper, with dark ink, before it is printed.
async function printPage() {
  root.classList.add("paper");
  theme(false);
  await new Promise((done) => setTimeout(done, 600));
  window.print();
  root.classList.remove("paper");
  theme(dark.matches);
}

// ---- heat maps ----

function heatMap(element) {
  const key = element.dataset.heat, data = JSON.parse(document.getElementById("heat-" + key).textContent);
  const most = Math.max(...Object.values(data.rows).map((rows) => rows.length));
  const plot = emptyFigure("heat-" + key, "linear", Math.min(Math.max(12 * most + 60, 200), 560));
  plot.y_range = new Bokeh.Range1d({start: 0, end: most});
  for (const grid of plot.grids) grid.grid_line_color = null;
  plot.yaxes[0].setv({ticker: new Bokeh.FixedTicker({ticks: []}), axis_label: data.rowTitle});
  const source = new Bokeh.ColumnDataSource({data: {left: [], right: [], top: [], bottom: [], color: [], value: [], row: []}});
  const field = (name) => ({field: name});
  const cells = plot.quad({
    left: field("left"), right: field("right"), top: field("top"), bottom: field("bottom"), source,
    fill_color: field("color"), line_color: null, name: "cells",
  });
  plot.add_tools(new Bokeh.HoverTool({tooltips: [[data.rowTitle, "@row"], ["value", "@value"], ["from", "@left{0,0.[00]}"]]}));
  figures.push(plot);
  const [first, second] = element.querySelectorAll("select");
  const low = element.querySelector(".low"), high = element.querySelector(".high");
  const label = element.querySelector(".about");
  const heat = {data, show};
  for (const [select, name] of [[first, " row"], [second, " measure"]]) {
    const kept = store(key + name);
    if (kept !== null && Array.from(select.options).some((o) => o.value === kept)) select.value = kept;
    select.addEventListener("change", () => { store(key + name, select.value); show(); });
  }

  function plane() {
    const coded = data.planes[first.value + "|" + second.value];
    if (!coded) return new Float32Array(data.rows[first.value].length * (data.edges.steps.length - 1)).fill(NaN);
    return decode({f4: coded});
  }

  function color(shade) {
    const place = shade * (colors.length - 1), n = Math.min(Math.floor(place), colors.length - 2);
    const part = (hex, i) => parseInt(hex.slice(1 + 2 * i, 3 + 2 * i), 16);
    const mixed = [0, 1, 2].map((i) => Math.round(part(colors[n], i) + (place - n) * (part(colors[n + 1], i) - part(colors[n], i))));
    return `rgb(${mixed})`;
  }

  // Bright is bad. Values that spread over more than a factor of 20 are colored by their logarithm; those that are
  // within a factor of 2 are all dark: their differences are no finding.
  function shades(values, bad) {
    const known = Array.from(values).filter(isFinite);
    const away = bad === "low" ? (v) => 1 - v : bad === "high" ? (v) => v : (v) => Math.abs(v - 1);
    const all = known.map(away), top = all.length ? all.reduce((a, b) => Math.max(a, b)) : 1;
    const positive = all.filter((v) => v > 0);
    const least = positive.length ? Math.max(positive.reduce((a, b) => Math.min(a, b)), top * 1e-5) : top || 1;
    const isLog = top / least > 20, bottom = isLog ? Math.log10(least) : all.length ? all.reduce((a, b) => Math.min(a, b)) : 0;
    const scaled = (v) => isLog ? Math.log10(Math.max(away(v), least)) : away(v);
    const end = isLog ? Math.log10(top) : Math.max(top, 2 * bottom);
    const ordered = known.slice().sort((a, b) => away(a) - away(b));
    low.textContent = ordered.length ? number(ordered[0]) : "no values";
    const worst = isLog || end === top ? ordered[ordered.length - 1] : bad === "low" ? 1 - end : bad === "high" ? end : 1 + end;
    high.textContent = ordered.length ? number(worst) + (isLog ? " (log)" : "") : "";
    return Array.from(values, (v) => isFinite(v) ? (end > bottom ? (scaled(v) - bottom) / (end - bottom) : 0) : NaN);
  }

  function show() {
    const mode = checked("x") || "steps", edges = data.edges[mode] || data.edges.steps;
    const rows = data.rows[first.value], values = plane(), columns = edges.length - 1;
    const shade = shades(values, data.bad[second.value]);
    const cell = {left: [], right: [], top: [], bottom: [], color: [], value: [], row: []};
    for (let y = 0; y < rows.length; y++) for (let x = 0; x < columns; x++) {
      const n = y * columns + x;
      if (!isFinite(values[n])) continue;
      cell.left.push(edges[x]); cell.right.push(edges[x + 1]);
      cell.bottom.push(y); cell.top.push(y + 1);
      cell.color.push(color(shade[n])); cell.value.push(number(values[n])); cell.row.push(rows[y]);
    }
    cells.data_source.data = cell;
    plot.y_range.setv({start: 0, end: rows.length});
    const every = Math.ceil(rows.length / 12), ticks = [], labels = new Map();
    rows.forEach((name, y) => {
      if (y % every === 0 || !/^\d+$/.test(name)) { ticks.push(y + 0.5); labels.set(y + 0.5, name.length > 9 ? name.slice(0, 8) + "…" : name); }
    });
    const axis = plot.yaxes[0];
    axis.ticker.ticks = ticks;
    axis.major_label_overrides = labels;
    label.textContent = high.textContent
      ? `${first.value}: ${rows.length} rows, ${columns} columns, values from ${low.textContent} to ${high.textContent}`
      : `${first.value}: no such value`;
  }
  return heat;
}

// ---- a run that goes on ----

async function poll() {
  try {
    const answer = await fetch("version", {cache: "no-store"});
    const version = await answer.text();
    if (answer.ok && version !== root.dataset.live && !document.hidden) {
      location.reload();
      return;
    }
    document.getElementById("live").textContent = "refreshes while the run goes";
  } catch (error) {
    document.getElementById("live").textContent = "the server has ended; this is the last state";
  }
  setTimeout(poll, 3000);
}

start();
})();
