"""A run folder as the report reads it: what is damaged is counted and left out, what is missing is empty."""

import json
import os

import numpy as np
import pytest

from qtrain.train.log.jsonl import MAX_LINE
from qtrain.train.log.report.records import damage, planned_memory, read_run
from tests.train.log.report.pages import page_of, records, write_run

GOOD = {"step": 1, "loss": 2.0}


def test_a_curve_has_every_unit_of_the_x_axis(tmp_path):
    rows = [
        {"step": 2, "loss": 3.0, "tokens": 200, "time": 3600.0, "joules_token": 0.5},
        {"step": 3, "eval_loss": 2.5},
        {"step": 4, "loss": 2.0, "tokens": 400, "time": 7200.0, "joules_token": 0.25},
    ]
    run = read_run(write_run(tmp_path / "run", rows))
    loss, validation = run.curve("loss"), run.curve("eval_loss")
    assert loss.y.tolist() == [3.0, 2.0] and loss.x["steps"].tolist() == [2, 4]
    assert loss.x["tokens"].tolist() == [200, 400] and loss.x["hours"].tolist() == [0, 1]
    assert loss.x["joules"].tolist() == [100, 150]
    assert validation.x["tokens"].tolist() == [300] and validation.x["hours"].tolist() == [0.5]
    assert run.curve("unknown") is None


def test_the_time_between_a_stop_and_the_resumed_run_does_not_count(tmp_path):
    rows = [{"step": n, "loss": 1.0, "time": 10.0 * n + (86_400 if n > 5 else 0)} for n in range(1, 11)]
    hours = read_run(write_run(tmp_path / "run", rows)).curve("loss").x["hours"]
    assert hours[-1] == pytest.approx(90 / 3600)


def test_steps_that_are_logged_again_count_once(tmp_path):
    """As after a return to a checkpoint: the later line of a step."""
    rows = [{"step": n, "loss": float(n)} for n in (1, 2, 3)] + [{"step": n, "loss": 10.0 + n} for n in (2, 3, 4)]
    assert read_run(write_run(tmp_path / "run", rows)).curve("loss").y.tolist() == [1, 12, 13, 14]


DAMAGED = {
    "half a line": ['{"step": 2, "lo'],
    "no JSON": ["hello"],
    "a list": ["[1, 2]"],
    "a number": ["7"],
    "no step": ['{"loss": 1.0}'],
    "a word for a step": ['{"step": "two", "loss": 1.0}'],
    "a fraction for a step": ['{"step": 1.5, "loss": 1.0}'],
    "true for a step": ['{"step": true, "loss": 1.0}'],
    "a negative step": ['{"step": -1, "loss": 1.0}'],
    "a step beyond floats": ['{"step": 1' + "0" * 400 + ', "loss": 1.0}'],
    "NUL bytes": ["\0" * 100],
    "deep nesting": ["[" * 100_000],
    "not UTF-8": ["\udcff\udcfe"],
    "a long line": ["x" * (2 * MAX_LINE)],
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_line_is_counted_and_left_out(tmp_path, case):
    run = write_run(tmp_path / "run", [])
    text = "\n".join([json.dumps(GOOD), *DAMAGED[case], json.dumps({**GOOD, "step": 9}), '{"step": 10, "lo'])
    (run / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    read = read_run(run)
    assert read.curve("loss").x["steps"].tolist() == [1, 9]
    assert damage(read) == "metrics.jsonl: 1 damaged line is left out", "the last line is being written"


VALUES = {
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "null": "null",
    "text": '"two"',
    "a list": "[1]",
    "an object": '{"a": 1}',
    "true": "true",
    "beyond floats": "1" + "0" * 400,
    "1e305": "1e305",
}


@pytest.mark.parametrize("case", VALUES)
def test_a_value_that_is_no_number_is_left_out(tmp_path, case):
    keys = ("grad_norm", "eval_loss", "tokens", "time", "gpu", "ms", "samples", "joules_token")
    values = ", ".join(f'"{key}": {VALUES[case]}' for key in keys)
    rows = [json.dumps(GOOD | {"tokens": 5}), f'{{"step": 2, "loss": 3.0, {values}}}']
    page = page_of(write_run(tmp_path / "run", rows))
    assert "loss-linear" in page.charts and "NaN" not in json.dumps(page.data["data"])


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "{'a': 1}", "\0", "[" * 100_000])
def test_a_damaged_config_is_said(tmp_path, content):
    run = write_run(tmp_path / "run", records(3))
    (run / "config.json").write_text(content)
    read = read_run(run)
    assert read.config == {} and damage(read) == "config.json cannot be read"


