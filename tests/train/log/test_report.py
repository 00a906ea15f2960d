"""report.html: drawn from the run folder alone, well formed, self-contained, escaped; also of an unfinished run."""

import html.parser
import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from qtrain.train.log.report import MAX_POINTS, axis_ticks, write_report

NASTY = '</pre><script>alert("x")</script>&amp; \'"'


class Strict(html.parser.HTMLParser):
    """Refuses tags that do not match, and collects what could load something from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.links, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def make_run(folder: Path, records: list[dict], config: dict | None) -> Strict:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    path = write_report(folder)
    assert path == folder / "report.html"
    page = Strict()
    page.feed(path.read_text())
    assert not page.open and not page.links and "script" not in page.seen
    assert "http" not in path.read_text().replace(NASTY, "")
    return page


def records(steps: int) -> list[dict]:
    found = []
    for step in range(1, steps + 1):
        found.append(
            {"step": step, "loss": 1 + 4 / step, "lr": 1e-3, "grad_norm": 1.0 + step % 3, "tok_s": 1000.0}
            | {"tokens": step * 2000, "mem": step * 2**20, "sol": 0.4}
        )
        if step % 10 == 0:
            found.append({"step": step, "eval_loss": 2 + abs(step - 20) / 100, "samples": [[NASTY, "text " + NASTY]]})
    return found


def test_a_finished_run_has_its_figures_and_curves(tmp_path):
    page = make_run(tmp_path / "run", records(40), {"n_steps": 40, "model": "small", "note": NASTY})
    for text in ("Steps40", "Final loss1.1000", "Final validation loss2.2000 (step 40)"):
        assert text in page.text
    assert "Best validation loss2.0000 (step 20)" in page.text
    assert "Tokens80,000" in page.text and "checkpoints1m 20s" in page.text and "Peak memory0.04 GiB" in page.text
    assert "Time for a billion tokens, at that speed11d 13h" in page.text
    assert page.seen.count("svg") == 5 and page.seen.count("polyline") == 6
    assert page.text.count(NASTY) == 3, "prompt, sample and setting, as text"
    assert "unfinished" not in page.text


def test_a_run_that_early_stopping_ended_is_finished(tmp_path):
    """Its lowest validation loss is at step 20 of records to step 40, two evaluations before the end."""
    for patience, unfinished in ((2, False), (3, True)):
        page = make_run(tmp_path / str(patience), records(40), {"n_steps": 100, "early_stopping": patience})
        assert ("unfinished" in page.text) == unfinished


def test_the_curve_is_where_the_numbers_are(tmp_path):
    make_run(tmp_path / "run", [{"step": s, "loss": float(y)} for s, y in ((0, 3), (5, 2), (10, 1))], {})
    svg = re.search(r"<svg.*?</svg>", (tmp_path / "run" / "report.html").read_text(), re.DOTALL)[0]
    points = ET.fromstring(svg).find("polyline").get("points")
    xy = [tuple(map(float, p.split(","))) for p in points.split()]
    assert [x for x, _ in xy] == pytest.approx([62, 306, 550]) and [y for _, y in xy] == pytest.approx([10, 113, 216])


def test_an_unfinished_run_with_a_truncated_line(tmp_path):
    page = make_run(tmp_path / "run", records(7), {"n_steps": 100})
    assert "7 of 100 (unfinished)" in page.text and "Best validation" not in page.text
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    write_report(tmp_path / "run")


@pytest.mark.parametrize("config", [None, {}])
def test_a_run_without_a_step(tmp_path, config):
    page = make_run(tmp_path / "run", [], config)
    assert "No step has been logged yet" in page.text


@pytest.mark.parametrize(
    "values", [[2.0], [2.0, 2.0], [0.0, 0.0], [None, 1.0], [None, None], [1e-30, 2e-30], [1e30, -1e30], [-5.0, 3.0]]
)
def test_degenerate_curves_are_drawn_or_omitted(tmp_path, values):
    page = make_run(tmp_path / "run", [{"step": n, "loss": v} for n, v in enumerate(values)], {})
    assert page.seen.count("polyline") == (1 if any(v is not None for v in values) else 0)
    assert "nan" not in (tmp_path / "run" / "report.html").read_text().lower().replace("nance", "")


def test_a_long_run_is_averaged_to_fewer_points(tmp_path):
    make_run(tmp_path / "run", [{"step": n, "loss": 1.0 + n % 2} for n in range(5000)], {})
    text = (tmp_path / "run" / "report.html").read_text()
    points = re.search(r'points="([^"]+)"', text)[1].split()
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS and len(text) < 60_000


def test_a_resumed_log_without_speed_has_no_time(tmp_path):
    page = make_run(tmp_path / "run", [{"step": 1, "loss": 1.0, "tokens": 10}], {})
    assert "Training time" not in page.text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.3, 0.31), (-7, 1e6), (1, 40), (1e-9, 3e-9)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = axis_ticks(low, high)
    gaps = {f"{b - a:.3e}" for a, b in pairwise(ticks)}
    assert 2 <= len(ticks) <= 8 and len(gaps) == 1 and gaps.pop()[:5] in ("1.000", "2.000", "5.000")
    assert all(low - 1e-9 * abs(low) <= t <= high * (1 + 1e-9) for t in ticks)


def test_named_validation_sets_have_a_chart_and_rows(tmp_path):
    found = records(40)
    for record in found:
        if "eval_loss" in record:
            record |= {f"eval_{name}_loss": 1.0 + number for number, name in enumerate("abcdefgh")}
    final = {"step": 40, "final_eval_loss": 2.0, "final_eval_a_loss": 1.5, "eval_<b>_loss": 9.0}
    page = make_run(tmp_path / "run", [*found, final], {"n_steps": 40})
    assert "Validation loss by dataset" in page.text and page.seen.count("polyline") == 6 + 8
    assert "Final validation loss, h8.0000 (step 40)" in page.text and "Loss over all of a1.5000" in page.text
