"""docs/images/overview.svg: speed, loss and memory beside other tools, from the figures in docs/results/.

python -m benchmarks.picture      # draw it again

Plain SVG without a drawing library, so the same figures give the same file, which a test compares. The picture has its
own background, which follows the reader's dark or light setting.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PICTURE = ROOT / "docs" / "images" / "overview.svg"

WIDTH, PANEL, LABEL, BAR = 960, 320, 132, 110
"""Pixels: the picture, one of its panels, the labels left of the bars, and the longest bar."""
ROW, TOP = 22, 58

STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .quiet { fill: #59636e } .line { stroke: #59636e }
  .peer { fill: #a8b1bb } .ours { fill: #1a7f64 }
  text { font: 12px system-ui, sans-serif } .title { font-weight: 600; font-size: 14px }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d } .text { fill: #e6edf3 } .quiet { fill: #9198a1 } .line { stroke: #9198a1 }
    .peer { fill: #58616b } .ours { fill: #3fb68b }
  }
"""


@dataclass(frozen=True)
class Bar:
    """A value with its label. ours: drawn in the color of this package."""

    label: str
    value: float
    shown: str
    ours: bool


def cells(topic: str, row: str, table: int = 0) -> dict[str, dict]:
    """Column -> cell of a row in docs/results/."""
    rows = json.loads((RESULTS / f"{topic}.json").read_text())["tables"][table]["rows"]
    return next(found["cells"] for found in rows if found["name"] == row)


def number(cell: dict) -> float:
    """A cell's figure, of its text where it has one: that is what the table shows."""
    return float(cell["text"].replace(",", "")) if cell.get("text") else cell["value"]


def speed() -> list[Bar]:
    """Tokens a second of Qwen2.5-1.5B and 0.5B."""
    bars = []
    for model in ("1.5B", "0.5B"):
        row = cells("train_steps", f"Qwen2.5-{model}")
        for column, name, ours in (
            ("transformers + compile, bf16", "transformers", False),
            ("transformers + torchao float8", "torchao fp8", False),
            ("`bf16`", "qtrain bf16", True),
            ("`int8`", "qtrain int8", True),
            ("`fp8_tensorwise` delayed", "qtrain fp8", True),
        ):
            value = number(row[column]) / number(row["transformers + compile, bf16"])
            bars.append(Bar(f"{model} {name}", value, f"{value:.2f}x", ours))
    return bars


def loss() -> list[Bar]:
    """Validation loss over bf16 after 300 M tokens, in nats."""
    tables = json.loads((RESULTS / "learning.json").read_text())["tables"]
    rows = next(table for table in tables if table["title"].startswith("Validation loss over bf16"))["rows"]
    found = [(row["name"], number(row["cells"]["difference"])) for row in rows if row["cells"].get("difference")]
    return [Bar(name, max(value, 0.0), f"{value:+.4f}", True) for name, value in found]


def memory() -> list[Bar]:
    """Peak GiB of fine-tuning Qwen2.5-1.5B's shape."""
    chosen = (
        ("full, transformers, compiled by layers", "full, transformers", False),
        ("full, qtrain `fp8_tensorwise` delayed", "full, qtrain fp8", True),
        ("LoRA on NF4, PEFT + bitsandbytes, compiled by layers", "QLoRA, PEFT", False),
        ("LoRA on NF4, qtrain", "QLoRA, qtrain", True),
        ("LoRA on NF4, qtrain, products in FP8 (`--quantize fp8_rowwise`)", "the same in FP8", True),
    )
    values = [(name, number(cells("finetuning", row)["peak GiB"]), ours) for row, name, ours in chosen]
    return [Bar(name, value, f"{value:.1f}", ours) for name, value, ours in values]


def panel(left: int, title: str, below: str, bars: Sequence[Bar], mark: float | None = None) -> list[str]:
    """Horizontal bars below a title. mark: a value at which a line is drawn."""
    longest = max([bar.value for bar in bars] + ([mark * 1.15] if mark else []))
    out = [
        f'<text class="text title" x="{left + 16}" y="26">{title}</text>',
        f'<text class="quiet" x="{left + 16}" y="44">{below}</text>',
    ]
    start = left + LABEL + 8
    mark_at = round(BAR * mark / longest) if mark else 0
    for i, bar in enumerate(bars):
        y = TOP + i * ROW
        length = max(round(BAR * bar.value / longest), 1)
        out += [
            f'<text class="text" x="{left + LABEL}" y="{y + 12}" text-anchor="end">{bar.label}</text>',
            f'<rect class="{"ours" if bar.ours else "peer"}" x="{start}" y="{y}" width="{length}" height="15" rx="2"/>',
            f'<text class="text" x="{start + max(length, mark_at) + 5}" y="{y + 12}">{bar.shown}</text>',
        ]
    if mark:
        x, end = start + mark_at, TOP + len(bars) * ROW
        out += [
            f'<path class="line" stroke-dasharray="3 3" d="M{x} {TOP - 4}V{end}"/>',
            f'<text class="quiet" x="{x}" y="{end + 14}" text-anchor="middle">{mark} counts as lossless</text>',
        ]
    return out


def drawn() -> str:
    """The picture."""
    panels = [
        ("Training speed", "over transformers + compile, one H200", speed(), None),
        ("Validation loss over bf16", "nats, 97.5 M parameters, 300 M tokens", loss(), 0.01),
        ("Memory to fine-tune", "peak GiB, Qwen2.5-1.5B, one H200", memory(), None),
    ]
    height = TOP + max(len(bars) + (mark is not None) for _, _, bars, mark in panels) * ROW + 14
    body = [line for i, parts in enumerate(panels) for line in panel(i * PANEL, *parts)]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def main() -> None:
    PICTURE.write_text(drawn())


if __name__ == "__main__":
    main()
