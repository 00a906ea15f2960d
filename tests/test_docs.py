"""The commands of docs/distributed.md parse with the parsers that will read them; its tables are what they print. The
sample of docs/extending.md is the code that it describes."""

import dataclasses
import inspect
import pkgutil
import re
import shlex

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

import llm_pretrain
from qtrain import optim
from qtrain.core.config import parse
from qtrain.models import EXPORT_FORMATS
from qtrain.models.hf.formats.table import exports_table
from qtrain.train.plan.checked_settings import check_settings
from tests.data.corpora import write_raw
from tests.system import ROOT, call

TEXT = (ROOT / "docs/distributed.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
SCRIPT = "llm_pretrain.py"
OF_SCRIPT = [line for line in COMMANDS if SCRIPT in line]
LAUNCHED = [line for line in OF_SCRIPT if "torchrun" in line]


def test_the_sample_scheme_is_the_packages():
    samples = re.findall(r"^```python\n(@SCHEMES.*?)^```$", (ROOT / "docs/extending.md").read_text(), re.M | re.S)
    schemes = [path.read_text() for path in (ROOT / "qtrain/quant/schemes").glob("*.py")]
    assert samples and all(any(sample in scheme for scheme in schemes) for sample in samples)


def words_of(line: str) -> tuple[list[str], list[str]]:
    """The words before and after the script's name."""
    words = shlex.split(line, comments=True)
    at = words.index(SCRIPT)
    return words[:at], words[at + 1 :]


@pytest.mark.parametrize("line", OF_SCRIPT, ids=lambda line: " ".join(line.split())[:70])
def test_the_command_parses(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse(llm_pretrain.PretrainSettings, words_of(line)[1], SCRIPT)


@pytest.mark.parametrize("line", LAUNCHED, ids=lambda line: " ".join(line.split())[:70])
def test_the_launchers_part_parses_and_its_world_can_share_the_batch(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    before, argv = words_of(line)
    launcher = get_args_parser().parse_args([*before[before.index("torchrun") + 1 :], SCRIPT])
    nodes = int(launcher.nnodes.split(":")[-1])
    world = nodes * int(launcher.nproc_per_node)
    settings = parse(llm_pretrain.PretrainSettings, argv, SCRIPT)
    planned = dataclasses.replace(settings, dry_run=True, gpu="h200", world_size=world, resume=None)
    assert check_settings(planned, "llm_pretrain").geometry.world == world
    if nodes > 1:
        assert launcher.rdzv_backend == "c10d" and launcher.rdzv_endpoint.endswith(":29500") and launcher.rdzv_id


def test_slurm_asks_for_the_machines_that_torchrun_starts():
    (block,) = [block for block in BLOCKS if "#SBATCH" in block]
    lines = block.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = dict(re.fullmatch(r"#SBATCH --([\w-]+)=(\S+)", line).groups() for line in lines if "#SBATCH" in line)
    assert asked.keys() <= {"job-name", "nodes", "ntasks-per-node", "gpus-per-node"} and asked["ntasks-per-node"] == "1"
    assert f"--nnodes {asked['nodes']} --nproc_per_node {asked['gpus-per-node']} " in block


PLANS = re.findall(
    r"```\n(python llm_pretrain\.py[^`]*--world_size[^`]*)```\n\n<!-- plan -->\n```\n(.*?)```", TEXT, re.DOTALL
)


@pytest.mark.parametrize(("command", "table"), PLANS, ids=lambda text: " ".join(text.split())[:40])
def test_the_table_is_what_its_command_prints(command, table, tmp_path, monkeypatch):
    write_raw(tmp_path / "fineweb_edu_train/0.bin", np.arange(20_000) % 200)
    monkeypatch.chdir(tmp_path)
    done = call(llm_pretrain.main, words_of(command.replace("\\\n", " "))[1])
    assert done.code == 0, done.err
    assert done.out[done.out.index("\nsizes ") + 1 :] == table


def test_the_document_has_such_commands():
    assert len(PLANS) == 2 and len(LAUNCHED) == 3 and len(OF_SCRIPT) == 7


def test_the_table_of_exports_is_that_of_the_declarations():
    text = (ROOT / "docs/export.md").read_text()
    assert text[text.index("| scheme |") :] == exports_table()
    named = set(re.findall(r"`(\w+)`", text[text.index("## Formats") : text.index("## What is equal")]))
    assert set(EXPORT_FORMATS.names()) <= named


PYTHON = (ROOT / "docs/python.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(qtrain\.[\w.]+)", PYTHON))))
def test_a_name_of_the_library_is_one(name):
    assert callable(pkgutil.resolve_name(name)) or name == "qtrain.optim"


def test_the_library_page_lists_every_optimizer():
    made = {name for name in optim.__all__ if inspect.isfunction(getattr(optim, name)) and name[0].isupper()}
    section = PYTHON.split("## `qtrain.optim`")[1].split("##")[0]
    assert made <= set(re.findall(r"`(\w+)`", section))
