"""Tables: figures and reasons on the screen and in JSON, bars where matplotlib is."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from qtrain.bench.tables import Cell, Table, check_json, check_png, write_json, write_png
from qtrain.core.errors import UserError


def table() -> Table:
    t = Table("Products", "TFLOP/s", ["small", "large"], notes=["Random data."])
    t.put("ours", "small", Cell(1234.5, details={"ms": 0.5}))
    t.put("ours", "large", Cell(0.01234, text="0.0123 (9%)"))
    t.put("theirs", "small", Cell(reason="not installed"))
    t.put("theirs", "large", Cell(reason="not installed"))
    t.put("odd", "small", Cell(reason="too old"))
    return t


def test_markdown():
    assert table().markdown().splitlines() == [
        "### Products (TFLOP/s)",
        "",
        "|        | small |       large |",
        "|--------|------:|------------:|",
        "| ours   | 1,234 | 0.0123 (9%) |",
        "| theirs |   [1] |         [1] |",
        "| odd    |   [2] |             |",
        "",
        "Random data.",
        "[1] not installed",
        "[2] too old",
    ]


def test_json(tmp_path):
    path = tmp_path / "deep" / "figures.json"
    write_json([table()], path, {"device": "a CPU"})
    record = json.loads(path.read_text())
    assert record["device"] == "a CPU"
    rows = {row["name"]: row["cells"] for row in record["tables"][0]["rows"]}
    assert rows["ours"]["small"] == {"value": 1234.5, "ms": 0.5} and rows["odd"]["small"] == {"reason": "too old"}


def test_csv_beside_it(tmp_path):
    write_json([table(), Table("Other", "ms", ["a"])], tmp_path / "figures.json", {})
    rows = list(csv.DictReader((tmp_path / "figures.csv").open()))
    assert len(rows) == 5 and rows[0]["row"] == "ours" and rows[0]["column"] == "small"
    assert (rows[0]["value"], rows[0]["ms"], rows[0]["unit"]) == ("1234.5", "0.5", "TFLOP/s")
    assert rows[1]["text"] == "0.0123 (9%)" and rows[2]["reason"] == "not installed" and rows[2]["value"] == ""
    with pytest.raises(UserError, match=r"--json: figures\.csv would be overwritten"):
        check_json(Path("figures.csv"))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--json: cannot write"):
        write_json([], tmp_path / "file" / "x.json", {})


def test_bars(tmp_path):
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(UserError, match="pip install matplotlib"):
            check_png()
        return
    write_png([table(), table()], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
