"""What tests of data share."""

import multiprocessing
from types import SimpleNamespace

import pytest

from qtrain.data import loader

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["qtrain.data", "datasets"])


@pytest.fixture(autouse=True)
def data_processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a process that has imported torch and holds nothing else: spawned, each imports it for a second."""
    monkeypatch.setattr(loader, "multiprocessing", SimpleNamespace(get_context=lambda method: SERVER))
