"""Choosing by measurement: timed once and cached, forced by the environment, robust against a damaged file."""

import json

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.kernels import autotune
from qtrain.kernels.autotune import FIRST_ROUNDS, ROUNDS

NAMES = ["triton a", "triton b", "cublas"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no settings from the environment of the tests."""
    monkeypatch.setenv("QTRAIN_CACHE", str(tmp_path))
    for name in ("QTRAIN_IMPL", "QTRAIN_TUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    autotune._choices.cache_clear()
    yield tmp_path
    autotune._choices.cache_clear()


def timed(monkeypatch, winner: str) -> list[list[str]]:
    """Makes `winner` the fastest; returns the lists of names that were timed."""
    seen: list[list[str]] = []

    def fastest(names, run):
        seen.append(list(names))
        return winner

    monkeypatch.setattr(autotune, "_fastest", fastest)
    return seen


def choose(*key: object, names: list[str] = NAMES, run: autotune.Run = lambda name: None) -> str:
    return autotune.choose("mm", key, names, run)


def test_times_once_and_remembers_across_processes(monkeypatch, cache):
    seen = timed(monkeypatch, "triton b")
    assert choose(1, torch.int8) == choose(1, torch.int8) == "triton b" and seen == [NAMES]
    (file,) = cache.iterdir()
    ((entry, name),) = json.loads(file.read_text()).items()
    assert entry.startswith("mm 1 int8 ") and name == "triton b"
    autotune._choices.cache_clear()  # as a new process
    assert choose(1, torch.int8) == "triton b" and len(seen) == 1
    assert choose(2, torch.int8) == "triton b" and len(seen) == 2


def test_times_again_with_other_kernels(monkeypatch, cache):
    """A choice that was right for an earlier kernel of the same name would stand for ever."""
    seen = timed(monkeypatch, "triton b")
    choose(1)
    monkeypatch.setattr(autotune, "kernels_checksum", lambda: 1)
    autotune._choices.cache_clear()
    assert choose(1) == "triton b" and len(seen) == 2 and len(list(cache.iterdir())) == 2


def test_what_comes_with_the_package_is_not_timed(monkeypatch, cache, tmp_path_factory):
    """Unless that is asked for, or it names a candidate that is no longer there."""
    seen = timed(monkeypatch, "triton b")
    choose(1)
    (file,) = cache.iterdir()
    shipped = tmp_path_factory.mktemp("shipped")
    device = file.name.removeprefix("tuning-").partition("-kernels-")[0]
    (entry,) = json.loads(file.read_text())
    other = entry.replace("mm 1", "mm 2")
    (shipped / f"{device}.json").write_text(json.dumps({entry: "cublas", other: "cublas", other + " x": "gone"}))
    monkeypatch.setattr(autotune, "SHIPPED", shipped)
    autotune._shipped.cache_clear()
    assert choose(1) == "triton b"  # this machine's own choice comes first
    assert choose(2) == "cublas" and len(seen) == 1
    assert list(json.loads(file.read_text())) == [entry]
    monkeypatch.setenv("QTRAIN_TUNE", "0")
    assert choose(2) == "cublas"
    monkeypatch.setenv("QTRAIN_TUNE", "all")
    assert choose(2) == "triton b" and len(seen) == 2
    autotune._shipped.cache_clear()


def test_what_another_process_has_added_meanwhile_is_kept(monkeypatch, cache):
    timed(monkeypatch, "triton b")
    choose(1)
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "mm 2 of another process": "cublas"}))
    choose(3)
    assert [entry.split()[1] for entry in sorted(json.loads(file.read_text()))] == ["1", "2", "3"]


def test_a_choice_that_is_no_longer_offered_is_timed_again(monkeypatch):
    timed(monkeypatch, "triton b")
    choose(1)
    seen = timed(monkeypatch, "cublas")
    assert choose(1, names=["triton a", "cublas"]) == "cublas" and len(seen) == 1


def test_a_further_name_is_timed(monkeypatch):
    timed(monkeypatch, "triton b")
    choose(1)
    seen = timed(monkeypatch, "triton c")
    assert choose(1, names=[*NAMES, "triton c"]) == "triton c" and len(seen) == 1
    assert choose(1) == "triton b" and len(seen) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe"])
def test_a_damaged_file_is_ignored(monkeypatch, cache, content):
    timed(monkeypatch, "cublas")
    choose(1)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    autotune._choices.cache_clear()
    seen = timed(monkeypatch, "triton a")
    assert choose(1) == "triton a" and len(seen) == 1


def test_a_cache_that_is_not_writable_is_no_error(monkeypatch, cache):
    (cache / "file").write_text("")
    monkeypatch.setenv("QTRAIN_CACHE", str(cache / "file" / "below"))
    timed(monkeypatch, "cublas")
    assert choose(1) == "cublas"


def test_the_environment_forces_a_family(monkeypatch):
    seen = timed(monkeypatch, "triton b")
    monkeypatch.setenv("QTRAIN_IMPL", "cublas")
    assert choose(1) == "cublas" and not seen  # the only one of its family
    monkeypatch.setenv("QTRAIN_IMPL", "triton")
    assert choose(1) == "triton b" and seen == [NAMES[:2]]
    monkeypatch.delenv("QTRAIN_IMPL")
    seen = timed(monkeypatch, "cublas")
    assert choose(1) == "cublas" and len(seen) == 1, "a forced choice was taken for a free one"


def test_an_unknown_family_is_refused(monkeypatch):
    monkeypatch.setenv("QTRAIN_IMPL", "tritn")
    with pytest.raises(UserError, match=r"QTRAIN_IMPL.*tritn.*triton"):
        choose(1)


def test_the_first_name_stands_where_nothing_is_timed(monkeypatch):
    seen = timed(monkeypatch, "cublas")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(1) == "triton a"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv("QTRAIN_TUNE", "0")
    assert choose(1) == "triton a" and not seen


def test_a_candidate_without_enough_memory_is_left_out():
    def run(name: str) -> None:
        if name in without:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    without = {"cublas", "triton b"}
    assert choose(1, run=run) == "triton a"
    without = set(NAMES)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        choose(2, run=run)


def test_a_slow_candidate_is_not_timed_to_the_end(monkeypatch):
    """The device is a clock that every run advances."""
    now, runs = [0.0], dict.fromkeys(("slow", "near", "fast"), 0)

    class Event:
        def __init__(self, enable_timing: bool):
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    def run(name: str) -> None:
        runs[name] += 1
        now[0] += {"slow": 1.3, "near": 1.1, "fast": 1.0}[name]

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(1, dtype=dtype))
    monkeypatch.setattr(autotune, "compile_together", lambda calls: None)
    assert autotune._fastest([*runs], run) == "fast"
    # Each once before it is timed.
    assert runs == {"slow": 1 + FIRST_ROUNDS, "near": 1 + ROUNDS, "fast": 1 + ROUNDS}


@pytest.mark.gpu
def test_takes_the_fastest_that_runs():
    small, large = (torch.randn(size, size, device="cuda") for size in (64, 4096))

    def run(name: str) -> torch.Tensor:
        if name == "broken":
            raise RuntimeError("no room")
        x = large if name == "slow" else small
        return x @ x

    assert autotune.choose("mm", (), ["slow", "broken", "fast"], run) == "fast"
