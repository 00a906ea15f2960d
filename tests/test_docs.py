"""The documentation: every command on every page parses with the parser that will read it, every link leads somewhere,
samples and listings are the code's, and the site has all pages."""

import dataclasses
import inspect
import pkgutil
import re
import tomllib
import typing

import numpy as np
import pytest
import yaml

import llm_pretrain
from qtrain import optim
from qtrain.core.errors import UserError
from qtrain.core.flags import Shell
from qtrain.models import EXPORT_FORMATS
from qtrain.train.plan.checked_settings import check_settings
from tests.data.corpora import write_raw
from tests.documentation import (
    BLOCK,
    ELSEWHERE,
    PAGES,
    Command,
    blocks,
    check_objects,
    commands,
    launched,
    load_reference,
    name_of,
    parse_command,
)
from tests.system import ROOT, call

COMMANDS = {command.label: command for page in PAGES for command in commands(page)}
OURS = [command for command in COMMANDS.values() if command.module()]
LAUNCHED = [command for command in OURS if command.words[0] == "torchrun"]
OTHERS = [command for command in COMMANDS.values() if not command.module()]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REFERENCE = load_reference()
exclusions_table = REFERENCE.exclusions_table


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", OURS, ids=lambda command: command.label)
def test_a_command_parses(command, monkeypatch):
    module, argv = command.module()
    if module in ("benchmarks.results", "benchmarks.supported"):
        assert not argv
        return
    check_objects(parse_command(module, argv, monkeypatch))


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.label)
def test_another_command_names_what_is_there(command):
    first, *rest = command.words
    if first == "make":
        assert set(rest) <= TARGETS
    elif first in PROJECT["scripts"]:
        assert rest[0] == "--completion" and rest[1] in typing.get_args(Shell)
    elif "pytest" in rest:
        assert (ROOT / rest[rest.index("pytest") + 1].partition("::")[0]).exists()
    elif first == "pip":
        assert (
            rest[0] == "install"
            and set(re.findall(r"\w+", "".join(re.findall(r"\.\[(.*)\]", rest[-1]))))
            <= PROJECT["optional-dependencies"].keys()
        )
    elif first.endswith("python"):
        assert (ROOT / rest[0]).exists() or rest[0] in ("-m", "-c"), command.line
    else:
        assert first.rpartition("/")[2] in ELSEWHERE, command.line


@pytest.mark.parametrize("command", LAUNCHED, ids=lambda command: command.label)
def test_a_launched_world_can_share_the_batch(command, monkeypatch):
    launcher, _ = launched(command.words)
    nodes = int(launcher.nnodes.split(":")[-1])
    world = nodes * int(launcher.nproc_per_node)
    module, argv = command.module()
    settings = parse_command(module, argv, monkeypatch)
    planned = dataclasses.replace(settings, dry_run=True, gpu="h200", world_size=world, resume=None)
    assert check_settings(planned, module).geometry.world == world
    if nodes > 1:
        assert launcher.rdzv_backend == "c10d" and launcher.rdzv_endpoint.endswith(":29500") and launcher.rdzv_id


def test_slurm_asks_for_the_machines_that_torchrun_starts():
    (block,) = [block for page in PAGES for _, block in blocks(page) if "#SBATCH" in block]
    lines = block.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = dict(re.fullmatch(r"#SBATCH --([\w-]+)=(\S+)", line).groups() for line in lines if "#SBATCH" in line)
    assert asked.keys() <= {"job-name", "nodes", "ntasks-per-node", "gpus-per-node"} and asked["ntasks-per-node"] == "1"
    assert f"--nnodes {asked['nodes']} --nproc_per_node {asked['gpus-per-node']} " in block


def test_there_are_such_commands_and_a_wrong_one_is_found(monkeypatch):
    assert len(OURS) > 70 and len(LAUNCHED) == 3 and len(OTHERS) > 15
    for line in (
        "python llm_pretrain.py --quantise int8",
        "python -m qtrain export RUN --formats hf",
        "python -m qtrain.bench.optim_step --modl qwen2.5-1.5b",
    ):
        with pytest.raises(UserError), monkeypatch.context() as patch:
            parse_command(*Command("x.md", line).module(), patch)
    with pytest.raises(UserError, match="grad_wait"), monkeypatch.context() as patch:
        argv = ["--quantize", "int8", "--quantize_kwargs", '{"grad_wait":"bf16"}']
        check_objects(parse_command("llm_pretrain", argv, patch))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_says_its_language(page):
    """Shell is what the tests above read; text is what a program prints."""
    assert {language for language, _ in blocks(page)} <= {"bash", "text", "python", "json"}


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_of_a_page_exist(page):
    text = page.read_text()
    plain = BLOCK.sub("", text)
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", plain):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    for named in re.findall(r"`((?:tests|docs|qtrain|configs|examples|benchmarks)/[\w/.*]+)`", plain):
        assert list(ROOT.glob(named.rstrip("/"))), named


