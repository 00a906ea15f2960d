"""Every example runs, and does what it says."""

import ast
import importlib.util
from types import ModuleType

import pytest

from tests.system import ROOT

FOLDER = ROOT / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_has_a_test():
    assert NAMES == ["fp8_linear", "hf_trainer", "own_loop", "stochastic_rounding", "trl_sft"]


@pytest.mark.parametrize("name", NAMES)
def test_it_says_how_it_is_run(name):
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert f"python -m examples.{name}" in docstring


def test_an_fp8_linear_has_the_errors_of_e4m3():
    """A code has 3 bits of mantissa: half a unit in the last place is at most 1/16, its root mean square some 2.6%; of
    a product of two, the root of two of that."""
    errors = load("fp8_linear").main()
    assert all(0.02 < error < 0.045 for error in errors.values()), errors


def test_an_own_loop_learns():
    losses = load("own_loop").main(steps=12)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("name", ["hf_trainer", "trl_sft"])
def test_other_trainers_learn(name):
    losses = load(name).main(steps=20)
    assert losses[-1] < losses[0] - 0.3


def test_stochastic_rounding_adds_up(tmp_path):
    curves = load("stochastic_rounding").main(str(tmp_path / "plot.html"))
    assert curves["bf16, to nearest"][-1] == 1.0
    assert curves["bf16, stochastic"][-1] == pytest.approx(curves["exact"][-1], abs=0.02)
    assert "stochastic" in (tmp_path / "plot.html").read_text()
