"""A hub that does not answer costs one short timeout."""

import socket
import threading
import time
from collections.abc import Iterator

import huggingface_hub.constants
import pytest

from qtrain.core import hub
from qtrain.core.errors import UserError


@pytest.fixture
def server(monkeypatch) -> Iterator[socket.socket]:
    """A socket that is the hub. It accepts connections (the kernel does) and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        hub.hub_reachable.cache_clear(), hub._offline_by_setting.cache_clear()
        yield listening
        hub.hub_reachable.cache_clear(), hub._offline_by_setting.cache_clear()


def test_a_hub_that_accepts_and_never_answers(server, monkeypatch):
    monkeypatch.setenv("QTRAIN_HUB_TIMEOUT", "0.5")
    start = time.monotonic()
    with pytest.raises(UserError, match=r"could not be reached within 0\.5 s \(QTRAIN_HUB_TIMEOUT"):
        hub.hub_file("nobody/nothing", "config.json", "--model", "Use a local one.")
    assert time.monotonic() - start < 5 and huggingface_hub.constants.HF_HUB_OFFLINE


def test_any_answer_will_do(server):
    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    assert hub.hub_reachable() and not huggingface_hub.constants.HF_HUB_OFFLINE
    thread.join()


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none(server, monkeypatch, value):
    monkeypatch.setenv("QTRAIN_HUB_TIMEOUT", value)
    with pytest.raises(UserError, match=f"^QTRAIN_HUB_TIMEOUT: {value!r} is not"):
        hub.hub_reachable()
