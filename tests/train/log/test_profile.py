"""--profile: the trace and the table are of the steps after warm-up, and off means off."""

import gzip
import json
import logging
import re

import torch
from torch import nn

from qtrain.train.log.profile import StepProfiler


def run(tmp_path, caplog, run_steps: int, **kwargs) -> str:
    logger = logging.getLogger("test_profile")
    model = nn.Linear(32, 32)
    with caplog.at_level(logging.INFO, logger="test_profile"), StepProfiler(tmp_path, logger, **kwargs) as profiler:
        for step in range(run_steps):
            x = torch.randn(8, 32)
            if step in (0, 8):  # outside the recorded steps
                torch.linalg.svd(torch.eye(8))
            model(x).sum().backward()
            profiler.step()
    return caplog.text


def test_the_trace_holds_the_recorded_steps_only(tmp_path, caplog):
    text = run(tmp_path, caplog, 10, enabled=True, skip=3, steps=3)
    with gzip.open(tmp_path / "profile" / "trace_rank0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("aten::addmm") == 3
    assert "aten::linalg_svd" not in names
    assert "aten::addmm" in text and "Self CPU" in text and "trace_rank0.json.gz" in text


def test_the_table_of_kernels_is_per_step(tmp_path, caplog):
    text = run(tmp_path, caplog, 10, enabled=True, skip=3, steps=3, floor={"blocks": 1.0, "head": 0.5})
    table = (tmp_path / "profile/kernels_rank0.txt").read_text()
    (row,) = (line for line in table.splitlines() if line.startswith("GEMM  "))
    assert row.split()[3] == "2"  # forward, and backward of the weight: the input needs no gradient
    (row,) = (line for line in table.splitlines() if line.startswith("all GEMMs"))
    assert row.split()[5] == "1.500" and row.endswith("x")
    assert re.search(r"\d x  aten::addmm", table) and "ms of the device: " in text and "kernels_rank0.txt" in text


def test_a_run_that_ends_too_early_says_so(tmp_path, caplog):
    text = run(tmp_path, caplog, 2, enabled=True, skip=3, steps=3)
    assert "it needs 7 steps" in text
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_while_recording_still_writes(tmp_path, caplog):
    run(tmp_path, caplog, 5, enabled=True, skip=2, steps=5)
    table = (tmp_path / "profile/kernels_rank0.txt").read_text()
    assert " 1 x  aten::addmm" in table  # of the two steps that were recorded
    assert (tmp_path / "profile" / "trace_rank0.json.gz").exists()


def test_disabled_it_writes_and_logs_nothing(tmp_path, caplog):
    assert run(tmp_path, caplog, 3, enabled=False) == ""
    assert not list(tmp_path.iterdir())
