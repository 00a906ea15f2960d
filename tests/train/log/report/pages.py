"""Run folders by hand, and a reader of pages that refuses what a page must not hold."""

import html.parser
import json
from pathlib import Path
from typing import Any

from qtrain.train.log.report.write import write_report

NASTY = '</pre></script><!--<script>alert("x")</script>&amp; \'"'
VOID = {"meta", "link", "input", "br"}
LIBRARY = 1_268_134
"""Bytes of BokehJS, about, which every page with a chart holds."""


class Page(html.parser.HTMLParser):
    """Tags that match, no link to elsewhere, and no handler or script beyond the page's own."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text, self.data = "", {}
        self.scripts = 0
        self._json: str | None = None
        self.feed(text)
        assert not self.open and self.scripts <= 3, "BokehJS, its API and page.js"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        attributes = dict(attrs)
        for name in ("src", "href", "data", "action"):
            assert attributes.get(name) in (None, "data:,"), attributes
        if tag == "script":
            self._json = attributes.get("id") if attributes.get("type") == "application/json" else None
            self.scripts += self._json is None
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._json = None

    def handle_data(self, data: str) -> None:
        if "script" in self.open:
            if self._json:
                self.data[self._json] = json.loads(data)
        elif "style" not in self.open:
            self.text += data

    @property
    def charts(self) -> list[str]:
        """Names of the figures."""
        found = []
        for chart in self.data["data"]:
            found += [f"{chart['key']}-linear"] + [f"{chart['key']}-log"] * chart["log"]
        return found + [key for key in self.data if key.startswith("heat-")]


def write_run(folder: Path, records: list[Any], config: dict | None = None, health: list[Any] = ()) -> Path:
    folder.mkdir(parents=True)
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if health:
        (folder / "health.jsonl").write_text("".join(json.dumps(record) + "\n" for record in health))
    return folder


def page_of(folder: Path, failure: str | None = None) -> Page:
    path = write_report(folder, failure)
    assert path == folder / "report.html"
    return Page(path.read_text())


def records(steps: int) -> list[dict]:
    """A run whose lowest validation loss is at step 20."""
    found = []
    for step in range(1, steps + 1):
        found.append(
            {"step": step, "loss": 1 + 4 / step, "lr": 1e-3, "grad_norm": 1.0 + step % 3, "tok_s": 1000.0}
            | {"tokens": step * 2000, "mem": step * 2**20, "sol": 0.4, "time": 1e9 + 2 * step}
        )
        if step % 10 == 0:
            found.append({"step": step, "eval_loss": 2 + abs(step - 20) / 100, "samples": [[NASTY, "text " + NASTY]]})
    return found


def health(steps: list[int], layers: int = 3) -> list[dict]:
    """Samples of two linears a layer; that of down_proj in layer 1 saturates."""
    found = []
    for step in steps:
        for layer in range(layers):
            for kind in ("attn.qkv", "mlp.down_proj"):
                outlier = layer == 1 and kind == "mlp.down_proj"
                x = {"saturated": 0.041 if outlier else 0.0, "error": 0.2 if outlier else 0.03}
                found.append(
                    {"step": step, "linear": f"layers.{layer}.{kind}", "scheme": "fp8_tensorwise", "x": x}
                    | {"gradient": {"cosine": 0.9 if outlier else 0.999, "norm_ratio": 1.01}}
                    | {"what_if": {"fp8_rowwise": {"x": 0.025}}}
                )
    return found
