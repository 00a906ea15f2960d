"""Several runs on one page: groups of seeds, differences in nats with their standard errors, settings that differ."""

import dataclasses

import numpy as np
import pytest

from qtrain.train.log.report.compare import ComparedRun, compare_page, compared, group_difference, grouped, results
from qtrain.train.log.report.records import Curve, read_run
from tests.train.log.report.pages import NASTY, Page, records, write_run


def run(name: str, seed: int, over: float = 0.0, points: int = 5, **settings) -> ComparedRun:
    """Evaluations at step 0, 10, ...; a training loss at each step, by `over` higher than that of 0."""
    steps, evaluated = np.arange(1, 10.0 * points), np.arange(0, 10.0 * points, 10)
    train = Curve({"steps": steps, "tokens": 64 * steps}, 2 + 1 / steps + over)
    validation = Curve({"steps": evaluated, "tokens": 64 * evaluated}, 3 - evaluated / 100 + over + seed)
    return ComparedRun(name, {"seed": seed, "quantize": name.partition("-")[0], **settings}, train, validation)


def test_runs_that_differ_in_the_seed_only_are_a_group():
    runs = [run("bf16-seed1", 1), run("int8-seed1", 1), run("bf16-seed2", 2, run_name="other"), run("bf16", 1, lr=0.1)]
    groups = grouped(runs)
    assert [(group.name, len(group.runs)) for group in groups] == [("bf16", 2), ("int8-seed1", 1), ("bf16", 1)]
    assert len({group.color for group in groups}) == 3


@pytest.mark.parametrize("curve", ["validation", "train"])
def test_the_difference_is_that_of_pairs_of_one_seed(curve):
    """0.01, 0.04, 0.01: mean 0.02, standard error 0.01. The spread between seeds is 1: unpaired it would drown them."""
    runs = [run("bf16", seed) for seed in (1, 2, 3)]
    runs += [run("int8", seed, over) for seed, over in ((1, 0.01), (2, 0.04), (3, 0.01))]
    mean, error = group_difference(*grouped(runs), curve)
    assert mean.y == pytest.approx(np.full(len(mean), 0.02)) and error == pytest.approx(np.full(len(mean), 0.01))
    if curve == "validation":
        assert mean.x["steps"].tolist() == [10, 20, 30, 40], "the loss before the first step is no result"


def test_without_a_common_seed_the_means_are_compared():
    runs = [run("bf16", 1), run("bf16", 3), run("int8", 2, 0.5), run("int8", 4, 0.5)]
    mean, error = group_difference(*grouped(runs), "validation")
    # Means of 1 and 3 and of 2 and 4: 1 apart. Standard errors sqrt(2) / sqrt(2) = 1 each.
    assert mean.y == pytest.approx(np.full(4, 1.5)) and error == pytest.approx(np.full(4, 2**0.5))
    (mean, error) = group_difference(*grouped([run("bf16", 1), run("int8", 1, 0.1)]), "train")
    assert error is None and mean.y == pytest.approx(np.full(len(mean), 0.1))


def test_runs_of_other_batch_sizes_are_compared_by_tokens():
    first, other = run("bf16", 1), run("int8", 1, 0.2)
    half = {"steps": other.validation.x["steps"] * 2, "tokens": other.validation.x["tokens"]}
    other = ComparedRun("int8", {"seed": 1, "batch_size": 4}, None, Curve(half, other.validation.y))
    mean, _ = group_difference(*grouped([first, other]), "validation")
    assert mean.y == pytest.approx(np.full(4, 0.2)) and mean.x["steps"].tolist() == [20, 40, 60, 80]
    assert group_difference(*grouped([first, other]), "train") is None
    assert group_difference(*grouped([first, run("int8", 1, points=1)]), "validation") is None


def test_the_page_has_results_differences_and_settings(tmp_path):
    folders = [
        write_run(
            tmp_path / f"20260101-00000{n}_{name}", records(40), {"quantize": name, "seed": 1, "lr": 0.1, "n": NASTY}
        )
        for n, name in enumerate(("bf16", "int8"))
    ]
    page = Page(compare_page([compared(read_run(folder)) for folder in folders], notes=[NASTY]))
    assert page.charts == [
        *("loss-linear", "loss-log", "validation-linear", "over-validation-linear", "over-train-linear", "speed-linear")
    ]
    assert page.data["modes"].keys() == {"steps", "tokens", "hours"} and NASTY in page.text
    assert "int8+0.000040" in page.text and "quantizebf16int8" in page.text and "lr0.1" not in page.text


def test_energy_is_a_column_of_runs_that_have_measured_it():
    assert "J a token" not in results(grouped([run("bf16", 1)]))
    assert "J a token" in results(grouped([dataclasses.replace(run("bf16", 1), joules=0.5), run("int8", 1)]))


def test_names_of_runs_are_text(tmp_path):
    runs = [run(NASTY, 1), run(NASTY, 2, quantize="x"), run("$$x^2$$ @y{safe} {{}}", 1, quantize="y")]
    page = Page(compare_page(runs))
    assert f"{NASTY} (1)" in page.text and f"{NASTY} (2)" in page.text


def test_a_run_without_losses_is_a_row_alone():
    page = Page(compare_page([run("bf16", 1), ComparedRun("empty", {"seed": 1}, None, None)]))
    assert "empty" in page.text and "over-validation-linear" not in page.charts
