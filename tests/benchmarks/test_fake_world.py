"""The plan's memory of a rank against the real mesh, shards and states on a fake process group."""

import time

import pytest
import torch.distributed as dist

from benchmarks import fake_world
from benchmarks.fake_world import Bytes, compare, difference
from qtrain.train.plan import language_run
from qtrain.train.settings.settings import LanguageSettings
from tests.system import write_model

SHAPE = {"hidden_size": 1088, "intermediate_size": 1984, "vocab_size": 1031, "tie_word_embeddings": False}


def settings_of(model: str, world: int, **options) -> LanguageSettings:
    chosen = {"gpu": "h200", "dry_run": True, "quantize": "fp8_tensorwise", "optim": "adamw_8bit", **options}
    return LanguageSettings(model=model, batch_size=world, world_size=world, gpus_per_node=1, **chosen)


def differences(settings: LanguageSettings, *ranks: int) -> list[str]:
    return [difference(planned, held, fullest=rank == 0) for rank, planned, held in compare(settings, ranks)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dp_shard": 30, "optim": "adamw"},
        {"dp_replicate": 4, "quantize": "bf16"},
        {"quantize": "fp8_blockwise"},
        {"reshard_after_forward": "always"},
        {"reshard_after_forward": "always", "dp_replicate": 2, "quantize": "bf16"},
    ],
    ids=str,
)
def test_ranks_of_a_world_hold_what_is_planned(tmp_path, options):
    """60 ranks: no number of rows divides by that."""
    model = write_model(tmp_path / "tiny.json", **SHAPE)
    assert differences(settings_of(model, 60, **options), 0, 1, 59) == ["", "", ""]
    assert not dist.is_initialized()


def test_a_plan_of_equal_shares_is_found_to_be_wrong(tmp_path, monkeypatch):
    model = write_model(tmp_path / "tiny.json", **SHAPE)
    monkeypatch.setattr(language_run, "fullest_share", lambda shapes, shards, needs_whole: 1 / shards)
    (found,) = differences(settings_of(model, 60), 0)
    assert "differ by" in found


def test_other_ranks_may_hold_less_and_none_more():
    planned = Bytes(1000, 100)
    assert not difference(planned, Bytes(990, 50, 10), fullest=False)
    assert difference(planned, Bytes(990, 100, 10), fullest=True).startswith("weights")
    assert difference(planned, Bytes(1000, 120, 10), fullest=False).startswith("states")


def test_the_command(capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        fake_world.main(["--models", "quickstart", "--world_size", "16", "--ranks", "0", "15"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "rank 15 of 16: weights, codes, masters 0.0" in out and "differ" not in out


@pytest.mark.sweep
@pytest.mark.parametrize("model", ["qwen2.5-7b", "llama3.1-70b"])
def test_1024_ranks_in_less_than_a_minute(model):
    started = time.perf_counter()
    assert differences(settings_of(model, 1024), 0, 1, 512, 1023) == [""] * 4
    assert time.perf_counter() - started < 60
