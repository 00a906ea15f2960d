"""Every cell is a run that is allowed, and tables say by how much a plan is off."""

from dataclasses import replace

from benchmarks.planned_memory import CELLS, cell_settings, planned_table
from qtrain.train.plan.checked_settings import check_settings


def test_every_cell_is_allowed():
    for name in CELLS:
        settings = cell_settings(name)
        assert settings.batch_size % (settings.micro_batch_size or settings.batch_size) == 0
        check_settings(replace(settings, gpu="h200", dry_run=True), name)


def test_table():
    result = {
        "planned_gib": 51.0, "peak_gib": 50.0, "planned_taken_gib": 54.0, "reserved_gib": 51.0, "outside_gib": 2.0,
        "planned_step_ms": 99.0, "step_ms": 100.0, "tok_s": 20_480.0, "recorded": False, "fit": [],
    }  # fmt: skip
    text = planned_table({"a": result, "b": {"reason": "out of memory"}}).markdown()
    cells = [cell.strip() for cell in text.splitlines()[4].split("|")]
    assert cells[2:6] == ["51.00, 50.00 (+2.0%)", "54.00, 53.00 (+1.9%)", "99, 100 (-1.0%)", "20,480*"]
    assert "[1] out of memory" in text
