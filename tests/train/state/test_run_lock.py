"""The lock of a run folder: held by one live process, taken over from a dead one, never from another host's."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from qtrain.core.errors import UserError
from qtrain.train.state.run_lock import NAME, _read, check_unlocked, locked, process_exists


def write(folder: Path, **changes) -> Path:
    """A lock of a process that has ended, but for `changes`."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = {"pid": ended.pid, "host": socket.gethostname(), "started": 5, "since": "2026-01-02 03:04:05"}
    (folder / NAME).write_text(json.dumps({**owner, **changes}))
    return folder / NAME


def test_it_names_its_owner_while_held_and_is_gone_afterwards(tmp_path):
    with locked(tmp_path):
        owner = json.loads((tmp_path / NAME).read_text())
        assert owner["pid"] == os.getpid() and owner["host"] == socket.gethostname()
        message = f"--resume: {tmp_path} is in use by process {os.getpid()} on {socket.gethostname()} since "
        for held in (lambda: check_unlocked(tmp_path), lambda: locked(tmp_path).__enter__()):
            with pytest.raises(UserError) as error:
                held()
            assert str(error.value).startswith(message) and NAME in str(error.value)
        assert json.loads((tmp_path / NAME).read_text()) == owner
    assert not (tmp_path / NAME).exists()
    check_unlocked(tmp_path)


def test_an_error_inside_releases_it(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    assert not (tmp_path / NAME).exists()


def test_a_dead_process_holds_nothing(tmp_path):
    write(tmp_path)
    check_unlocked(tmp_path)
    with locked(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="start times come from /proc")
def test_another_process_with_the_same_pid_is_not_the_owner(tmp_path):
    write(tmp_path, pid=os.getppid(), started=5)
    check_unlocked(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="zombies are known from /proc")
def test_a_zombie_holds_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it has closed its output, at its end
    while "Z" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]:
        pass
    assert not process_exists(process.pid) and process_exists(os.getpid())
    process.wait()


def test_another_hosts_lock_is_never_taken(tmp_path):
    path = write(tmp_path, host="elsewhere")
    before = path.read_text()
    says = r"by process \d+ on elsewhere since 2026-01-02 03:04:05.*delete"
    with pytest.raises(UserError, match=says), locked(tmp_path):
        pass
    assert path.read_text() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}'])
def test_a_truncated_lock_holds_nothing(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    with locked(tmp_path):
        pass


def test_a_lock_that_another_process_has_taken_is_not_removed(tmp_path):
    with locked(tmp_path):
        path = write(tmp_path, host="elsewhere")
    assert path.exists()


def hold(folder: Path, start, end, results) -> None:
    start.wait()
    try:
        with locked(folder):
            results.put("held")
            end.wait()
    except UserError:
        results.put("refused")


def test_one_of_many_processes_takes_over_a_stale_lock(tmp_path):
    write(tmp_path)
    context = multiprocessing.get_context("fork")
    start, end, results = context.Event(), context.Event(), context.Queue()
    processes = [context.Process(target=hold, args=(tmp_path, start, end, results)) for _ in range(8)]
    for process in processes:
        process.start()
    start.set()
    found = sorted(results.get(timeout=60) for _ in processes)
    end.set()
    for process in processes:
        process.join()
    assert found == ["held"] + ["refused"] * 7 and not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "changes", [{"pid": "x"}, {"pid": 2**70}, {"pid": -1}, {"host": 5}, {"since": []}, {"extra": 1}]
)
def test_a_lock_that_no_process_wrote_is_replaced(tmp_path, changes):
    write(tmp_path, **changes)
    check_unlocked(tmp_path)
    with locked(tmp_path):
        pass


def test_a_lock_of_thousands_of_brackets_is_replaced(tmp_path):
    (tmp_path / NAME).write_text("[" * 100_000)
    with locked(tmp_path):
        pass


def test_a_lock_that_is_no_file_names_no_owner(tmp_path):
    """Reading a FIFO would wait for ever, and /dev/zero never ends."""
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(tmp_path / NAME)
        assert _read(tmp_path) is None
        (tmp_path / NAME).unlink()
