"""report.html of a run: its figures and charts, escaped, complete in itself, small however long the run."""

import base64
import importlib.util
import json
import re

import numpy as np
import pytest

from qtrain.train.log.report.heatmaps import WORST, expert_map, health_map
from qtrain.train.log.report.page import POLICY
from qtrain.train.log.report.records import Curve, read_run
from qtrain.train.log.report.series import MAX_POINTS, extremes, smoothed, smoothing_span
from qtrain.train.log.report.single import focus_of
from qtrain.train.log.report.tables import count
from qtrain.train.log.report.write import try_write_report, write_report
from qtrain.train.log.status import setup_log
from tests.train.log.report.pages import LIBRARY, NASTY, health, page_of, records, write_run


def test_a_finished_run_has_its_figures_and_charts(tmp_path):
    page = page_of(write_run(tmp_path / "run", records(40), {"n_steps": 40, "model": "small", "note": NASTY}))
    for text in ("Steps40", "Final loss1.1000", "Final validation loss2.2000step 40"):
        assert text in page.text
    assert "Best validation loss2.0000step 20" in page.text
    assert "Tokens80,000" in page.text and "Training time1m 20s" in page.text and "Peak memory0.04 GiB" in page.text
    assert "Time for a billion tokens11d 13h" in page.text and "Speed of light40.0%" in page.text
    assert page.charts == [
        "loss-linear",
        "loss-log",
        *(f"{name}-linear" for name in ("norm", "lr", "tokens", "sol", "memory")),
    ]
    assert page.data["modes"].keys() == {"steps", "tokens", "hours"}
    assert page.text.count(NASTY) == 9, "prompt and sample of four evaluations, and a setting, as text"
    assert "unfinished" not in page.text


def test_a_run_that_early_stopping_ended_is_finished(tmp_path):
    """Its lowest validation loss is at step 20 of records to step 40, two evaluations before the end."""
    for patience, unfinished in ((2, False), (3, True)):
        config = {"n_steps": 100, "early_stopping": patience}
        page = page_of(write_run(tmp_path / str(patience), records(40), config))
        assert ("unfinished" in page.text) == unfinished


def test_a_run_that_goes_on_and_one_that_failed(tmp_path):
    run = write_run(tmp_path / "run", records(7), {"n_steps": 100})
    assert "7 of 100 (unfinished)" in page_of(run).text
    (run / "run.lock").touch()
    assert "7 of 100 (training)" in page_of(run).text
    assert f"ended with an error: {NASTY}" in page_of(run, failure=NASTY).text


@pytest.mark.parametrize("config", [None, {}])
def test_a_run_without_a_step(tmp_path, config):
    page = page_of(write_run(tmp_path / "run", [], config))
    assert "No step has been logged yet" in page.text and not page.charts


@pytest.mark.parametrize(
    "values", [[2.0], [2.0, 2.0], [0.0, 0.0], [None, 1.0], [None, None], [1e-30, 2e-30], [1e299, -1e299], [-5.0, 3.0]]
)
def test_degenerate_curves_are_drawn_or_omitted(tmp_path, values):
    page = page_of(write_run(tmp_path / "run", [{"step": n, "loss": v} for n, v in enumerate(values)], {}))
    assert ("loss-linear" in page.charts) == any(v is not None for v in values)
    assert ("loss-log" in page.charts) == (any(values) and all(v is None or v > 0 for v in values))


def test_the_page_requests_nothing(tmp_path):
    """The policy refuses it, and outside of BokehJS there is no address."""
    run = write_run(tmp_path / "run", records(60), {"n_steps": 60}, health([20, 40]))
    page_of(run)
    text = (run / "report.html").read_text()
    assert POLICY in text and "default-src 'none'" in POLICY and "connect" not in POLICY
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert max(map(len, scripts)) > 0.9 * LIBRARY
    for script in scripts:
        text = text.replace(script, "")
    assert "://" not in text and "@import" not in text and "url(" not in text


def test_a_long_run_is_small_and_keeps_its_spikes(tmp_path):
    """Of 20,000 logged steps with every measurement, one has a loss of 9. More steps make no larger page."""
    steps = 20_000
    rng = np.random.default_rng(0)
    noise = 1 + 0.1 * rng.random((steps, 10)).round(4)
    lines = [
        {"step": n + 1, "loss": a, "grad_norm": b, "lr": c, "tokens": 10 * n, "tok_s": 1e5 * d, "sol": e, "mfu": f}
        | {"mem": 2**30, "time": float(n), "data_wait": g, "joules_token": h}
        | {"gpu": {"power": 700 * i, "util": 90 * j, "sm_clock": 1e3 * i, "temperature": 60 * j}}
        | {"ms": {"data": a, "forward_backward": 100 * b, "optimizer": c}}
        for n, (a, b, c, d, e, f, g, h, i, j) in enumerate(noise.tolist())
    ]
    lines[11_234]["loss"] = 9.0
    run = write_run(tmp_path / "run", lines, {}, health(list(range(0, steps, 500)), layers=32))
    page = page_of(run)
    size = (run / "report.html").stat().st_size
    assert size < 5_000_000 and "time-linear" in page.charts and "heat-health" in page.charts
    kept = read_run(run).curve("loss")
    assert kept.y[extremes(kept.y)].max() == 9.0
    columns = page.data["heat-health"]["edges"]["steps"]
    assert 8 < len(columns) < 200