# ---- the site --------------------------------------------------------------------------------------------------------


class Settings(yaml.SafeLoader):
    """mkdocs.yml names a function, of a package that is not needed here."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)


def files_of(entries: list) -> list[str]:
    """Files of mkdocs' navigation."""
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += [value] if isinstance(value, str) else files_of(value)
    return found


def test_the_navigation_has_every_page_once():
    written = [name_of(page).removeprefix("docs/") for page in PAGES if "docs" in page.parts]
    assert sorted(files_of(SITE["nav"])) == sorted([*written, *REFERENCE.pages()])


def test_the_reference_has_every_flag_and_every_entry():
    pages = REFERENCE.pages()
    fields = [field.name for field in dataclasses.fields(llm_pretrain.PretrainSettings) if field.init]
    assert all(f"| `--{name}` |" in pages["reference/llm_pretrain.md"] for name in fields)
    assert all(f"### `{name}`" in pages["reference/options_optimizers.md"] for name in optim.OPTIMIZERS.names())
    assert REFERENCE.exports_table() in pages["reference/options_exports.md"]
    assert exclusions_table() in pages["reference/options_exclusions.md"]
    for path, text in pages.items():
        rows = [line for line in text.splitlines() if line.startswith("|")]
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert rows == [] or (max(cells) <= 5 and min(cells) >= 3), path


def test_pages_ask_no_other_host():
    """What `make docs` looks at in each page."""
    assert REFERENCE.requests_elsewhere('<a href="https://x.org">a link</a><script src="assets/a.js"></script>') == []
    for asking in (
        '<script src="https://x.org/a.js"></script>',
        '<link rel="stylesheet" href="//x.org/a.css">',
        '<img alt="" src="http://x.org/a.png">',
        "<style>@import url(https://x.org/a.css)</style>",
    ):
        assert REFERENCE.requests_elsewhere(f"<p>{asking}</p>"), asking


# ---- what pages say is what the code has -----------------------------------------------------------------------------


def test_the_sample_scheme_is_the_packages():
    text = (ROOT / "docs/tutorials/scheme.md").read_text()
    samples = re.findall(r"^```python\n(@SCHEMES.*?)^```$", text, re.MULTILINE | re.DOTALL)
    schemes = [path.read_text() for path in (ROOT / "qtrain/quant/schemes").glob("*.py")]
    assert samples and all(any(sample in scheme for scheme in schemes) for sample in samples)


PLANS = re.findall(
    r"```bash\n(python llm_pretrain\.py[^`]*--world_size[^`]*)```\n\n<!-- plan -->\n```text\n(.*?)```",
    (ROOT / "docs/distributed.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(("command", "table"), PLANS, ids=lambda text: " ".join(text.split())[:40])
def test_the_table_is_what_its_command_prints(command, table, tmp_path, monkeypatch):
    write_raw(tmp_path / "fineweb_edu_train/0.bin", np.arange(20_000) % 200)
    monkeypatch.chdir(tmp_path)
    done = call(llm_pretrain.main, Command("", command.replace("\\\n", " ")).module()[1])
    assert done.code == 0, done.err
    assert done.out[done.out.index("\nsizes ") + 1 :] == table


def test_there_is_such_a_table():
    assert len(PLANS) == 1


def test_the_page_of_exports_has_every_format():
    text = (ROOT / "docs/export.md").read_text()
    named = set(re.findall(r"`(\w+)`", text[text.index("## Formats") : text.index("## Losses")]))
    assert set(EXPORT_FORMATS.names()) <= named


PYTHON = (ROOT / "docs/python.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(qtrain\.[\w.]+)", PYTHON))))
def test_a_name_of_the_library_is_one(name):
    assert callable(pkgutil.resolve_name(name)) or name == "qtrain.optim"


def test_the_library_page_lists_every_optimizer():
    made = {name for name in optim.__all__ if inspect.isfunction(getattr(optim, name)) and name[0].isupper()}
    section = PYTHON.split("## `qtrain.optim`")[1].split("##")[0]
    assert made <= set(re.findall(r"`(\w+)`", section))


def test_the_readme_is_a_front_door():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert "make quickstart" in text and "make test" in text
