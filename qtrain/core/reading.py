"""Files that never end or never answer: FIFOs, sockets and devices; and reading small files without trusting them."""

import errno
import os
import select
import stat
import time
from pathlib import Path

from qtrain.core.errors import UserError

FIFO_SECONDS = 10
"""How long a recipe may take to come out of a FIFO, as `--config <(command)` gives one."""


def special_file(path: str | Path) -> str | None:
    """What a path is that is neither a regular file nor a folder, in words; None for those two and where nothing is."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if not os.path.islink(path):
            return None
        leads = {
            errno.ELOOP: "a symbolic link that leads back to itself",
            errno.ENOENT: f"a symbolic link to {os.readlink(path)!r}, which does not exist",
        }
        return leads.get(error.errno or 0)
    return _kind(mode)


def _kind(mode: int) -> str | None:
    kind = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return f"a {kind[stat.S_IFMT(mode)]}, not a regular file" if stat.S_IFMT(mode) in kind else None


def refuse_special(path: str | Path, flag: str) -> None:
    """UserError naming `flag` for what `special_file` names: data are read more than once, and from the middle."""
    if kind := special_file(path):
        fix = " Write its contents to a file and give that." if "not a regular file" in kind else ""
        raise UserError(f"{flag}: {str(path)!r} is {kind}.{fix}")


def refuse_other(path: str | Path, flag: str, fix: str = "") -> None:
    """UserError naming `flag` for what is at `path` in place of a file: a folder, a FIFO, a device. Reading it may fail
    or never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{flag}: {path} is not a file{fix}.")


def read_small(path: str | Path, most: int, fifo_seconds: float = 0) -> bytes:
    """The contents of a regular file of at most `most` bytes. OSError for another one, whose strerror says why.

    fifo_seconds: also read a FIFO, which must be written and closed within this time; 0: refuse it."""
    kind = _kind(os.stat(path).st_mode)
    if kind and not (fifo_seconds and "FIFO" in kind):
        raise OSError(errno.EINVAL, f"it is {kind}")
    with open(path, "rb", opener=_open_at_once) as file:
        # One byte more than allowed tells a file that is too long from one that just fits.
        data = _read_fifo(file.fileno(), most, fifo_seconds) if kind else file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Opening a FIFO would wait for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _read_fifo(descriptor: int, most: int, seconds: float) -> bytes:
    """Up to `most` + 1 bytes of a FIFO that was opened without blocking: until then it seems empty."""
    poll, end, data = select.poll(), time.monotonic() + seconds, b""
    poll.register(descriptor, select.POLLIN)
    while len(data) <= most:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise OSError(errno.ETIMEDOUT, f"it is a FIFO that was not written and closed within {seconds:g} s")
        part = os.read(descriptor, 1 << 20)
        if not part:
            break
        data += part
    return data
