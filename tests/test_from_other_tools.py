"""docs/from_other_tools.md: each of our flags in it parses with the script that has it."""

import re
import shlex

import pytest

import benchmark_mm
import llm_finetune
import llm_pretrain
import tokenize_data
from qtrain.commands.evaluate import EvaluateSettings, as_flags
from qtrain.core.config import parse
from qtrain.train.settings.settings import VisionSettings
from tests.documentation import check_objects
from tests.system import ROOT

TEXT = (ROOT / "docs/from_other_tools.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| `")]
OURS = [ours.partition(";")[0] for _, ours in ROWS if ours.startswith("`")]
COMMANDS = sorted({command for ours in OURS for command in re.findall(r"`([^`]*--[^`]*)`", ours)})
SETTINGS = {
    "llm_pretrain.py": llm_pretrain.PretrainSettings,
    "llm_finetune.py": llm_finetune.FinetuneSettings,
    "timm_finetune.py": VisionSettings,
    "tokenize_data.py": tokenize_data.TokenizeSettings,
    "benchmark_mm.py": benchmark_mm.BenchmarkSettings,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_ours_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    first, *words = shlex.split(command)
    if first == "qtrain":
        parse(EvaluateSettings, as_flags(words[1:]), "x")
        return
    script = first if first in SETTINGS else "llm_pretrain.py"
    settings = parse(SETTINGS[script], words if first in SETTINGS else [first, *words], script)
    check_objects(settings)


def test_every_row_has_ours_or_a_reason():
    assert len(ROWS) > 140 and all(len(row) == 2 for row in ROWS)
    for theirs, ours in ROWS:
        assert ours.startswith("`") or re.match(r"no: \S", ours), theirs
