"""What trackio has stored on this machine."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest


def keep_locally(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Store runs under `folder`, or where an earlier test of this process did: trackio reads the variable once."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder))


def stored(project: str) -> list[tuple[int, dict[str, Any]]]:
    """Step and metrics of every call for a project, whose name no other test has."""
    from trackio.sqlite_storage import SQLiteStorage

    with sqlite3.connect(SQLiteStorage.get_project_db_path(project)) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, json.loads(metrics)) for step, metrics in rows]
