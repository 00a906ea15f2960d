"""Records of runs: what a pair is, its difference and standard error by hand, files of several machines, plots."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qtrain.core.errors import UserError
from qtrain.pairs.pages import write_pages
from qtrain.pairs.results import (
    RunResult,
    averaged,
    data_fingerprint,
    make_pairs,
    make_tables,
    mean_and_error,
    read_results,
    shared_recipe,
)
from tests.data.corpora import write_jsonl
from tests.train.log.report.pages import Page


def run(variant: str, seed: int, end: float, data: str = "day1", **changes) -> RunResult:
    own = RunResult(
        variant=variant, overrides={"quantize": variant}, seed=seed, recipe={"model": "tiny", "n_steps": 20}, data=data,
        device="a GPU", versions={"git": "abc"}, source="def", finished=f"2026-11-0{seed}T00:00:00+00:00", tokens=640,
        tok_s={"bf16": 100.0}.get(variant, 150.0), eval_loss=[[0, 9.0], [10, end + 1], [20, end]], train_loss=[],
    )  # fmt: skip
    return replace(own, **changes)


RUNS = [run("bf16", 1, 2.0), run("bf16", 2, 2.1), run("bf16", 3, 1.9), run("int8", 1, 2.01), run("int8", 2, 2.14)]
RUNS += [run("int8", 3, 1.91), run("fp8", 2, 2.095)]


def rows(tables) -> dict[str, dict]:
    return {name: cells for table in tables for name, cells in table.rows.items()}


def test_mean_and_standard_error_are_those_by_hand():
    """0.01, 0.04, 0.01: mean 0.02, variance (1 + 4 + 1)e-4 / 2 = 3e-4, standard error sqrt(3e-4 / 3) = 0.01."""
    assert mean_and_error([0.01, 0.04, 0.01]) == pytest.approx((0.02, 0.01))
    assert mean_and_error([0.5]) == (0.5, None)
    found = rows(make_tables(RUNS, "bf16"))
    assert found["int8"]["difference"].value == pytest.approx(0.02) and found["int8"]["difference"].text == "+0.0200"
    assert found["int8"]["standard error"].value == pytest.approx(0.01) and found["int8"]["pairs"].value == 3
    assert found["int8"]["speed"].text == "1.50x" and found["int8"]["loss"].value == pytest.approx(6.06 / 3)
    assert found["fp8"]["difference"].text == "-0.0050" and "standard error" not in found["fp8"]
    assert found["int8, seed 2"]["over bf16"].text == "+0.0400" and "over bf16" not in found["bf16, seed 1"]


def test_a_pair_has_one_seed_one_recipe_and_the_same_data():
    """A corpus that was made again has another fingerprint: its runs are compared with their own reference, or none."""
    other = [run("bf16", 4, 1.0, "day2"), run("int8", 4, 1.1, "day2"), run("int8", 1, 9.0, "day2")]
    longer = run("int8", 2, 9.0, recipe={"model": "tiny", "n_steps": 40})
    pairs = make_pairs([*RUNS, *other, longer], "bf16")
    assert all(
        (p.run.seed, p.run.data, p.run.recipe) == (p.reference.seed, p.reference.data, p.reference.recipe)
        for p in pairs
    )
    assert sorted((p.run.variant, p.run.seed) for p in pairs) == [
        ("fp8", 2),
        *[("int8", seed) for seed in (1, 2, 3, 4)],
    ]
    found = rows(make_tables([*RUNS, *other], "bf16"))
    assert found["int8"]["pairs"].value == 4 and found["int8"]["difference"].value == pytest.approx(0.16 / 4)
    assert found["int8, seed 1, data day2"]["over bf16"].reason == "no run of bf16 with this seed and data"
    tables = make_tables([*RUNS, longer], "bf16")
    assert len(tables) == 3 and rows(tables[:2])["int8"]["pairs"].value == 3  # the longer recipe is a table of its own


def write(path: Path, runs: list[RunResult]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(one.line() for one in runs))


def test_a_stopped_run_is_compared_where_it_stopped():
    stopped = run("nvfp4", 1, 2.5, eval_loss=[[0, 9.0], [10, 3.25]])  # where the reference is at 3.0
    tables = make_tables([*RUNS, stopped], "bf16")
    assert rows(tables)["nvfp4, seed 1"]["over bf16"].text == rows(tables)["nvfp4"]["difference"].text == "+0.2500"
    assert tables[0].notes == ["Stopped, and compared there: nvfp4, seed 1, at step 10 of 20."]
    assert not make_tables(RUNS, "bf16")[0].notes


def test_files_of_several_machines_and_days_are_one_set(tmp_path):
    """What both have counts once; of a run that was repeated the newest."""
    again = replace(RUNS[3], eval_loss=[[20, 2.5]], finished="2026-12-01T00:00:00+00:00")
    write(tmp_path / "a/1.jsonl", RUNS[:4])
    write(tmp_path / "a/2.jsonl", [RUNS[0], again])
    write(tmp_path / "b/1.jsonl", RUNS[2:])
    read = read_results([tmp_path / "a", tmp_path / "b", tmp_path / "missing"], "--results_dir")
    assert len(read) == len(RUNS) and read[-1] == again
    (pair,) = [pair for pair in make_pairs(read, "bf16") if pair.run.key == again.key]
    assert pair.end == pytest.approx(0.5)


def test_one_name_for_two_settings_is_refused(tmp_path):
    write(tmp_path / "1.jsonl", [*RUNS, run("int8", 4, 2.0, overrides={"quantize": "int8", "lr": 1.0})])
    with pytest.raises(UserError, match=r"--x: 'int8' of seed \d is .*they cannot be averaged"):
        read_results([tmp_path], "--x")


BROKEN = {
    "no JSON": ("{", "line 1"),
    "a list": ("[1]", "line 1.*not a JSON object"),
    "an unknown key": (json.dumps({**asdict(RUNS[0]), "sed": 1}), "line 1.*unknown key 'sed'"),
    "no seed": (json.dumps({k: v for k, v in asdict(RUNS[0]).items() if k != "seed"}), "'seed' is missing"),
    "a word for a loss": (json.dumps({**asdict(RUNS[0]), "eval_loss": [[20, "two"]]}), "line 1.*eval_loss"),
    "half a point": (json.dumps({**asdict(RUNS[0]), "eval_loss": [[20]]}), "list of .step, loss."),
    "no validation loss": (json.dumps({**asdict(RUNS[0]), "eval_loss": [[0, 2.0]]}), "no validation loss"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_hold_no_results_are_refused(tmp_path, case):
    text, words = BROKEN[case]
    (tmp_path / "1.jsonl").write_text(text + "\n")
    with pytest.raises(UserError, match=words):
        read_results([tmp_path], "--results_dir")


def test_the_recipe_is_what_learning_depends_on():
    assert shared_recipe({"lr": 1, "seed": 2, "runs_dir": "x", "train_ds": {}, "export": True}) == {"lr": 1}


def test_the_fingerprint_is_of_contents_and_not_of_paths(tmp_path):
    write_jsonl(tmp_path / "a")
    write_jsonl(tmp_path / "b")
    spec = {"type": "text", "tokenizer": "byte"}
    a, b = ({**spec, "paths": str(tmp_path / name)} for name in "ab")
    assert data_fingerprint(a, a) == data_fingerprint(b, b)
    path = next((tmp_path / "b").glob("*.jsonl"))
    path.write_text(path.read_text() + '{"text": "more"}\n')
    assert data_fingerprint(a, a) != data_fingerprint(b, b)
    assert data_fingerprint(a, {"type": "hf_text", "dataset": "x"}) != data_fingerprint(a, a)


def test_a_thinned_curve_keeps_the_mean_and_the_end():
    points = averaged([(step, float(step)) for step in range(1, 1201)])
    assert len(points) == 300 and points[0] == [4, 2.5] and points[-1] == [1200, 1198.5] and averaged([]) == []


def test_each_recipe_has_a_page_that_compares_with_the_reference(tmp_path):
    longer = [run(name, 1, 2.0, recipe={"n_steps": 40}) for name in ("bf16", "int8")]
    pages = write_pages([*RUNS, *longer], "bf16", tmp_path / "x.json")
    assert [page.name for page in pages] == ["x.html", "x-2.html"]
    page = Page(pages[0].read_text())
    # 0.01, 0.04, 0.01 by hand, above; fp8 has a pair of seed 2 alone.
    assert "int8+0.0200 ± 0.010020" in page.text and "fp8-seed2-0.005020" in page.text
    assert {"over-validation-linear", "validation-linear"} <= set(page.charts)
    assert not write_pages([RUNS[0]], "bf16", tmp_path / "y.json")


def test_runs_on_other_data_are_not_on_the_page(tmp_path):
    other = [run("bf16", 4, 1.0, "day2"), run("int8", 4, 1.1, "day2")]
    first, second = write_pages([*RUNS, *other], "bf16", tmp_path / "x.json")
    assert "+0.1000" not in first.read_text() and "+0.1000" in second.read_text()
