"""The wheel: one package with recipes and a console command for each script; what it requires and what it can do
without."""

import ast
import functools
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from qtrain import SCRIPTS, __version__
from tests.system import ROOT, flags

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED_AS = {"sklearn": "scikit-learn", "PIL": "pillow", "pynvml": "nvidia-ml-py"}
"""Modules whose package has another name."""
COMES_WITH = {"torchvision": "timm", "jinja2": "torch", "fsspec": "torch", "tqdm": "huggingface-hub"}
"""Packages that a required one requires."""
IN_NO_EXTRA = {"mlflow"}
"""Packages that are named by a message alone: this one brings a server and a database."""


def required(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pinned(file: str) -> dict[str, Requirement]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return required([line for line in lines if line and not line.startswith("-r")])


LIBRARY = required(PROJECT["dependencies"])
EXTRAS = {name: required(lines) for name, lines in PROJECT["optional-dependencies"].items()}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Top-level names of the modules that a file imports when it is imported, and later, in functions."""
    found: tuple[set[str], set[str]] = (set(), set())

    def visit(node: ast.AST, later: bool) -> None:
        if isinstance(node, ast.Import):
            found[later].update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found[later].add(node.module.partition(".")[0])
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.Module):  # no expression imports anything
            inside = later or isinstance(node, ast.FunctionDef | ast.If)  # `if TYPE_CHECKING`
            for child in ast.iter_child_nodes(node):
                visit(child, inside)

    visit(ast.parse(path.read_text()), False)
    return found


@functools.cache
def packages() -> tuple[set[str], set[str]]:
    """Packages that qtrain imports at its start, and later."""
    found = [imports(path) for path in (ROOT / "qtrain").rglob("*.py")]
    own = {"qtrain", *sys.stdlib_module_names, *COMES_WITH}
    at_start, later = (set().union(*names) - own for names in zip(*found, strict=True))
    return tuple({canonicalize_name(INSTALLED_AS.get(name, name)) for name in names} for names in (at_start, later))


def test_what_is_imported_at_the_start_is_required():
    at_start, _ = packages()
    assert len(at_start) > 6 and at_start <= LIBRARY.keys()


def test_whatever_else_is_imported_is_in_an_extra():
    optional = set().union(*(EXTRAS[name] for name in ("track", "eval", "export", "bench")))
    _, later = packages()
    assert later - LIBRARY.keys() <= optional | IN_NO_EXTRA
    assert not optional & LIBRARY.keys()


def test_the_tested_versions_are_in_the_ranges():
    """requirements.txt names every required package, at a version or a range that the library's range has."""
    tested = pinned("requirements.txt")
    assert tested.keys() - {"torchvision"} == LIBRARY.keys() - {"pillow"}  # torchvision is pinned with torch for timm
    for name, requirement in LIBRARY.items():
        for spec in tested.get(name, requirement).specifier:
            assert spec.operator != "==" or spec.version in requirement.specifier, f"{name} {spec}"


def test_make_setup_installs_the_extra_dev():
    tested, dev = pinned("requirements-dev.txt"), dict(EXTRAS["dev"])
    for extra in dev.pop("qtrain").extras:
        dev |= EXTRAS[extra]
    assert {name: r.specifier for name, r in tested.items()} == {name: r.specifier for name, r in dev.items()}


def test_every_script_is_a_console_command():
    commands = {f"qtrain-{name.replace('_', '-')}": f"qtrain.scripts.{name}:command" for name in SCRIPTS}
    assert PROJECT["scripts"] == commands
    assert all((ROOT / f"qtrain/scripts/{name}.py").samefile(ROOT / f"{name}.py") for name in SCRIPTS)


# ---- the wheel itself ------------------------------------------------------------------------------------------------


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-index", "--no-deps", "--quiet"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    left = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left, symlinks=True)  # building writes into the source folder
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", folder)
    (made,) = folder.glob("qtrain-*.whl")
    return made


def test_the_installed_commands_work_from_another_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert not any(info.external_attr >> 28 == 0o12 for info in archive.infolist())  # copies, no links
    assert {name.partition("/")[0] for name in names} == {"qtrain", f"qtrain-{__version__}.dist-info"}
    recipes = {f"qtrain/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.json")}
    choices = {str(path.relative_to(ROOT)) for path in (ROOT / "qtrain/kernels/choices").glob("*.json")}
    assert choices and recipes | choices == {name for name in names if name.endswith(".json")}

    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    pip("install", wheel, "--no-compile", "--target", installed)
    elsewhere.mkdir()
    assert {p.name for p in (installed / "bin").iterdir()} >= PROJECT["scripts"].keys()
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words: str) -> str:
        outcome = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout

    where = run(sys.executable, "-c", "import qtrain; print(qtrain.quantize and qtrain.__file__)").strip()
    assert Path(where).is_relative_to(installed)
    (elsewhere / "a.txt").write_text("some text " * 500)
    commands, tokenize = installed / "bin", flags(files="a.txt", split="all", tokenizer="byte", output_dir="tokens")
    run(f"{commands}/qtrain-tokenize-data", *tokenize)
    data = {"type": "token", "dataset_dir": "tokens"}
    recipe = {"config": "configs/quickstart.json", "train_ds": data, "eval_ds": data, "seq_len": 32, "device": "cpu"}
    short = {"n_steps": 3, "batch_size": 2, "eval_sequences": 2, "sample_tokens": 1, "export": False}
    assert "memory" in run(f"{commands}/qtrain-llm-pretrain", *flags(**recipe, **short))
    (metrics,) = elsewhere.glob("runs/llm_pretrain/*/metrics.jsonl")
    assert '"step": 3' in metrics.read_text()