@pytest.mark.parametrize(
    "config", [{"n_steps": "many"}, {"_versions": 3, "_command": 4}, {"early_stopping": []}, {"a": {"b": [1]}}]
)
def test_a_config_of_other_types_is_drawn(tmp_path, config):
    assert "Steps" in page_of(write_run(tmp_path / "run", records(3), config)).text


@pytest.mark.parametrize("name", ["metrics.jsonl", "health.jsonl", "config.json", "train.log"])
def test_what_is_no_file_is_not_read(tmp_path, name):
    """A FIFO would never end."""
    run = write_run(tmp_path / "run", records(3))
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    read_run(run)


HEALTH = [
    {"step": 1, "linear": 7, "x": {"error": 1}},
    {"step": 1, "linear": "a", "x": 3},
    {"step": 1, "linear": "layers.99999999999999999999.b", "x": {"error": 0.5}},
    {"step": 1, "linear": "b", "x": {"error": "much", "amax": None}, "what_if": [1]},
    {"step": 1, "linear": "b", "x": {"error": 0.1}, "what_if": {"int8": 3, "fp8": {"x": "?"}}},
    {"step": 1, "linear": "r", "scheme": None, "experts": {"load": "all"}},
    {"step": 1, "linear": "r", "scheme": None, "experts": {"load": [0.5, "x"]}},
    {"step": 1, "linear": "r", "scheme": None, "experts": {"load": []}},
    {"step": 1, "warning": ["no", "text"]},
]


def test_samples_of_other_types_are_left_out(tmp_path):
    page = page_of(write_run(tmp_path / "run", ["{", *records(3)], {}, HEALTH))
    assert page.data["heat-health"]["rows"]["b"] == ["9" * 20, "b"]
    assert "heat-experts" not in page.charts and "1 damaged line is left out" in page.text


def test_the_plan_is_the_first_entry_of_the_log(tmp_path):
    run = write_run(tmp_path / "run", records(3))
    (run / "train.log").write_text(
        "2026-11-26 00:54:19,161 INFO model   tiny, 4.2M parameters\n"
        "device  CPU, measured TFLOP/s: fp32 0.186\n        torch 2.13.0\n"
        "memory  3.00 of 24 GiB, most at the loss: weights 0.25, optimizer 0.75, CUDA and its allocator 2.00\n"
        "linears\n   4 x layers.attn.qkv 256 -> 512: quantized\n"
        "2026-11-26 00:54:20,000 INFO memory  0 of it: other 9.99\n"
    )
    read = read_run(run)
    assert read.plan[:3] == (
        ("model", "tiny, 4.2M parameters"),
        ("device", "CPU, measured TFLOP/s: fp32 0.186"),
        ("device", "torch 2.13.0"),
    )
    assert planned_memory(read) == {"weights": 0.25, "optimizer": 0.75, "CUDA and its allocator": 2.0}
    page = page_of(run)
    assert "optimizer0.75 GiB" in page.text and "planned in all3.00 GiB" in page.text
    assert "measured peak of tensors0.00 GiB" in page.text
    assert np.isclose(read.curve("mem").y.max(), 3 * 2**20)
