"""What a record says of the device, in a run with a stand-in for its sensors; joules of several ranks are added."""

from pathlib import Path

import pytest
import torch

import llm_pretrain
import qtrain.train.records as records
from qtrain.train.log import energy
from qtrain.train.log.device_metrics import device_metrics, joules_of_all
from qtrain.train.log.metrics import IMAGES, TOKENS, Rate, read_metrics
from tests.data.corpora import write_jsonl
from tests.system import call, flags, only_run, write_model
from tests.worlds import run_ranks

CPU = torch.device("cpu")


class Sensors:
    """A GPU of 500 W, by the number of times that its counter was read."""

    available, reads = True, 0

    def __init__(self, device=None):
        Sensors.reads = 0

    def read(self):
        return {"util": 97, "sm_clock": 1755, "throttled": ["power cap"]}

    def power(self):
        return 612.5

    def joules(self):
        Sensors.reads += 1
        return 100.0 * Sensors.reads


def test_power_is_the_mean_where_it_is_known_and_else_that_of_now():
    rate = Rate(2000.0, 0.5, 0.1, ms={"data": 1.23456, "optimizer": 2.0}, power=499.96, joules_token=0.25)
    assert device_metrics(Sensors(), {"util": 97}, rate, TOKENS) == {
        "gpu": {"util": 97, "power": 500.0},
        "ms": {"data": 1.235, "optimizer": 2.0},
        "hours_billion": 1e9 / 2000 / 3600,
        "joules_token": 0.25,
    }
    assert device_metrics(Sensors(), {"util": 97}, None, TOKENS) == {"gpu": {"util": 97, "power": 612.5}}
    assert "hours_billion" not in device_metrics(Sensors(), {}, rate, IMAGES)


def test_a_run_logs_its_device(tmp_path, monkeypatch):
    """From the first step on; joules once enough time has been counted. The slow counter is read now and then only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "GpuSensors", Sensors)
    monkeypatch.setattr(energy, "ENERGY_SECONDS", 0.0)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    text = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    settings = {"model": "tiny.json", "train_ds": text, "seq_len": 32, "n_steps": 12, "eval_interval": 0}
    done = call(llm_pretrain.main, flags(**settings, log_interval=4, export=False, device="cpu"))
    assert done.code == 0, done.err
    rows = [r for r in read_metrics(only_run(Path("runs")) / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in rows] == [4, 8, 12]
    assert all(r["gpu"] | {"power": 0} == {**Sensors().read(), "power": 0} for r in rows)
    assert " W | " in done.out
    # 100 J between two readings, over the tokens between: two counted steps, then four.
    assert [r["joules_token"] for r in rows] == pytest.approx([100 / 256, 100 / 512, 100 / 512])


def _joules(known: tuple[float | None, ...]) -> float | None:
    from qtrain.comm.ranks import rank

    return joules_of_all(known[rank()], CPU)


@pytest.mark.parametrize(("known", "total"), [((0.25, 0.5), 0.75), ((0.25, None), None)])
def test_joules_of_all_ranks_are_added(known, total):
    assert run_ranks(2, _joules, known) == [total, total]