def test_extremes_are_few_and_ascending():
    y = np.random.default_rng(1).normal(size=54_321)
    index = extremes(y)
    assert len(index) <= MAX_POINTS + 1 and (np.diff(index) > 0).all()
    assert {0, len(y) - 1, int(y.argmin()), int(y.argmax())} <= set(index.tolist())
    assert extremes(y[:7]).tolist() == list(range(7))


def test_a_smoothed_curve_is_the_mean_of_the_last_steps():
    y = np.random.default_rng(2).normal(size=1000)
    found = smoothed(Curve({"steps": np.arange(1000.0)}, y)).y
    span = smoothing_span(1000)
    assert span == 20 and found[0] == y[0]
    assert found[5] == pytest.approx(y[:6].mean()) and found[700] == pytest.approx(y[681:701].mean())
    assert smoothing_span(99) == 1 and smoothing_span(10**6) == 500


def test_first_steps_and_spikes_do_not_set_the_range_of_the_loss():
    steps = np.arange(1, 1001.0)
    spike = Curve({"steps": steps}, np.where(steps == 500, 10.0, 3 - steps / 1000))
    low, high = focus_of(spike, None)
    assert 1.9 < low < 2.0 and 2.9 < high < 3.3
    curve = Curve({"steps": steps}, np.where(steps < 20, 10.0, 3 - steps / 1000))
    low, high = focus_of(curve, None)
    assert 1.9 < low < 2.0 and 2.9 < high < 3.1
    assert focus_of(Curve({"steps": steps}, 3 - steps / 1000), None) is None


def test_the_y_axis_can_leave_out_the_spikes_of_any_chart(tmp_path):
    lines = [{"step": n, "loss": 2.0 + n % 2, "grad_norm": 50.0 if n == 80 else 1.0 + n % 2} for n in range(1, 301)]
    page = page_of(write_run(tmp_path / "run", lines, {}))
    focus = {chart["key"]: chart["focus"] for chart in page.data["data"]}
    assert focus["loss"] is None and focus["norm"][1] < 3
    assert "y axis main part all log" in page.text


def test_named_validation_sets_have_a_chart_and_figures(tmp_path):
    found = records(40)
    for record in found:
        if "eval_loss" in record:
            record |= {f"eval_{name}_loss": 1.0 + number for number, name in enumerate("abcdefghij")}
    final = {"step": 40, "final_eval_loss": 2.0, "final_eval_a_loss": 1.5, "eval_<b>_loss": 9.0}
    page = page_of(write_run(tmp_path / "run", [*found, final], {"n_steps": 40}))
    assert "datasets-linear" in page.charts
    assert "Final validation loss, h8.0000step 40" in page.text and "Loss over all of a1.5000" in page.text


def test_what_the_gpu_did(tmp_path):
    rows = [
        {"step": n, "loss": 1.0, "tokens": 1000 * n, "joules_token": 0.5, "ms": {"data": 1.0, "forward_backward": 90.0}}
        | {"gpu": {"power": 600.0, "util": 99, "throttled": ["power cap"] if n < 5 else [], "sm_clock": 1700}}
        for n in range(1, 11)
    ]
    page = page_of(write_run(tmp_path / "run", rows))
    assert {"power-linear", "gpu-linear", "clock-linear", "time-linear", "joules-linear"} <= set(page.charts)
    assert "Throttled, of the samples: power cap 40%." in page.text and "GPU power600 W" in page.text
    assert "Energy5.00 kJ0.500 J a token" in page.text and "energy (J)" in page.text


def test_a_vision_run_counts_images(tmp_path):
    rows = [{"step": n, "loss": 1.0, "images": 64 * n, "img_s": 100.0, "top1": 0.5} for n in range(1, 4)]
    page = page_of(write_run(tmp_path / "run", rows))
    assert page.data["modes"] == {"steps": "steps", "tokens": "images"} and "Images192" in page.text
    assert {"images-linear", "accuracy-linear"} <= set(page.charts) and "Top-1 accuracy50.00%" in page.text


def test_a_value_that_is_new_has_a_chart(tmp_path):
    page = page_of(write_run(tmp_path / "run", [{"step": n, "loss": 1.0, "</script><b>new": n / 7} for n in range(5)]))
    assert "other-0-linear" in page.charts and "</script><b>new" in page.text


@pytest.mark.parametrize(
    ("value", "text"), [(655_360.0, "655,360"), (983_040_000.0, "983 M"), (1.3e9, "1.30 B"), (2.5e12, "2.50 T")]
)
def test_counts_are_readable(value, text):
    assert count(value) == text


