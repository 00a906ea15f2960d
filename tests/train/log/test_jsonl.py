"""Lines of a run that went back: the same records count in a report, for a tracker and when the run resumes."""

import pytest

from qtrain.train.log.jsonl import in_order
from qtrain.train.log.report.records import read_run
from tests.train.log.report.pages import write_run

STEPS = [{"step": n, "loss": float(n)} for n in range(1, 6)]


@pytest.mark.parametrize("back", [1, 3, 5])
def test_where_the_steps_go_back_the_later_records_count(tmp_path, back):
    """Also where the second attempt has not come as far as the first one: what it replaces is gone."""
    again = {"step": back, "loss": 0.5}
    rows = [*STEPS, {"step": 5, "eval_loss": 9.0}, again, {"step": back, "eval_loss": 0.4}]
    expected = [*STEPS[: back - 1], again, rows[-1]]
    assert in_order(rows) == expected
    assert read_run(write_run(tmp_path / "run", rows)).records == expected


def test_records_without_a_loss_share_their_step():
    """An evaluation follows its step, and the linears of a health sample follow each other."""
    rows = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.1}, {"step": 2, "linear": "a"}, {"step": 4, "loss": 1}]
    assert in_order(rows) == rows
