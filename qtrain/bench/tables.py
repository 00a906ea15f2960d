"""Tables of measurements as markdown, JSON and bar charts.

A cell has a figure or the reason why there is none; reasons become footnotes.
"""

import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrain.core.config import as_dict, versions
from qtrain.core.errors import UserError, missing_package, os_errors
from qtrain.train.log.status import three_digits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cell:
    """A figure in the table's unit, or the reason why there is none. text: what is shown instead of its digits;
    details: further entries in the JSON file."""

    value: float | None = None
    reason: str | None = None
    text: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def shown(self) -> str:
        return self.text or ("" if self.value is None else three_digits(self.value))


@dataclass
class Table:
    """Rows by name, each with one cell per column."""

    title: str
    unit: str
    columns: Sequence[str]
    notes: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)
    measured: bool = True
    """Whether figures are of something that ran; else they are computed."""

    def put(self, row: str, column: str, cell: Cell) -> None:
        assert column in self.columns, column
        self.rows.setdefault(row, {})[column] = cell

    def markdown(self) -> str:
        """The table with its title above and its footnotes below, columns aligned."""
        # Cells with the same reason share a footnote.
        footnotes: list[str] = []
        grid = [["", *self.columns]]
        for name, cells in self.rows.items():
            shown = []
            for column in self.columns:
                cell = cells.get(column, Cell())
                if cell.reason is not None and cell.reason not in footnotes:  # one footnote for each reason
                    footnotes.append(cell.reason)
                shown.append(cell.shown() if cell.reason is None else f"[{footnotes.index(cell.reason) + 1}]")
            grid.append([name, *shown])
        # Padded, so that the file reads as a table and diffs are by line.
        widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
        lines = [_line(row, widths) for row in grid]
        lines.insert(1, "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|")
        below = [*self.notes, *(f"[{number}] {reason}" for number, reason in enumerate(footnotes, 1))]
        title = f"### {self.title} ({self.unit})" if self.unit else f"### {self.title}"
        return "\n".join([title, "", *lines, *([""] if below else []), *below])

    def record(self) -> dict[str, Any]:
        """The table as a JSON-serializable dictionary; a cell without a figure has its reason."""
        rows = [
            {"name": name, "cells": {column: _cell_record(cell) for column, cell in cells.items()}}
            for name, cells in self.rows.items()
        ]
        head = {"title": self.title, "unit": self.unit, "columns": list(self.columns), "notes": self.notes}
        return {**head, "rows": rows}

    def lines(self) -> Iterator[dict[str, Any]]:
        """A line for each cell, for CSV: entries that are no single figure, such as all runs, are in the JSON alone."""
        for name, cells in self.rows.items():
            for column, cell in cells.items():
                record = {"value": None, **_cell_record(cell)}
                plain = {key: v for key, v in record.items() if v is None or isinstance(v, str | int | float)}
                yield {"table": self.title, "unit": self.unit, "row": name, "column": column, **plain}


def _line(cells: list[str], widths: list[int]) -> str:
    padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
    return "| " + " | ".join(padded) + " |"


def _cell_record(cell: Cell) -> dict[str, Any]:
    if cell.reason is not None:
        return {"reason": cell.reason}
    return {"value": cell.value, **({"text": cell.text} if cell.text else {}), **cell.details}


def about_run(settings: Any, device: str, clocks: dict[str, float] | None = None) -> dict[str, Any]:
    """What a JSON file says about its measurement: command, versions, device, clocks and settings."""
    return {
        "command": ["python", *sys.orig_argv[1:]],  # with -m MODULE, which sys.argv has as a path
        "versions": versions(),
        "device": device,
        "clocks": clocks,
        "settings": as_dict(settings),
    }


def figures_path(settings: Any, name: str) -> Path:
    """The file of --json; where there is none, a new one in runs/<name>."""
    return Path(settings.json or f"runs/{name}/{time.strftime('%Y%m%d-%H%M%S')}.json")


def write_asked(
    tables: Sequence[Table], settings: Any, device: "torch.device", clocks: dict[str, float] | None = None
) -> None:
    """Write the file of --json where it is given, with the name of the device."""
    from qtrain.core.hardware.device import describe_hardware

    if settings.json:
        write_json(tables, Path(settings.json), about_run(settings, describe_hardware(device).name, clocks))


def check_json(path: Path) -> None:
    """UserError for a path that no file can be written to, before an hour of measurements."""
    if path.suffix == ".csv":
        raise UserError(f"--json: {path} would be overwritten by the CSV that is written beside it; name a .json file.")
    check_place(path)


def check_place(path: Path) -> None:
    """UserError where the file of --json cannot be written."""
    # The nearest folder that exists decides whether the file can be written below it.
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if path.is_dir() or (existing != path.absolute() and not existing.is_dir()):
        raise UserError(f"--json: cannot write {path}: {existing} is {'a folder' if existing.is_dir() else 'a file'}.")


def write_json(tables: Sequence[Table], path: Path, about: dict[str, Any]) -> None:
    """Write all tables, and `about` the measurement; beside it a .csv with a line for each cell. UserError if a file
    cannot be written."""
    write_record(path, {**about, "tables": [table.record() for table in tables]})
    with (
        os_errors(f"--json: cannot write {path}"),
        path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file,
    ):
        lines = [line for table in tables for line in table.lines()]
        writer = csv.DictWriter(file, dict.fromkeys(key for line in lines for key in line))
        writer.writeheader()
        writer.writerows(lines)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a measurement with its date as JSON. UserError if the file cannot be written."""
    with os_errors(f"--json: cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **record}, indent=1) + "\n", encoding="utf-8")


def write_png(tables: Sequence[Table], path: Path) -> None:
    """Draw each table as a bar chart with one group per column."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(tables), 1, figsize=(12, 1 + 5 * len(tables)), squeeze=False, layout="constrained"
    )
    for table, axis in zip(tables, axes[:, 0], strict=True):
        names = [name for name, cells in table.rows.items() if any(c.value is not None for c in cells.values())]
        width = 0.9 / max(len(names), 1)  # of a bar; a gap of 0.1 between groups
        for number, name in enumerate(names):
            heights = [table.rows[name].get(column, Cell()).value or 0.0 for column in table.columns]
            places = [i + number * width for i in range(len(heights))]
            axis.bar(places, heights, width, label=name, color=pyplot.cm.tab20(number % 20))
        axis.set_xticks([i + 0.45 for i in range(len(table.columns))], table.columns)
        axis.set_ylabel(table.unit)
        axis.set_title(table.title)
        axis.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        with os_errors(f"--png: cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def check_png() -> None:
    """Refuse --png without matplotlib, before an hour of measurements."""
    _pyplot()


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise missing_package("matplotlib", "--png") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
