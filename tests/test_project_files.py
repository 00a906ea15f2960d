"""What is stated in more than one file of the project is the same in all: versions, tools, Pythons."""

import re
import tomllib

import pytest
import yaml

from qtrain import __version__
from tests.system import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\W*([\w-]+)==([\d.]+)", text, re.MULTILINE))


def test_the_version_is_one():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    sections = re.findall(r"^## (\S+)(?: \(\d{4}-\d\d-\d\d\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", __version__] and "0.1.0" in sections


def test_the_lock_file_has_the_tested_versions():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    locked = {package["name"]: package["version"] for package in lock["package"] if "version" in package}
    tested = pins((ROOT / "requirements.txt").read_text())
    assert tested.keys() >= {"torch", "triton"} and {name: locked[name] for name in tested} == tested
    named = {
        re.split(r"[\[><=;]", line)[0]
        for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for line in lines
    }
    assert named - {"psutil", "qtrain"} <= locked.keys(), "run uv lock"  # psutil: of Windows alone


def test_hooks_use_the_tools_of_make_lint():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = pins("\n".join(tool for hook in repository["hooks"] for tool in hook["additional_dependencies"]))
    tested = pins((ROOT / "requirements-dev.txt").read_text())
    assert tested.items() <= hooks.items()


def test_the_workflows_run_on_every_supported_python():
    supported = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["cpu"]["strategy"]["matrix"]["python"] == supported
    assert PROJECT["requires-python"] == f">={supported[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_starts_exists(path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
    assert all((ROOT / name).exists() for name in re.findall(r"\b(?:tests|docs)/[\w/.]+", text))
