"""Files that never end or never answer are named, and nothing waits for them."""

import os
import socket
import threading
import time

import pytest

from qtrain.core import checks
from qtrain.core.checks import read_json
from qtrain.core.errors import UserError
from qtrain.core.reading import read_small, refuse_special, special_file
from qtrain.train.state.checkpoint_files import IncompleteCheckpoint, read_marker


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.symlink("gone", "dangling")
    os.symlink("loop", "loop")
    os.symlink("fifo", "link")
    (tmp_path / "file").write_bytes(b"[1]")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        yield tmp_path


KINDS = {
    "fifo": "a FIFO, not a regular file",
    "link": "a FIFO, not a regular file",
    "socket": "a socket, not a regular file",
    "/dev/zero": "a device, not a regular file",
    "dangling": "a symbolic link to 'gone', which does not exist",
    "loop": "a symbolic link that leads back to itself",
    "file": None,
    ".": None,
    "gone": None,
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_files(folder, name):
    assert special_file(name) == KINDS[name]
    if KINDS[name]:
        with pytest.raises(UserError, match=f"^--files: '{name}' is {KINDS[name]}"):
            refuse_special(name, "--files")


def test_small_files(folder):
    assert read_small("file", 3) == b"[1]" and read_json("file", "--config") == [1]
    with pytest.raises(OSError, match="it has more than 2 bytes"):
        read_small("file", 2)
    for name in ("fifo", "socket", "/dev/zero"):
        with pytest.raises(OSError, match=KINDS[name]):
            read_small(name, 100)


def test_a_recipe_out_of_a_fifo(folder, monkeypatch):
    """As `--config <(command)` gives one. Without a writer, or with one that does not end, it is refused in time."""

    def write(text: bytes, wait: float) -> None:
        with open("fifo", "wb") as file:
            file.write(text)
            file.flush()
            time.sleep(wait)

    text = b'{"lr": 1}' + b" " * 300_000  # more than a pipe holds
    writer = threading.Thread(target=write, args=(text, 0))
    writer.start()
    assert read_json("fifo", "--config") == {"lr": 1}
    writer.join()
    monkeypatch.setattr(checks, "FIFO_SECONDS", 0.1)
    refused = "^--config: cannot read fifo: it is a FIFO that was not written and closed within 0.1 s"
    with pytest.raises(UserError, match=refused):
        read_json("fifo", "--config")
    slow = threading.Thread(target=write, args=(b"{", 0.5))
    slow.start()
    with pytest.raises(UserError, match=refused):
        read_json("fifo", "--config")
    slow.join()


def test_an_empty_pipe_whose_writer_has_gone(folder):
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(UserError, match="not valid JSON"):
        read_json(f"/dev/fd/{reading}", "--config")
    os.close(reading)
    with pytest.raises(UserError, match="can be read by one process only; write it to a file"):
        read_json(f"/dev/fd/{reading}", "--config")


@pytest.mark.parametrize("name", ["/dev/zero", "fifo", "loop", "socket"])
def test_a_marker_that_never_ends(folder, name):
    checkpoint = folder / "00000005"
    checkpoint.mkdir()
    os.symlink(name if name[0] == "/" else f"../{name}", checkpoint / "COMPLETE")
    with pytest.raises(IncompleteCheckpoint, match="its COMPLETE file is damaged"):
        read_marker(checkpoint)


def test_a_byte_order_mark_before_json(folder):
    (folder / "file").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json("file", "--config") == [1]
