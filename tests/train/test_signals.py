"""Stop signals in a real process: the step is finished, a second Ctrl-C ends it, forked workers still die."""

import os
import signal
import subprocess
import sys
import time

import pytest

from qtrain.train.signals import TIME_UP, TIME_UP_NUMBER, StopSignals

LOOP = """
import time
from qtrain.train.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    for step in range(1000):
        time.sleep(0.02)
        time.sleep(SLOW)
        print("step", step, flush=True)
        if stop.requested:
            print("saved after", stop.requested, flush=True)
            break
"""


def start(slow: float) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP.replace("SLOW", str(slow))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_the_step_is_finished_and_the_state_saved(name):
    process = start(slow=0)
    process.send_signal(signal.Signals[name])
    out, err = process.communicate(timeout=30)
    lines = out.splitlines()
    assert process.returncode == 0
    assert lines[-1] == f"saved after {name}" and lines[-2].startswith("step")
    assert name in err


def test_a_second_interrupt_ends_the_process_at_once():
    process = start(slow=60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.8)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT and "saved" not in out


def test_time_that_is_up_stops_with_exit_code_0():
    """In one process at once; in several when they agree, as on a signal, which comes first."""
    with StopSignals(deadline=time.monotonic() + 60) as early, StopSignals(deadline=0) as up:
        assert early.requested is None and early.number == 0
        assert up.requested == TIME_UP and up.number == TIME_UP_NUMBER and up.exit_code == 0
    with StopSignals(collective=True, deadline=0) as stop:
        assert stop.requested is None and stop.number == TIME_UP_NUMBER
        stop.agree(TIME_UP_NUMBER)
        assert stop.requested == TIME_UP and stop.exit_code == 0
    with StopSignals(deadline=0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM" and stop.exit_code == 143


def test_a_key_press_that_a_launcher_forwards_counts_once():
    process = start(slow=0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "saved after SIGINT" in out


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_worker_dies_by_terminate_and_survives_interrupts():
    with StopSignals() as stop:
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGUSR1)
        time.sleep(0.2)
        assert os.waitpid(worker, os.WNOHANG) == (0, 0)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert stop.requested is None


def test_the_former_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested == "SIGUSR1"
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested is None and stop.exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_the_exit_code_is_that_of_a_shell(name, code):
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.Signals[name])
    assert stop.exit_code == code


def test_a_platform_without_these_signals_can_import_it(monkeypatch):
    """Windows has neither SIGHUP nor SIGUSR1."""
    lacks = (
        "import signal; del signal.SIGUSR1, signal.SIGHUP; from qtrain.train.signals import GROUP_SIGNALS, StopSignals"
    )
    run = f"{lacks}\nwith StopSignals(): print(*(s.name for s in GROUP_SIGNALS))"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.stdout.split() == ["SIGINT", "SIGTERM"], done.stderr
