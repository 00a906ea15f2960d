"""Health samples of runs on several processes: rank 0 samples alone, or says why nobody does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qtrain.train.log.metrics import read_metrics
from qtrain.train.state.checkpoint_files import newest_complete
from tests.processes import PRETRAIN, write_pretraining
from tests.system import contents, flags, losses, only_run, serving, write_model

CODES = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_pretraining(folder)
    write_model(folder / "two_heads.json", num_key_value_heads=2)
    with serving(folder) as server:
        yield server


def run(server: Any, runs: Path, **settings: Any) -> Path:
    done = server.run_ranks(2, "llm_pretrain", flags(**{**PRETRAIN, **settings, "runs_dir": runs, "export": False}))
    assert [outcome.code for outcome in done] == [0, 0], "\n".join(outcome.err for outcome in done)
    assert done[1].out == ""
    return only_run(runs)


@pytest.mark.parametrize(
    "settings",
    [{"quantize": "int8", "dp_replicate": 2}, pytest.param(CODES, marks=pytest.mark.sweep)],
    ids=["weights", "codes"],
)
def test_ranks_train_as_without_samples(server, tmp_path, settings):
    off, on = (run(server, tmp_path / f"{n}", health=n, **settings) for n in (0, 2))
    assert losses(off) == losses(on)
    one, other = (contents(newest_complete(folder / "checkpoints")[0]) for folder in (off, on))
    assert all(torch.equal(torch.as_tensor(t), torch.as_tensor(other[name])) for name, t in one.items())
    rows = [row for row in read_metrics(on / "health.jsonl") if row.get("scheme")]
    assert len(rows) == len({(row["step"], row["linear"]) for row in rows}) > 0, "rank 0 alone writes"
    for row in rows:
        # Where ranks gather codes, no rank has the weight that they stand for.
        assert ("w" in row) == (settings["quantize"] == "int8") and {"x", "dy"} <= row.keys()
    assert any("gradient" in row for row in rows) == (settings["quantize"] == "int8")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tp": 2, "model": "two_heads.json"}, "layers are split over ranks"),
        ({"reshard_after_forward": "always"}, "weights are in memory only while their layer runs (full sharding"),
    ],
    ids=["tp", "full_sharding"],
)
def test_where_no_rank_has_whole_layers_a_line_says_so(server, tmp_path, settings, why):
    folder = run(server, tmp_path, quantize="int8", health=2, **settings)
    assert (folder / "train.log").read_text().count(f"health      off: {why}") == 1
    assert not (folder / "health.jsonl").exists()


def test_a_fallback_is_refused_where_ranks_share_codes(server, tmp_path):
    done = server.run_ranks(
        2, "llm_pretrain", flags(**{**PRETRAIN, **CODES, "runs_dir": tmp_path / "runs", "health_fallback": 2})
    )
    assert done[0].code == 2 and not (tmp_path / "runs").exists()
    assert "--health_fallback: weights, or codes of them, are gathered from the ranks' masters" in done[0].err
