// What the page does beyond BokehJS: the x axis, legends, the theme, heat maps, and reloading while a run goes.
// No request leaves the page, except for the page itself where the report is served.
(function () {
"use strict";
const root = document.documentElement;
const modes = JSON.parse(document.getElementById("modes").textContent);
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
let figures = [], heats = [], range = null, ends = {};

async function start() {
  // A document whose figures are set up before the first one is drawn: each is drawn once.
  const data = document.getElementById("figures");
  const bokeh = data && Bokeh.require("document").Document.from_json(JSON.parse(data.textContent));
  figures = bokeh ? bokeh.roots() : [];
  heats = Array.from(document.querySelectorAll("[data-heat]"), heatMap);
  range = figures.length ? figures[0].x_range : null;
  for (const mode of Object.keys(modes)) ends[mode] = extent(mode);
  // A finger that scrolls the page must not draw a zoom box.
  if (window.matchMedia("(pointer: coarse)").matches)
    for (const plot of figures) plot.toolbar.active_drag = null;
  each("input[name=x]", (input) => {
    if (store("x") === input.value) input.checked = true;
    input.addEventListener("change", () => { store("x", input.value); showMode(input.value); });
  });
  each("input[name=loss]", (input) => {
    if (store("loss") === input.value) input.checked = true;
    input.addEventListener("change", () => { store("loss", input.value); showLoss(input.value); });
  });
  each("button[data-curve]", (button) => button.addEventListener("click", () => toggle(button)));
  each("#reset", (button) => button.addEventListener("click", () => showMode(checked("x"))));
  for (const plot of figures) plot.on_event("doubletap", () => showMode(checked("x")));
  dark.addEventListener("change", () => theme(dark.matches));
  window.addEventListener("beforeprint", fitPaper);
  each("#print", (button) => button.addEventListener("click", printPage));
  theme(dark.matches);
  showMode(checked("x"));
  showLoss(checked("loss"));
  const places = figures.map((plot) => document.getElementById("plot-" + plot.name));
  if (bokeh) await Bokeh.embed.add_document_standalone(bokeh, document.body, places);
  if (root.dataset.live) setTimeout(poll, 3000);
  root.dataset.ready = "yes";
}

const each = (selector, action) => document.querySelectorAll(selector).forEach(action);
const checked = (name) => (document.querySelector(`input[name=${name}]:checked`) || {}).value;
const curves = (plot) => plot.renderers.filter((r) => r.glyph);

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

function showLoss(scale) {
  for (const plot of figures) {
    const found = /^loss-(linear|log)$/.exec(plot.name || "");
    if (!found || !scale) continue;
    plot.visible = (scale === "log") === (found[1] === "log");
    if (found[1] === "linear" && plot.tags.length) {
      const [focus, all] = plot.tags;
      const [low, high] = scale === "focus" ? focus : all;
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
  const ink = isDark ? "#c9d1d9" : "#3c444d", grid = isDark ? "#8d98a5" : "#3c444d";
  for (const plot of figures) {
    for (const axis of [...plot.below, ...plot.left]) if ("major_label_text_color" in axis)
      axis.setv({major_label_text_color: ink, axis_label_text_color: ink});
    for (const line of plot.center) if (line.grid_line_color) line.grid_line_color = grid;
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
  const plot = figures.find((f) => f.name === "heat-" + key), cells = curves(plot)[0];
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
    const text = atob(coded);
    return new Float32Array(Uint8Array.from(text, (c) => c.charCodeAt(0)).buffer);
  }

  // Bright is bad. Values that spread over more than a factor of 20 are colored by their logarithm.
  function shades(values, bad) {
    const known = Array.from(values).filter(isFinite);
    const away = bad === "low" ? (v) => 1 - v : bad === "high" ? (v) => v : (v) => Math.abs(v - 1);
    const all = known.map(away), top = all.length ? all.reduce((a, b) => Math.max(a, b)) : 1;
    const positive = all.filter((v) => v > 0);
    const least = positive.length ? Math.max(positive.reduce((a, b) => Math.min(a, b)), top * 1e-5) : top || 1;
    const isLog = top / least > 20, bottom = isLog ? Math.log10(least) : all.length ? all.reduce((a, b) => Math.min(a, b)) : 0;
    const scaled = (v) => isLog ? Math.log10(Math.max(away(v), least)) : away(v);
    const end = isLog ? Math.log10(top) : top;
    const ordered = known.slice().sort((a, b) => away(a) - away(b));
    low.textContent = ordered.length ? number(ordered[0]) : "no values";
    high.textContent = ordered.length ? number(ordered[ordered.length - 1]) + (isLog ? " (log)" : "") : "";
    return Array.from(values, (v) => isFinite(v) ? (end > bottom ? (scaled(v) - bottom) / (end - bottom) : 0) : NaN);
  }

  function show() {
    const mode = checked("x") || "steps", edges = data.edges[mode] || data.edges.steps;
    const rows = data.rows[first.value], values = plane(), columns = edges.length - 1;
    const shade = shades(values, data.bad[second.value]);
    const cell = {left: [], right: [], top: [], bottom: [], shade: [], value: [], row: []};
    for (let y = 0; y < rows.length; y++) for (let x = 0; x < columns; x++) {
      const n = y * columns + x;
      if (!isFinite(values[n])) continue;
      cell.left.push(edges[x]); cell.right.push(edges[x + 1]);
      cell.bottom.push(y); cell.top.push(y + 1);
      cell.shade.push(shade[n]); cell.value.push(number(values[n])); cell.row.push(rows[y]);
    }
    cells.data_source.data = cell;
    plot.y_range.setv({start: 0, end: rows.length});
    const every = Math.ceil(rows.length / 12), ticks = [], labels = new Map();
    rows.forEach((name, y) => {
      if (y % every === 0 || !/^\d+$/.test(name)) { ticks.push(y + 0.5); labels.set(y + 0.5, name.length > 9 ? name.slice(0, 8) + "…" : name); }
    });
    const axis = plot.left[0];
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