# ---- health ---------------------------------------------------------------------------------------------------------


def plane(heat: dict, choice: str, measure: str) -> np.ndarray:
    values = np.frombuffer(base64.b64decode(heat["planes"][f"{choice}|{measure}"]), "<f4")
    return values.reshape(len(heat["rows"][choice]), -1)


def test_the_heat_map_has_every_sample(tmp_path):
    steps = [20, 40, 60]
    samples = health(steps)
    samples.append({"step": 60, "warning": f"layers.1.mlp.down_proj: {NASTY}"})
    run = write_run(tmp_path / "run", records(60), {}, samples)
    page = page_of(run)
    heat = page.data["heat-health"]
    assert heat["rows"] == {WORST: ["0", "1", "2"], "attn.qkv": ["0", "1", "2"], "mlp.down_proj": ["0", "1", "2"]}
    assert heat["edges"]["steps"] == [20, 40, 60, 60] and heat["edges"]["tokens"] == [40_000, 80_000, 120_000, 120_000]
    for choice in (WORST, "mlp.down_proj"):
        assert plane(heat, choice, "x.saturated") == pytest.approx(np.array([[0] * 3, [0.041] * 3, [0] * 3]))
        assert plane(heat, choice, "gradient.cosine")[:, 0] == pytest.approx([0.999, 0.9, 0.999])
    assert NASTY in page.text and "layers.1.mlp.down_proj, xfp8_tensorwise20%2.5%" in page.text


def test_many_samples_share_a_column_that_shows_the_worst(tmp_path):
    samples = [
        {
            "step": n,
            "linear": "layers.0.a",
            "x": {"error": 0.5 if n == 3333 else 0.01},
            "gradient": {"cosine": 0.2 if n == 77 else 1.0},
        }
        for n in range(5000)
    ]
    heat = health_map(read_run(write_run(tmp_path / "run", records(3), {}, samples))).data()
    errors, cosines = plane(heat, "a", "x.error"), plane(heat, "a", "gradient.cosine")
    assert errors.shape == cosines.shape and errors.shape[1] <= 160
    assert (errors.max(), errors.argmax()) == (0.5, 3333 * errors.shape[1] // 5000)
    assert (cosines.min(), cosines.argmin()) == (np.float32(0.2), 77 * errors.shape[1] // 5000)


def test_the_load_of_experts(tmp_path):
    samples = [
        {"step": n, "linear": f"layers.{layer}.router", "scheme": None, "experts": {"load": [0.7, 0.1, 0.1, 0.1]}}
        for n in (1, 2)
        for layer in (0, 1)
    ]
    run = read_run(write_run(tmp_path / "run", records(3), {}, samples))
    heat = expert_map(run).data()
    assert list(heat["rows"]) == ["layers.0.router", "layers.1.router"]
    assert plane(heat, "layers.1.router", "load")[:, 1] == pytest.approx([2.8, 0.4, 0.4, 0.4])
    assert health_map(run) is None


def test_other_schemes_are_those_of_the_last_sample_that_has_them(tmp_path):
    tried = {"fp8_rowwise": {"x": {"error": 0.02, "amax": 9.0}}, "int8": {"x": 0.5}}
    samples = [
        {"step": 1, "linear": "layers.0.a", "scheme": "fp8", "x": {"error": 0.3}, "what_if": tried},
        {"step": 2, "linear": "layers.0.a", "scheme": "fp8", "x": {"error": 0.4}},
        {"step": 2, "linear": "layers.0.router", "scheme": None, "experts": {"load": [0.5, 0.5], "drift": 0.25}},
        {"step": 2, "linear": "layers.0.a", "warning": "x is off"},
    ]
    page = page_of(write_run(tmp_path / "run", records(3), {}, samples))
    assert "layers.0.a, xfp840%2%50%" in page.text and "step 2: x is off" in page.text
    heat = page.data["heat-health"]
    assert plane(heat, "router", "experts.drift").tolist()[0][1] == 0.25 and "a|experts.drift" not in heat["planes"]


# ---- at the end of a run --------------------------------------------------------------------------------------------


def test_a_run_without_bokeh_ends_with_one_line(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", records(3))
    setup_log(None)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try_write_report(run)
    (line,) = capsys.readouterr().out.splitlines()
    assert "pip install 'bokeh>=3.9'" in line and line.endswith(f"Then: python -m qtrain report {run}")
    assert not (run / "report.html").exists()
    try_write_report(run, quiet=True)
    assert not capsys.readouterr().out


def test_a_folder_that_cannot_be_written_costs_the_report_only(tmp_path, capsys):
    setup_log(None)
    run = write_run(tmp_path / "run", records(3))
    (run / "report.html").mkdir()
    with pytest.raises(OSError):
        write_report(run)
    try_write_report(run)
    assert "report.html is not written: " in capsys.readouterr().out
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1
