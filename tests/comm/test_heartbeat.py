"""Heartbeats: a rank that hangs is named, once; one that is slow, done, or was paused with all others is not."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from qtrain.comm import heartbeat, ranks
from qtrain.comm.heartbeat import Heartbeat
from tests.cases import sampled
from tests.system import wait_until
from tests.worlds import run_ranks


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.6)


@pytest.fixture
def world(capfd):
    """Starts the heartbeats of a world in this process. Returns them, the codes they ended with, and a reader of what
    they said."""
    started, ended, store = [], [], dist.HashStore()

    def start(size: int, patience: float = 60) -> tuple:
        started.extend(Heartbeat(store, rank, size, patience, end=ended.append) for rank in range(size))
        time.sleep(0.3)
        return started, ended, lambda: capfd.readouterr().err

    yield start
    for beats in started:
        beats.stop()


def silence(beats: Heartbeat) -> None:
    beats._write = lambda beat: None


@pytest.mark.parametrize(("size", "hung"), sampled([(2, 1), (3, 0), (4, 2)], lambda size, hung: hung != 0))
def test_a_rank_without_a_beat_is_named_once(world, size, hung):
    started, ended, said = world(size)
    started[hung].step = 12
    time.sleep(0.2)
    silence(started[hung])
    wait_until(lambda: ended, 5)
    time.sleep(0.3)
    assert ended == [1]
    message = said()
    assert message.startswith(f"error: rank {hung} (process {os.getpid()} on ") and message.count("\n") == 1
    assert "last step 12) does not answer" in message and "--resume auto" in message


def test_two_ranks_that_hang_are_one_message(world):
    started, ended, said = world(4)
    silence(started[1])
    silence(started[3])
    wait_until(lambda: ended, 5)
    time.sleep(0.8)
    assert ended == [1] and said().count("error:") == 1


def test_a_rank_that_is_elsewhere_while_the_others_wait_is_named_with_its_place(world):
    started, ended, said = world(3, patience=0.5)
    for rank, beats in enumerate(started):
        beats._place = lambda rank=rank: ("qtrain/data/prefetch.py:88 (next)", False) if rank == 1 else ("x", True)
    wait_until(lambda: ended, 5)
    message = said()
    assert message.startswith("error: rank 1 (") and "has kept the others waiting for 0 s (--rank_timeout)" in message
    assert "it is at qtrain/data/prefetch.py:88 (next)" in message and message.count("\n") == 1
    assert ", in set-up) has kept" in message


def test_ranks_that_go_on_are_done_or_all_wait_are_not_named(world):
    started, ended, said = world(3, patience=0.3)
    for beats in started:
        beats._place = lambda beats=beats: ("collective", True)
    for step in range(20):
        started[0].step = step  # in the same collective, of another step
        time.sleep(0.05)
    started[2].stop()
    time.sleep(1)
    assert ended == [] and said() == ""


def test_a_pause_of_the_whole_machine_is_nobodys_fault(world):
    started, ended, said = world(2)
    paused = [True, True]

    def pause(beats: Heartbeat, number: int, write=Heartbeat._write) -> None:
        def paused_write(beat: dict) -> None:
            if paused[number]:
                time.sleep(1 + 0.2 * number)  # longer than SILENT_SECONDS; rank 1 comes back later
                paused[number] = False
            write(beats, beat)

        beats._write = paused_write

    for number, beats in enumerate(started):
        pause(beats, number)
    time.sleep(2.2)
    assert ended == [] and said() == ""


def _stop_itself() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.all_gather(0)


def test_a_stopped_process_ends_the_world(capfd):
    with pytest.raises(AssertionError, match="rank 0: ended with code"):
        run_ranks(2, _stop_itself)
    errors = capfd.readouterr().err
    assert errors.count("error: ") == 1 and "rank 1" in errors and "does not answer" in errors


def test_the_place_of_the_main_thread_is_seen(world):
    started, _, _ = world(1)
    place, waits = started[0]._place()
    assert "heartbeat" in place and waits  # called from this package here, in qtrain/comm
