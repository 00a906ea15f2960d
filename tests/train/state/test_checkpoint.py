"""Checkpoints: complete whenever the process dies, the newest kept, the right one chosen."""

import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch

from qtrain.core.errors import TrainingStopped, UserError
from qtrain.train.state.checkpoint import Checkpoints, newest_whole
from qtrain.train.state.run_folder import resolve_resume

# ---- which checkpoint is kept, and which is chosen ------------------------------------------------------------------


def tiny(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((64,), float(step))}


def test_the_newest_are_kept_and_the_oldest_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 9, 10):
        assert checkpoints.save(step, tiny(step), {}) == tmp_path / f"{step:08d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000009", "00000010"]
    assert checkpoints.latest() == tmp_path / "00000010"


def test_the_one_just_written_is_kept_though_later_steps_exist(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(40, tiny(40), {})
    checkpoints.save(20, tiny(20), {})
    assert (tmp_path / "00000020").is_dir()


def test_damaged_ones_set_aside_are_no_checkpoints_and_are_never_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for _ in range(2):
        checkpoints.set_aside([checkpoints.save(30, tiny(30), {})])
    checkpoints.save(10, tiny(10), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000010", "damaged-00000030", "damaged-00000030-2"]
    assert checkpoints.latest() == tmp_path / "00000010"


def test_the_advice_names_a_checkpoint_that_is_whole(tmp_path):
    run = make_run(tmp_path, "t_small", [10, 20, 30])
    (run / "checkpoints/00000030/COMPLETE").unlink()
    flip(run / "checkpoints/00000020/__0_0.distcp")
    with pytest.raises(UserError, match=r"00000030 .*no COMPLETE.*beside it is .*00000010\."):
        resolve_resume(str(run / "checkpoints/00000030"), tmp_path)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_step_saved_again_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, tiny(1), {"n": 1})
    path = checkpoints.save(3, tiny(2), {"n": 2})
    into = tiny(0)
    assert Checkpoints.load(path, into) == {"n": 2} and into["x"][0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(3, tiny(1), {})
    path.rename(tmp_path / ".old-00000003-1")
    assert checkpoints.latest() == tmp_path / ".old-00000003-1"
    checkpoints.save(3, tiny(2), {})
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]


def test_the_newest_complete_one_is_chosen_not_the_newest_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert checkpoints.latest() is None
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(step, tiny(step), {})
    (tmp_path / "00000005" / "COMPLETE").unlink()
    (tmp_path / "00000004" / "__0_0.distcp").unlink()
    with (tmp_path / "00000003" / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    (tmp_path / "00000099").mkdir()
    (tmp_path / "00000098").write_text("not a folder")
    assert checkpoints.latest() == tmp_path / "00000002"


def test_what_dead_processes_left_is_cleaned_and_what_live_ones_write_is_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".tmp-7-{dead.pid}").mkdir(parents=True)
    (tmp_path / f".tmp-7-{os.getppid()}").mkdir()
    Checkpoints(tmp_path, keep=1).save(8, tiny(8), {})
    assert {p.name for p in tmp_path.iterdir()} == {"00000008", f".tmp-7-{os.getppid()}"}


def test_a_full_disk_stops_with_a_message_and_leaves_the_last_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = checkpoints.save(1, tiny(1), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(TrainingStopped) as raised:
            checkpoints.save(2, {"x": torch.zeros(1_000_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step 2" in str(raised.value) and str(first) in str(raised.value) and "File too large" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    assert checkpoints.latest() == first


def test_every_file_is_on_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """What a kill cannot show but a power failure would: fsync of all files, then of the folder, then the rename."""
    events = []

    def fsync(descriptor, real=os.fsync):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    def rename(source, target, real=os.rename):
        events.append(f"rename to {Path(target).name}")
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = Checkpoints(tmp_path / "c", 1).save(1, tiny(1), {})
    named = events.index("rename to 00000001")
    synced = {event for event in events[:named] if not event.startswith("rename")}
    assert synced == {p.name for p in path.iterdir()} | {f".tmp-1-{os.getpid()}"}
    assert events[named - 2 : named] == ["COMPLETE", f".tmp-1-{os.getpid()}"] and events[named + 1] == "c"


# ---- kill -9 --------------------------------------------------------------------------------------------------------

SAVER = """
import os, random, sys
from pathlib import Path
import torch
from qtrain.train.state.checkpoint import Checkpoints
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:  # a fork per line: one start of Python and torch for all the kills
    child = os.fork()
    if child == 0:
        checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
        last = checkpoints.latest()
        step, parts = 0, 8
        if last is not None:
            state = {"part": {str(n): torch.zeros(20_000) for n in range(parts)}}
            step = checkpoints.load(last, state)["step"]
            assert all((t == step).all() for t in state["part"].values())
        print(f"pid {os.getpid()}", flush=True)
        while True:
            step += 1
            state = {"part": {str(n): torch.full((20_000,), float(step)) for n in range(parts)}}
            checkpoints.save(step, state, {"step": step})
            os.write(1, f"saved {step}\\n".encode())
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_kill_nine_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    """25 kills of a process that does nothing but save. What it reported as saved is never lost."""
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert saver.stdout.readline() == "ready\n"
    checkpoints, chance, saved, caught, one_save = Checkpoints(tmp_path, keep=2), random.Random(0), 0, 0, 0.05
    for kill in range(25):
        print("go", file=saver.stdin, flush=True)
        pid = int(saver.stdout.readline().split()[1])
        for _ in range(2 if kill == 0 else chance.randrange(4)):  # up to three whole saves, then part of another
            begin = time.monotonic()
            saved = int(saver.stdout.readline().split()[1])
            one_save = time.monotonic() - begin
        time.sleep(chance.uniform(0, one_save))
        os.kill(pid, signal.SIGKILL)
        while (line := saver.stdout.readline().split())[0] == "saved":
            saved = int(line[1])
        assert line == ["dead"]
        caught += any(p.name.startswith(".tmp") for p in tmp_path.iterdir())
        state = {"part": {str(n): torch.zeros(20_000) for n in range(8)}}
        step = Checkpoints.load(checkpoints.latest(), state)["step"]
        assert step >= saved
        assert all(torch.equal(t, torch.full((20_000,), float(step))) for t in state["part"].values())
    saver.stdin.close()
    saver.wait(timeout=30)
    assert caught >= 5, f"only {caught} kills came inside a save: too few to mean anything"
    assert len(list(tmp_path.iterdir())) <= 2 + 1 + 1  # two kept, one the last save left over, one not pruned yet


# ---- --resume -------------------------------------------------------------------------------------------------------


def make_run(root: Path, name: str, steps: list[int]) -> Path:
    for step in steps:
        Checkpoints(root / name / "checkpoints", keep=9).save(step, tiny(step), {})
    return root / name


def test_auto_takes_what_was_saved_last_by_a_run_of_the_name(tmp_path):
    make_run(tmp_path, "20250102-000000_small", [30])
    newest = make_run(tmp_path, "20250101-000000_small", [10, 20])  # saved later, though named earlier
    other = make_run(tmp_path, "20250103-000000_very_small", [40])
    (tmp_path / "20250104-000000_small").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert resolve_resume("auto", tmp_path, "small") == newest / "checkpoints" / "00000020"
    assert resolve_resume("auto", tmp_path, "very_small") == other / "checkpoints" / "00000040"
    assert resolve_resume("auto", tmp_path) == other / "checkpoints" / "00000040"


def test_auto_without_a_checkpoint_says_so_and_starts_a_new_run(tmp_path, capsys):
    assert resolve_resume("auto", tmp_path / "none") is None
    make_run(tmp_path, "t_small", [1])
    assert resolve_resume("auto", tmp_path, "large") is None
    assert "no complete checkpoint of a run named 'large'" in capsys.readouterr().out


def test_a_path_may_be_a_run_its_checkpoints_or_one_of_them(tmp_path):
    run = make_run(tmp_path, "t_small", [10, 20])
    newest = run / "checkpoints" / "00000020"
    for given in (run, run / "checkpoints", newest):
        assert resolve_resume(str(given), tmp_path) == newest
    older = run / "checkpoints" / "00000010"
    assert resolve_resume(str(older), tmp_path) == older
    (newest / "COMPLETE").unlink()
    assert resolve_resume(str(run), tmp_path) == older


def test_a_path_without_a_complete_checkpoint_is_refused_with_a_fix(tmp_path):
    run = make_run(tmp_path, "t_small", [10, 20])
    newest = run / "checkpoints" / "00000020"
    (newest / "COMPLETE").unlink()
    with pytest.raises(UserError, match=r"00000020 .*no COMPLETE.*beside it is .*00000010"):
        resolve_resume(str(newest), tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        resolve_resume(str(run / "nowhere"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint in it"):
        resolve_resume(str(tmp_path / "empty"), tmp_path)


DAMAGED = "its COMPLETE file is damaged"
BREAK = {
    "no marker": (lambda path: (path / "COMPLETE").unlink(), "it has no COMPLETE file"),
    "a damaged marker": (lambda path: (path / "COMPLETE").write_text("{"), DAMAGED),
    "an endless marker": (lambda path: relink(path / "COMPLETE", "/dev/zero"), DAMAGED),
    "a FIFO": (
        lambda path: (path / "COMPLETE").unlink() or os.mkfifo(path / "COMPLETE"),
        "its COMPLETE file is damaged",
    ),
    "a missing file": (lambda path: (path / "meta.json").unlink(), "its file meta.json is missing"),
    "a lost folder": (
        lambda path: path.rename("moved") and path.symlink_to("/nowhere"),
        "a link to a folder",
    ),
}


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("case", BREAK)
def test_auto_does_not_start_again_beside_a_damaged_checkpoint(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "t_small", [10])
    path = run / "checkpoints/00000010"
    break_it, why = BREAK[case]
    break_it(path)
    with pytest.raises(UserError, match=rf"00000010 .*{why}.*from step 0, leave --resume out, or rename .*10\."):
        resolve_resume("auto", tmp_path, "small")
    with pytest.raises(UserError, match=rf"00000010 .*{why}"):
        resolve_resume(str(run), tmp_path)
    path.rename(path.with_name("set-aside"))
    assert resolve_resume("auto", tmp_path, "small") is None


def test_auto_starts_again_after_a_kill_in_the_first_save(tmp_path, capsys):
    (tmp_path / "t_small/checkpoints/.tmp-10-99999999").mkdir(parents=True)
    assert resolve_resume("auto", tmp_path, "small") is None
    assert "no complete checkpoint" in capsys.readouterr().out


def test_auto_says_which_damaged_checkpoints_it_passes_over(tmp_path, capsys):
    whole = make_run(tmp_path, "1_small", [10]) / "checkpoints/00000010"
    broken = make_run(tmp_path, "2_small", [20]) / "checkpoints/00000020"
    (broken / "COMPLETE").unlink()
    assert resolve_resume("auto", tmp_path, "small") == whole
    assert f"--resume auto: {broken} is skipped: it has no COMPLETE" in capsys.readouterr().out


def test_the_whole_checkpoint_that_is_advised_is_not_the_damaged_one(tmp_path):
    """Its index has the right checksum and is none."""
    checkpoints = Checkpoints(tmp_path, keep=9)
    older, path = (checkpoints.save(step, tiny(step), {}) for step in (1, 2))
    rewrite(path, ".metadata", b"no pickle")
    with pytest.raises(UserError, match=r"its file \.metadata is not a checkpoint's"):
        Checkpoints.load(path, tiny(0))
    assert newest_whole(tmp_path) == older == newest_whole(tmp_path, {path})
    assert newest_whole(tmp_path, {older}) is None


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Replace a file of a checkpoint, and its checksum."""
    (path / name).write_bytes(data)
    marker = json.loads((path / "COMPLETE").read_text())
    marker["files"][name] = [len(data), zlib.crc32(data)]
    (path / "COMPLETE").write_text(json.dumps(marker))


def test_torchs_advice_to_run_code_is_not_passed_on(tmp_path):
    path = Checkpoints(tmp_path, keep=1).save(1, tiny(1), {})
    buffer = io.BytesIO()
    torch.save(tmp_path, buffer)  # a path is no tensor
    size = (path / "__0_0.distcp").stat().st_size
    rewrite(path, "__0_0.distcp", buffer.getvalue().ljust(size, b"\0"))
    with pytest.raises(UserError) as caught:
        Checkpoints.load(path, tiny(0))
    assert "other objects than tensors" in str(caught.value) and "weights_only" not in str(caught.value)
