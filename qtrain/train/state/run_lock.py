"""One process per run folder: `run.lock` names the process that writes to it.

The lock is JSON: pid, host, and the start time of the process, which tells it from a later process with the same pid.
A lock is stale if it is from this host and its process is gone; of another host it never is. Processes of one host take
turns at looking at the lock and replacing it (flock on the folder), so that two cannot both find it stale.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from qtrain.core.checks import Range, check_fields
from qtrain.core.errors import UserError
from qtrain.train.log.jsonl import read_object

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = "run.lock"


@dataclass(frozen=True)
class Owner:
    """The process that holds a run folder."""

    pid: Annotated[int, Range(1, 2**31 - 1)]
    host: str
    started: int | None
    """Its start time in the kernel's clock ticks; None where the system does not tell."""
    since: str
    """When it took the lock, for people."""

    @property
    def is_alive(self) -> bool:
        """Whether it may still be writing. A process of another host is taken to be."""
        return self.host != socket.gethostname() or (process_exists(self.pid) and _start_time(self.pid) == self.started)


def check_unlocked(folder: Path) -> None:
    """UserError if a process that may be alive holds the run folder."""
    owner = _read(folder)
    if owner is not None and owner.is_alive:
        raise _in_use(folder, owner)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder, which exists, inside. UserError, naming the owner, if another process holds it."""
    owner = _acquire(folder)
    try:
        yield
    finally:
        if _read(folder) == owner:  # not one that was taken after someone deleted ours
            (folder / NAME).unlink(missing_ok=True)


def process_exists(pid: int) -> bool:
    """Whether there is such a process on this host; one that has ended and was not waited for (a zombie) is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process (proc(5), field 22); None where there is no /proc."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _acquire(folder: Path) -> Owner:
    pid = os.getpid()
    owner = Owner(pid, socket.gethostname(), _start_time(pid), time.strftime("%Y-%m-%d %H:%M:%S"))
    with _turn(folder):
        check_unlocked(folder)
        # Nobody alive holds it: check_unlocked has refused that.
        (folder / NAME).unlink(missing_ok=True)
        try:
            descriptor = os.open(folder / NAME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:  # by a process of another host, in this moment
            raise _in_use(folder, _read(folder)) from None
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(owner), file)
    return owner


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Inside, no other process of this host is in here for the same folder; systems without flock do without."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(folder: Path) -> Owner | None:
    """The owner that the lock names; None without a lock, and for one whose writer was killed while writing it."""
    with contextlib.suppress(UserError):
        return Owner(**check_fields(Owner, read_object(folder / NAME), NAME))
    return None


def _in_use(folder: Path, owner: Owner | None) -> UserError:
    who = f"process {owner.pid} on {owner.host} since {owner.since}" if owner else "another process"
    return UserError(
        f"--resume: {folder} is in use by {who}. Wait for it or stop it; if it is gone, delete {folder / NAME}."
    )
