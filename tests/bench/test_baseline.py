"""A GPU beside the baseline of its kind: what is slower or larger is named, and ends the check with exit code 1."""

import json

import pytest

from qtrain.bench import baseline
from qtrain.bench.baseline import ROWS, chosen_rows, compare, main, outside, read_baseline
from qtrain.bench.training_cell import CellSettings
from qtrain.core.checks import check_fields
from qtrain.core.errors import UserError

RESULTS = {"0.5b bf16": {"tok_s": 100.0, "peak_gib": 10.0}, "0.5b int8": {"tok_s": 200.0, "peak_gib": 8.0}}


def file_of(results: dict[str, dict[str, float]]) -> dict:
    rows = {name: {"settings": ROWS[name], **found} for name, found in results.items()}
    return {"date": "2026-11-26", "device": "H200", "versions": {"torch": "0", "triton": "0"}, "rows": rows}


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A GPU of the name H200, whose cells give RESULTS and whose baselines are in an empty folder."""
    monkeypatch.setattr(baseline, "_gpu", lambda: "H200")
    monkeypatch.setattr(baseline, "FOLDER", tmp_path)
    measured = {name: dict(found) for name, found in RESULTS.items()}
    monkeypatch.setattr(baseline, "_measure", lambda name, row: measured[name])
    return tmp_path, measured


def test_what_is_written_is_a_baseline_that_the_same_machine_meets(here, capsys):
    folder, _ = here
    main(["--rows", "0.5b bf16,0.5b int8", "--json", str(folder / "h200.json")])
    main(["--check"])
    out, err = capsys.readouterr()
    assert out.count("1.00x") == 2 and "slower" not in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tok_s": 94.0}, "0.5b bf16: 6.0% slower than the baseline"),
        ({"peak_gib": 11.0}, "0.5b bf16: 10.0% more memory than the baseline"),
        ({"reason": "out of memory"}, "0.5b bf16: out of memory"),
    ],
)
def test_a_row_that_is_worse_is_named_and_fails_the_check(here, capsys, change, said):
    folder, measured = here
    (folder / "h200.json").write_text(json.dumps(file_of(RESULTS)))
    measured["0.5b bf16"] |= change
    main([])  # without --check it is only shown
    with pytest.raises(SystemExit) as end:
        main(["--check"])
    assert end.value.code == 1 and capsys.readouterr().err.count(said) == 2


def test_within_is_the_share_that_is_allowed():
    slower = {"0.5b bf16": {"tok_s": 94.0, "peak_gib": 10.0}}
    assert outside(slower, file_of(RESULTS), 0.1) == [] and len(outside(slower, file_of(RESULTS), 0.05)) == 1


def test_versions_that_differ_are_said(here, capsys):
    folder, _ = here
    (folder / "h200.json").write_text(json.dumps(file_of(RESULTS)))
    main([])
    assert "in the baseline" in capsys.readouterr().err


def test_a_gpu_without_a_file_is_refused_with_those_that_have_one(here):
    (here[0] / "a100.json").write_text("{}")
    with pytest.raises(UserError, match=r"no baseline of H200, but of: a100\. --json FILE"):
        main(["--check"])


def test_unknown_rows_are_refused():
    with pytest.raises(UserError, match=r"0\.5b bf16"):
        chosen_rows("0.5b bf17", None)


def test_rows_of_new_files_are_settings_of_a_training_step():
    for name, row in ROWS.items():
        CellSettings(**check_fields(CellSettings, row, name))


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_files_have_what_the_check_reads(name):
    path = baseline.FOLDER / f"{name}.json"
    found = json.loads(path.read_text())
    assert read_baseline(found["device"]) == found
    assert chosen_rows("", found) and {"torch", "triton"} <= found["versions"].keys()
    table = compare({name: row for name, row in found["rows"].items()}, found, found["device"])
    assert all(cells["as fast"].value == 1 for cells in table.rows.values())
    for name, row in found["rows"].items():
        CellSettings(**check_fields(CellSettings, row["settings"], name))
