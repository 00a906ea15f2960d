"""The tables in the docs are those of docs/results/, and every result is in a document."""

import json

import pytest

from benchmarks.picture import PICTURE, drawn, memory, speed
from benchmarks.results import RESULTS, ROOT, rendered, section_of
from qtrain.bench.tables import Cell, Table, write_json

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_documents_tables_are_the_results(path):
    text = path.read_text()
    assert rendered(text) == text, "run python -m benchmarks.results"


def test_every_result_is_in_a_document():
    texts = [path.read_text() for path in DOCUMENTS]
    for path in RESULTS.glob("*.json"):
        assert any(f"<!-- results: {path.stem} -->" in text for text in texts), path.name
        record = json.loads(path.read_text())
        assert {"date", "device", "versions", "command", "tables"} <= record.keys(), path.name


def test_a_benchmarks_json_is_a_result(tmp_path):
    """Figures, texts and reasons come back as `Table.markdown` shows them, with device, versions, date and command."""
    table = Table("Products", "TOPS", ["a", "b"], ["A note."])
    table.put("int8", "a", Cell(1234.5))
    table.put("int8", "b", Cell(reason="not on this GPU"))
    table.put("fp8", "a", Cell(0.5, text="50%"))
    about = {"device": "a GPU", "versions": {"torch": "2.11", "git": "abc"}, "command": ["bench.py", "--x", "a b"]}
    write_json([table], tmp_path / "x.json", about)
    section = section_of(json.loads((tmp_path / "x.json").read_text()))
    assert table.markdown() in section
    assert "a GPU, torch 2.11, 20" in section and "`bench.py --x 'a b'`" in section


def test_the_picture_is_drawn_from_the_results():
    assert PICTURE.read_text() == drawn(), "run python -m benchmarks.picture"
    assert PICTURE.stat().st_size < 200_000
    bars = [*speed(), *memory()]
    assert {bar.ours for bar in bars} == {True, False} and all(bar.value > 0 for bar in bars)
    speeds = {bar.label: bar.value for bar in speed()}
    assert speeds["1.5B qtrain int8"] == 83_546 / 55_538  # of the table, written down a second time
