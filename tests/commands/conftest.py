"""The working directory of the tests of `python -m qtrain generate`."""

from pathlib import Path

import pytest

from tests.commands.generated import make_mistakes
from tests.system import once


@pytest.fixture
def runs_folder(tmp_path_factory, monkeypatch) -> Path:
    """Two runs, and what is none; made once."""
    made = once(tmp_path_factory, "generated", make_mistakes)
    monkeypatch.chdir(made)
    return made
